"""One rank's training step without data: the trainer's own engine on fake tensors, under given loads of the experts.

Fake tensors have shapes, dtypes and a device, but no memory (torch's `FakeTensorMode`). So every part of the trainer
that allocates memory, sends or computes is counted as it is, and nothing has to be modelled. Only numbers that a real
step reads from its data are given: how many rows each expert gets.
"""

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch._library.fake_impl import FakeImplCtx
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from fmoe.exchange import all_to_all
from fmoe.experts import initial
from fmoe.kernels.rows import DispatchPlan
from fmoe.moe import MoE
from megatron_patch import cpu
from pretrain.config import Recipe
from pretrain.engine import Engine
from pretrain.engine.meta import as_rank

# Rows of each expert that a rank of the expert parallel group sends: (number of the layer, from 1; rank; assignments).
Loads = Callable[[int, int, int], Sequence[int]]


def uniform(num_experts: int) -> Loads:
    """Return equal loads of all experts, as far as assignments divide."""
    return lambda layer, rank, assignments: shared_out([1.0] * num_experts, assignments)


def shared_out(shares: Sequence[float], total: int) -> list[int]:
    """Return whole numbers with these shares of ``total``, by largest remainder."""
    exact = [total * share / math.fsum(shares) for share in shares]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


@dataclass(frozen=True)
class Operation:
    """An operation of a step.

    Attributes:
        name: torch's name, such as ``aten.mm.default``.
        shapes: shapes of the tensors that it reads.
        dtype: dtype of the result.
        flops: multiplications and additions, by torch's formulas; 0 for operations that have none.
        moved: bytes that it reads and writes; 0 for a view.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    flops: int
    moved: int


@dataclass(frozen=True)
class Collective:
    """A collective operation: its kind, the ranks of its group, and the bytes of this rank's tensors."""

    kind: str
    ranks: tuple[int, ...]
    num_bytes: int


@dataclass
class Trace:
    """What a rank's step does.

    Attributes:
        steps: number of each operation and collective.
        saved: largest number of bytes that autograd held for backward passes, without weights.
        peak: largest number of bytes that were allocated in the step and alive at the same time, without what
            existed before it.
    """

    steps: Counter[Operation | Collective] = field(default_factory=Counter)
    saved: int = 0
    peak: int = 0


class _Recorder(FakeTensorMode):
    """Fake tensors of the CPU that count what is done with them, and collectives that do nothing."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.trace = Trace()
        self._is_recording = False
        self._alive: dict[int, int] = {}  # bytes of each storage
        self._allocated = 0

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].constant is None:
            return 1.0 if args[0].is_floating_point() else 1  # a loss, a norm: any number that is finite
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs or {})
        result = super().dispatch(func, types, args, kwargs)
        if self._is_recording:
            self._count(func, args, kwargs or {}, result)
        return result

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if self._is_recording:
            group = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.ScriptObject))
            ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
            kind = func._opname.strip("_")
            self.trace.steps[Collective(kind, ranks, max((t.nbytes for t in tensors), default=0))] += 1
        with unset_fake_temporarily():
            # The fake group reads no element. Its coalesced operations have no meta kernels, but take empty tensors.
            has_meta = "coalesced" not in func._opname
            real = tree_map_only(
                FakeTensor,
                lambda t: torch.empty(t.shape if has_meta else 0, dtype=t.dtype, device="meta" if has_meta else "cpu"),
                (args, kwargs),
            )
            result = func(*real[0], **real[1])
        if "allgather" in func._opname:
            sent: Any = tensors[-1]
            outputs: list[Any] = tensors[:-1]
            if sent.constant is not None:
                for output in outputs:  # all ranks have this rank's numbers
                    output.constant.view(-1, sent.numel()).copy_(sent.constant.flatten())
        given = iter(tensors)
        return tree_map_only(Tensor, lambda _: next(given), result)

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_new = [self._allocate(tensor.untyped_storage()) for tensor in outputs]
        is_view = not any(is_new) and not func._schema.is_mutable
        if not outputs or is_view:
            return
        flops = 0
        packet = func._overloadpacket
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
        operation = Operation(
            str(func),
            tuple(tuple(tensor.shape) for tensor in inputs),
            outputs[0].dtype,
            flops,
            sum(tensor.nbytes for tensor in (*inputs, *outputs)),
        )
        self.trace.steps[operation] += 1

    def _allocate(self, storage: torch.UntypedStorage) -> bool:
        """Count the bytes of a storage as long as it is alive; return whether it is a new one."""
        if id(storage) in self._alive:
            return False
        self._alive[id(storage)] = storage.nbytes()
        weakref.finalize(storage, self._free, id(storage)).atexit = False
        self._allocated += storage.nbytes()
        self.trace.peak = max(self.trace.peak, self._allocated)
        return True

    def _free(self, key: int) -> None:
        self._allocated -= self._alive.pop(key)

    def begin(self, engine: Engine) -> None:
        """Start a trace of a step of the engine, whose present tensors are not counted."""
        self._is_recording = True
        for tensor in _persistent(engine):
            self._allocate(tensor.untyped_storage())
        self.trace.peak = self._allocated = 0


class Saved(saved_tensors_hooks):
    """Counts what autograd holds for backward passes: the bytes of storages, without those of weights."""

    def __init__(self, trace: Trace, engine: Engine):
        weights = {id(tensor.untyped_storage()) for tensor in _persistent(engine)}
        boxes: weakref.WeakValueDictionary[int, _Box] = weakref.WeakValueDictionary()
        self._held = 0

        def forget(num_bytes: int) -> None:
            self._held -= num_bytes

        def pack(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()
            if id(storage) in weights:
                return tensor
            box = boxes.get(id(storage))
            if box is None:
                box = _Box(storage)
                boxes[id(storage)] = box
                weakref.finalize(box, forget, storage.nbytes()).atexit = False
                self._held += storage.nbytes()
                trace.saved = max(trace.saved, self._held)
            return tensor, box

        super().__init__(pack, lambda packed: packed if isinstance(packed, Tensor) else packed[0])


@dataclass(frozen=True, eq=False)
class _Box:
    storage: torch.UntypedStorage


class _Samples:
    """Samples of zeros for a GPT, int64 [sequence_length + 1]."""

    def __init__(self, recipe: Recipe):
        self._sample = np.zeros(recipe.model.sequence_length + 1, np.int64)

    def __getitem__(self, n: int) -> np.ndarray:
        return self._sample


def _persistent(engine: Engine) -> Iterator[Tensor]:
    """Yield the tensors that exist between steps."""
    for tensor in (*engine.gpt.parameters(), *engine.gpt.buffers()):
        yield tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if engine.recipe.parallel.is_fully_sharded:
        return
    for chunk in engine.model:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data
            if buffer.param_data is not None:
                yield buffer.param_data


@contextlib.contextmanager
def _given(loads: Loads) -> Iterator[None]:
    """Give the numbers that a step reads from its data: rows of each expert; and make torch take fake tensors."""
    layer = 0
    rows: list[list[int]] = []  # of each expert, by sending rank, in the latest dispatch plan
    split = MoE.split
    from_routing = DispatchPlan.from_routing

    def split_of(moe: Any, *arguments: Any) -> Any:
        nonlocal layer
        layer = moe.layer_number
        return split(moe, *arguments)

    def planned(routing: Any, num_experts: int) -> DispatchPlan:
        group = parallel_state.get_expert_model_parallel_group()
        assignments = routing.expert_TK.numel()
        rows[:] = [list(loads(layer, rank, assignments)) for rank in range(group.size())]
        return replace(from_routing(routing, num_experts), known_counts=rows[group.rank()])

    def to_host(tensors: list[Tensor]) -> list[list[list[int]]]:
        group = parallel_state.get_expert_model_parallel_group()
        local = len(rows[0]) // group.size()
        sent, arrived = (
            [rows[sender][receiver * local : (receiver + 1) * local] for sender, receiver in pairs]
            for pairs in (
                [(group.rank(), peer) for peer in range(group.size())],
                [(peer, group.rank()) for peer in range(group.size())],
            )
        )
        return [[[*counts, 1] for counts in matrix] for matrix in (sent, arrived)]

    def own_rows(_: Any, **limits: Any) -> int:
        return sum(rows[parallel_state.get_expert_model_parallel_rank()])

    def gather_objects(result: list[Any], value: Any, group: Any = None) -> None:
        result[:] = [value] * len(result)

    def undrawn(keys: Sequence[int], count: int, device: torch.device, *options: Any) -> Tensor:
        return torch.empty(len(keys), count, dtype=torch.float32, device=device)

    def convert(module: nn.Module, device: Any = None, dtype: Any = None) -> nn.Module:
        for tensor in (*module.parameters(), *module.buffers()):
            if dtype is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)  # as for real tensors; torch would swap fake ones
        return module

    patches = (
        (MoE, "split", split_of),
        (initial, "draw", undrawn),
        (DispatchPlan, "from_routing", staticmethod(planned)),
        (fake_tensor, "CONSTANT_NUMEL_LIMIT", 1 << 16),  # so that small tensors of known numbers keep them
        (FakeImplCtx, "new_dynamic_size", own_rows),
        (all_to_all, "_to_host", to_host),
        (dist, "all_gather_object", gather_objects),
        (nn.Module, "to", convert),
        (nn.Module, "half", lambda module: convert(module, dtype=torch.float16)),
        (nn.Module, "bfloat16", lambda module: convert(module, dtype=torch.bfloat16)),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def trace_step(recipe: Recipe, rank: int, loads: Loads) -> Trace:
    """Return what a rank of the recipe's run does in a training step up to the optimizer.

    Args:
        loads: rows of each expert, such as `uniform`.

    Raises:
        RuntimeError: torch sees a GPU, or this process is in a process group.
    """
    cpu.install()
    recorder = _Recorder()
    with as_rank(recipe, rank) as processes, _given(loads), recorder:
        engine = Engine(recipe, processes)
        samples: Any = _Samples(recipe)
        recorder.begin(engine)
        with Saved(recorder.trace, engine):
            engine.backward(0, samples)
        return recorder.trace
