"""Memory that a layer saves for its backward pass, and peak memory of a step.

The peak of each contender is measured in a new process, forked from a server that has imported everything and computed
nothing. It is the high-water mark of resident memory in two steps, minus the resident memory before them. Weights and
batch exist before; gradients, activations, scratch and memory that the allocator keeps are in the figure.
"""

import ctypes
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from bench.layer.problem import Problem, Shape

_PRELOADED = [
    "bench.layer.peers",
    "fmoe",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.nemotron_h.modeling_nemotron_h",
    "megatron.core.models.gpt.gpt_layer_specs",
]
_STEPS = 2  # some contenders keep memory of the first for the second
_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Saved:
    """Bytes that autograd saves in a forward pass, without parameters and input; each memory block counts once.

    Attributes:
        total: of the whole layer.
        router: of its router; the rest is of dispatch, experts and combine.
    """

    total: int
    router: int


class _Counter(saved_tensors_hooks):
    """Context that counts saved tensors by the memory that they keep alive: a slice counts as its whole block."""

    def __init__(self, others: list[Tensor]):
        self._others = {tensor.untyped_storage().data_ptr() for tensor in others}
        self._kept: dict[int, tuple[int, bool]] = {}
        self.in_router = False
        super().__init__(self._note, lambda x: x)

    def _note(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._others:
            self._kept.setdefault(storage.data_ptr(), (storage.nbytes(), self.in_router))
        return x

    def saved(self) -> Saved:
        values = self._kept.values()
        return Saved(sum(size for size, _ in values), sum(size for size, in_router in values if in_router))


def saved_for_backward(module: nn.Module, x_TD: Tensor) -> Saved:
    """Return the bytes that ``module(x_TD)`` saves; the router is the first submodule named router or gate."""
    leaf = x_TD.detach().requires_grad_()
    counter = _Counter([leaf, *module.parameters()])
    router = next((m for name, m in module.named_modules() if name.rpartition(".")[2] in ("router", "gate")), None)
    hooks = []
    if router is not None:
        hooks.append(router.register_forward_pre_hook(lambda *_: setattr(counter, "in_router", True)))
        hooks.append(router.register_forward_hook(lambda *_: setattr(counter, "in_router", False)))
    with counter:
        out = module(leaf)  # held until all is counted: freed memory could be counted as another tensor's
    for hook in hooks:
        hook.remove()
    del out
    return counter.saved()


class Peaks:
    """Server that measures peaks, each in a new process, one after the other."""

    def __init__(self):
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)

    def __call__(self, name: str, problem: Problem, backward: bool, threads: int) -> int | None:
        """Return a contender's peak, in bytes; None if the system does not report it, or the contender fails."""
        if not sys.platform.startswith("linux"):
            return None
        ours, theirs = self._context.Pipe(duplex=False)
        arguments = (name, problem.shape, problem.dtype, problem.skew, problem.seed, backward, threads, theirs)
        child = self._context.Process(target=_measure_in_child, args=arguments, daemon=True)
        child.start()
        theirs.close()
        try:
            return json.loads(ours.recv_bytes())
        except EOFError:
            return None
        finally:
            ours.close()
            child.join()


def _measure_in_child(
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    skew: float | None,
    seed: int,
    backward: bool,
    threads: int,
    connection,
) -> None:
    from bench.layer.contenders import layer_step, layers
    from pretrain.start import process

    torch.set_num_threads(threads)
    layer = layers()[name]
    try:
        small = Shape(shape.name, 64 * shape.top_k, 64, 64, shape.num_experts, shape.top_k, shape.gated)
        layer_step(layer, Problem(small, dtype, skew), backward)()  # what the first call loads is not counted
        step = layer_step(layer, Problem(shape, dtype, skew, seed), backward)
        peak = _peak(step)
    finally:
        process.stop()
    connection.send_bytes(json.dumps(peak).encode())


def _peak(step: Callable[[], None]) -> int | None:
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)  # memory freed by the build would be used again, and not be counted
    try:
        _CLEAR.write_text("5")  # resets the high-water mark: proc(5)
    except OSError:
        return None
    before = _of_status("VmRSS")
    for _ in range(_STEPS):
        step()
    return max(0, _of_status("VmHWM") - before)


def _of_status(key: str) -> int:
    return int(re.search(rf"^{key}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)[1]) * 1024
