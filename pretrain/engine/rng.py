"""States of all random number generators of a process, as values that a checkpoint stores without pickle."""

import random
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed


def seed(value: int) -> None:
    """Seed all random number generators, including those that libraries draw from.

    Megatron's CUDA RNG tracker gets a different seed on each pipeline stage.
    """
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002 - libraries draw from the global one
    torch.manual_seed(value)
    model_parallel_cuda_manual_seed(value + 100 * parallel_state.get_pipeline_model_parallel_rank())


def states() -> dict[str, Any]:
    """Return the states of Python's, numpy's, torch's (CPU, current CUDA device) and Megatron's generators."""
    legacy = np.random.get_state(legacy=False)  # noqa: NPY002 - libraries draw from the global one
    numpy_state = {**legacy, "state": {**legacy["state"], "key": torch.from_numpy(legacy["state"]["key"].astype("i8"))}}
    generators = {
        "python": random.getstate(),
        "numpy": numpy_state,
        "torch": torch.get_rng_state(),
        "megatron": dict(get_cuda_rng_tracker().get_states()),
    }
    if torch.cuda.is_available():
        generators["cuda"] = torch.cuda.get_rng_state()
    return generators


def restore(generators: dict[str, Any]) -> None:
    """Restore the generators from the result of `states`. The state of a device that is missing now is ignored."""
    random.setstate(generators["python"])
    numpy_state = generators["numpy"]
    key = numpy_state["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})  # noqa: NPY002
    torch.set_rng_state(generators["torch"])
    if "megatron" in generators:
        get_cuda_rng_tracker().set_states(generators["megatron"])
    if "cuda" in generators and torch.cuda.is_available():
        torch.cuda.set_rng_state(generators["cuda"])
