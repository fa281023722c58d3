"""The recipe's gate and exchange, without megatron-core."""

from typing import Any

import torch

from fmoe.gates import GATES
from fmoe.gates.switch import SwitchRouter
from pretrain.config import ModelConfig, ParallelConfig


def gate_options(model: ModelConfig) -> dict[str, Any]:
    """Keywords of the gate."""
    options: dict[str, Any] = {
        "capacity_factor": model.capacity_factor,
        "eval_capacity_factor": model.eval_capacity_factor,
    }
    if issubclass(GATES.get(model.gate, object), SwitchRouter):
        options["jitter"] = model.jitter
    return options


def exchange_options(parallel: ParallelConfig) -> dict[str, Any]:
    """Keywords of the exchange: those that the recipe sets, since not every exchange has all of them."""
    names = ("chunks", "max_rows", "shadow", "node_size")
    options = {name: getattr(parallel, name) for name in names}
    options = {name: value for name, value in options.items() if value != getattr(ParallelConfig, name)}
    if parallel.wire is not None:
        options["wire_dtype"] = {"fp32": torch.float32, "bf16": torch.bfloat16}[parallel.wire]
    return options
