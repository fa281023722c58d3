"""Megatron-core on machines without a GPU.

Megatron-core hard-codes the device "cuda". `install` applies `PATCHES`, which redirect it to the CPU. Each patch states
its reason. If torch sees a GPU, `PATCHES` are not applied.
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.jit import _builtins
from torch.utils._device import _device_constructors

from fmoe import random
from megatron_patch import bf16_linear, patches
from megatron_patch.patches import Patch

_CPU = torch.device("cpu")


def _on_cpu(device: Any) -> Any:
    if isinstance(device, str) and device.startswith("cuda"):
        return _CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return _CPU
    return device


def _device_on_cpu(function: Callable) -> Callable:
    """Wrap ``function`` so that its argument ``device`` means the CPU if it is a CUDA device or a number."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = _CPU if isinstance(device, int) else _on_cpu(device)
        return function(*args, **kwargs)

    # TorchScript knows builtin functions by their objects; torch.distributed.optim compiles some when it is imported.
    operator = _builtins._find_builtin(function)
    if operator is not None:
        _builtins._register_builtin(wrapped, operator)
    return wrapped


def _to_on_cpu(to: Callable) -> Callable:
    @functools.wraps(to)
    def wrapped(self, *args, **kwargs):
        return to(self, *map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})

    return wrapped


def _type_for_megatron(type_: Callable) -> Callable:
    """Wrap ``Tensor.type`` to accept CUDA type names, and to return them to callers in megatron-core."""

    @functools.wraps(type_)
    def wrapped(self, dtype=None, *args, **kwargs):
        if dtype is not None:
            if isinstance(dtype, str):
                dtype = dtype.replace("torch.cuda.", "torch.", 1)
            return type_(self, dtype, *args, **kwargs)
        name = type_(self)
        if sys._getframe(1).f_globals.get("__name__", "").startswith("megatron."):
            return name.replace("torch.meta.", "torch.").replace("torch.", "torch.cuda.", 1)
        return name

    return wrapped


class _NullStream:
    """A CUDA stream without a device: everything runs synchronously, and all streams are equal."""

    def __init__(self, *args, **kwargs): ...
    def wait_stream(self, stream) -> None: ...
    def wait_event(self, event) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event=None) -> "_NullEvent":
        return event or _NullEvent()

    def query(self) -> bool:
        return True

    def __eq__(self, other) -> bool:
        return isinstance(other, _NullStream)

    def __hash__(self) -> int:
        return 0


class _NullEvent:
    def __init__(self, *args, **kwargs): ...
    def record(self, stream=None) -> None: ...
    def wait(self, stream=None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end) -> float:
        return 0.0


_STREAM = _NullStream()


def _constant(value: Any) -> Callable[[Any], Any]:
    """Return the ``make`` of a `Patch` that replaces any function with one that always returns ``value``."""
    return lambda old: lambda *args, **kwargs: value


def _cpu_rng_tracker(tracker_class: type) -> type:
    """Return a subclass of ``tracker_class`` that uses torch's CPU generator instead of the CUDA one."""
    # If a position in training is set (`fmoe.random.set_position`), the draws in a `fork` depend only on the position,
    # and on the name and seed of the RNG state.

    class CpuRNGStatesTracker(tracker_class):
        def add(self, name, seed):
            self._is_initialized = True
            if seed in self.seeds_:
                raise ValueError(f"seed={seed} is already used by another RNG state")
            if name in self.states_:
                raise ValueError(f"the RNG state {name} already exists")
            self.seeds_.add(seed)
            self.__dict__.setdefault("_seed_of", {})[name] = seed
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name="model-parallel-rng"):
            if name not in self.states_:
                raise KeyError(f"the RNG state {name} does not exist: add it first")
            outside = torch.get_rng_state()
            branch = None
            # Layers need the position inside a fork too: a sequence parallel model forks around all of its layers. The
            # seed of the generator identifies the position, so a fork gets a seed derived from it. A later fork with
            # the same derived seed continues the draws.
            if random.position() is not None:
                branch = random.branch(name, self.__dict__.get("_seed_of", {}).get(name, 0))
            torch.set_rng_state(self.states_[name])
            if branch is not None and torch.initial_seed() != branch:
                torch.default_generator.manual_seed(branch)
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    return CpuRNGStatesTracker


def _splits_as_numpy(move: Callable) -> Callable:
    """Wrap `maybe_move_tensor_to_cpu` to convert tensors to numpy on request, even if they are on the CPU already."""

    def moved(tensor, as_numpy=False, record_stream=False):
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return move(tensor, as_numpy, False)

    return moved


def _copy_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Fill the storage of ``output``, which was freed, with the storage of ``recomputed``."""
    storage = recomputed.untyped_storage()
    output.untyped_storage().resize_(storage.size())
    output.untyped_storage().copy_(storage)


def _max_without_indices(largest: Callable) -> staticmethod:
    """Return a `calculate_logits_max` that finds each token's largest logit without its index."""

    def calculated(vocab_parallel_logits):
        logits = vocab_parallel_logits.float()
        return logits, logits.amax(-1)

    return staticmethod(functools.wraps(largest)(calculated))


_RANDOM = "megatron.core.tensor_parallel.random"
_MOE = "megatron.core.transformer.moe"

_FACTORIES: tuple[str, ...] = (
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "as_tensor",
    "arange",
    "rand",
    "randn",
    "randint",
    "eye",
)
_FACTORIES += ("linspace", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")

PATCHES = (
    *(Patch("torch", name, _device_on_cpu, 'device="cuda" all over megatron-core') for name in _FACTORIES),
    *(Patch("torch:Tensor", name, _device_on_cpu, 'device="cuda"') for name in _NEW),
    Patch("torch:Tensor", "to", _to_on_cpu, "moves tensors to the current device"),
    Patch("torch:Tensor", "cuda", lambda old: lambda self, *args, **kwargs: self, "masks (fused_softmax.py), buffers"),
    Patch(
        "torch:Tensor", "type", _type_for_megatron, "compared with torch.cuda.* (clip_grads.py:167, optimizer.py:671)"
    ),
    Patch("torch.cuda", "current_device", _constant(_CPU), "buffers (param_and_grad_buffer.py:800), optimizer.py:481"),
    Patch("torch.cuda", "Stream", lambda old: _NullStream, "side streams (param_and_grad_buffer.py:417)"),
    Patch("torch.cuda", "Event", lambda old: _NullEvent, "timing and ordering (token_dispatcher.py:445)"),
    Patch("torch.cuda", "current_stream", _constant(_STREAM), "ordering of communication"),
    Patch("torch.cuda", "default_stream", _constant(_STREAM), "ordering (param_and_grad_buffer.py:422)"),
    Patch("torch.cuda", "stream", lambda old: lambda *a: contextlib.nullcontext(), "blocks on a side stream"),
    Patch("torch.cuda", "synchronize", _constant(None), "p2p_communication.py:398"),
    Patch("torch.cuda", "empty_cache", _constant(None), "optimizer.py:362"),
    Patch(_RANDOM, "CudaRNGStatesTracker", _cpu_rng_tracker, "dropout in model parallel regions (random.py:235)"),
    Patch(
        _RANDOM,
        "_get_cuda_rng_state",
        lambda old: lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
        "activation recomputation saves it (random.py:55)",
    ),
    Patch(
        _RANDOM,
        "_set_cuda_rng_state",
        lambda old: lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state),
        "activation recomputation restores it",
    ),
    Patch(
        _RANDOM,
        "_get_share_storage",
        _constant(_copy_storage),
        "0.17 and later: recomputation of norms compiles a C++ extension, which needs ninja and a compiler",
        required=False,
    ),
    Patch(
        f"{_MOE}.moe_utils",
        "te_general_gemm",
        lambda old: old,
        "Megatron's own router reads a name that is undefined without Transformer Engine (moe_utils.py:1192)",
        required=False,
    ),
    Patch(
        f"{_MOE}.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        _splits_as_numpy,
        "Megatron's own dispatcher passes a tensor as split sizes (moe_utils.py:1093)",
    ),
    Patch(
        "megatron.core.tensor_parallel.cross_entropy:VocabParallelCrossEntropy",
        "calculate_logits_max",
        _max_without_indices,
        "speed only: torch.max along an axis takes several times as long as amax on a CPU (cross_entropy.py:31)",
    ),
    Patch(patches._LINEAR, "forward", bf16_linear.forward_in_float32, "speed only: CPUs without bf16 (layers.py:488)"),
    Patch(patches._LINEAR, "backward", bf16_linear.backward_in_float32, "its backward pass (layers.py:531)"),
)

_installed = False


def install() -> bool:
    """Patch megatron-core for the rest of the process, so that it also runs without a GPU: on the CPU, with gloo.

    Applies `megatron_patch.patches.PATCHES` on every machine and, without a GPU, also `PATCHES` of this module. Further
    calls do nothing.

    Returns:
        True if `PATCHES` of this module are applied, False if torch sees a GPU.

    Raises:
        UserError: the version of megatron-core is not supported, or it lacks a name that a patch replaces.
    """
    global _installed
    patches.install()
    if torch.cuda.is_available():
        return False
    if _installed:
        return True
    # At its first use, `with torch.device(...)` collects the functions that make tensors: it must see the originals.
    _device_constructors()
    patches.apply(PATCHES)
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")  # advice for GPUs
    _installed = True
    return True


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Put models, wrappers and optimizers that are built in this context on the meta device: shapes without memory.

    Raises:
        RuntimeError: `install` has not been called, or torch sees a GPU.
    """
    if not _installed:
        raise RuntimeError("on_meta() needs the CPU runtime: hide GPUs (CUDA_VISIBLE_DEVICES=) and call cpu.install()")
    before = torch.cuda.current_device
    meta = torch.device("meta")
    torch.cuda.current_device = lambda: meta  # type: ignore[assignment, return-value]
    try:
        with meta:
            yield
    finally:
        torch.cuda.current_device = before
