"""Megatron-core 0.16 on machines without a GPU.

Megatron-core says "cuda" where it means "the device". `install` redirects those places to the CPU; `PATCHES` is the
list of all that it changes, each with its reason. Where torch sees a GPU none of it is put in. A name that
megatron-core has moved fails at once and by name, not as wrong numbers later.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors

from fmoe import random
from megatron_patch import adapter, wide
from megatron_patch.patches import Patch, apply
from megatron_patch.version import check_version

_CPU = torch.device("cpu")


def _on_cpu(device: Any) -> Any:
    if isinstance(device, str) and device.startswith("cuda"):
        return _CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return _CPU
    return device


def _device_on_cpu(function: Callable) -> Callable:
    """The function with ``device="cuda"`` (or a CUDA device's number) meaning the CPU."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = _CPU if isinstance(device, int) else _on_cpu(device)
        return function(*args, **kwargs)

    return wrapped


def _to_on_cpu(to: Callable) -> Callable:
    """``Tensor.to``, whose device may stand anywhere."""

    @functools.wraps(to)
    def wrapped(self, *args, **kwargs):
        return to(self, *map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})

    return wrapped


def _type_for_megatron(type_: Callable) -> Callable:
    """``Tensor.type``, which names a CUDA tensor when megatron-core asks, and knows those names as a dtype."""

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
    """A stream of a device that finishes everything at once; all are alike."""

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
    """``make`` of a patch that puts a function returning ``value``, whatever its arguments."""
    return lambda old: lambda *args, **kwargs: value


def _cpu_rng_tracker(tracker_class: type) -> type:
    """The tracker over torch's CPU generator instead of the CUDA one.

    That generator also tells layers where the training is (`fmoe.random`), which must hold within `fork` too, around
    all layers of a sequence parallel model. So a fork branches off from the generator outside of it, and goes on where
    the one before ended only as long as that is the same: what is drawn depends on the position and the tracker's seed.
    """

    class CpuRNGStatesTracker(tracker_class):
        def add(self, name, seed):
            self._is_initialized = True
            if seed in self.seeds_:
                raise ValueError(f"seed {seed} is already used by another RNG state")
            if name in self.states_:
                raise ValueError(f"RNG state {name} is already there")
            self.seeds_.add(seed)
            self.__dict__.setdefault("_seed_of", {})[name] = seed
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name="model-parallel-rng"):
            if name not in self.states_:
                raise KeyError(f"RNG state {name} was never added")
            outside = torch.get_rng_state()
            branch = None
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
    """Megatron's `maybe_move_tensor_to_cpu`, which turns split sizes into numpy only if they were on a GPU."""

    def moved(tensor, as_numpy=False, record_stream=False):
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return move(tensor, as_numpy, False)

    return moved


def _max_without_places(largest: Callable) -> staticmethod:
    """The largest logit of each token: the same values, without their places, which cost most of the time."""

    def calculated(vocab_parallel_logits):
        logits = vocab_parallel_logits.float()
        return logits, logits.amax(-1)

    return staticmethod(functools.wraps(largest)(calculated))


_RANDOM = "megatron.core.tensor_parallel.random"
_MOE = "megatron.core.transformer.moe"
_LINEAR = "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication"

_FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "rand", "randn", "randint", "eye", "linspace"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
)
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")

PATCHES = (
    *(Patch("torch", name, _device_on_cpu, 'device="cuda" all over megatron-core') for name in _FACTORIES),
    *(Patch("torch:Tensor", name, _device_on_cpu, 'device="cuda"') for name in _NEW),
    Patch("torch:Tensor", "to", _to_on_cpu, "moves to the current device"),
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
        f"{_MOE}.moe_utils",
        "te_general_gemm",
        lambda old: old,
        "Megatron's own router reads a name that is unset without Transformer Engine (moe_utils.py:1192)",
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
        _max_without_places,
        "torch.max along an axis takes several times as long as amax on a CPU (cross_entropy.py:31): nothing fails "
        "without",
    ),
    Patch(_LINEAR, "forward", wide.forward_in_float32, "bf16 products without instructions for them (layers.py:488)"),
    Patch(_LINEAR, "backward", wide.backward_in_float32, "the same (layers.py:531)"),
)

_installed = False


def install() -> bool:
    """Lets megatron-core run on the CPU with gloo, for the rest of the process, and puts in what the adapter changes
    on any device (`megatron_patch.adapter`). Safe to call again.

    Returns:
        Whether the CPU runtime is in place; False where torch sees a GPU.

    Raises:
        UserError: megatron-core is outside the supported range, or a patched name has moved.
    """
    global _installed
    version = check_version()
    adapter.install()
    if torch.cuda.is_available():
        return False
    if _installed:
        return True
    # `with torch.device(...)` knows the functions that make tensors by identity, and looks them up when first used.
    _device_constructors()
    apply(PATCHES, version)
    _installed = True
    return True


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Within, models are built, wrapped and given an optimizer on the meta device: shapes without memory.

    Raises:
        RuntimeError: `install` has not put the CPU runtime in, because torch sees a GPU.
    """
    if not _installed:
        raise RuntimeError("on_meta() is over the CPU runtime: hide GPUs (CUDA_VISIBLE_DEVICES=) and call install()")
    before = torch.cuda.current_device
    meta = torch.device("meta")
    torch.cuda.current_device = lambda: meta  # type: ignore[assignment, return-value]
    try:
        with meta:
            yield
    finally:
        torch.cuda.current_device = before
