"""One rank's training step without data: the trainer's own engine on fake tensors, under given loads of the experts.

Fake tensors have shapes, dtypes and a device, but no memory (torch's `FakeTensorMode`). So every part of the trainer
that allocates memory, sends or computes is counted as it is, and nothing has to be modelled. Only numbers that a real
step reads from its data are given: how many rows each expert gets.
"""

import contextlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, nn
from torch._library.fake_impl import FakeImplCtx
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from fmoe.errors import UserError
from fmoe.exchange import AllToAllExchange, HierarchicalExchange, all_to_all, base
from fmoe.experts import initial
from fmoe.kernels import fused
from fmoe.kernels.rows import DispatchPlan
from fmoe.moe import MoE
from fmoe.parallel.gradients import is_expert
from fmoe.runtime import phases
from fmoe.runtime.deferral import WeightGradients
from megatron_patch import bf16_linear, cpu
from megatron_patch.layer import drop_tracked_losses
from pretrain.config import Recipe
from pretrain.dryrun.holding import hold
from pretrain.engine import Engine, pipeline
from pretrain.engine.meta import as_rank
from pretrain.models import kind_of
from pretrain.planner.loads import Loads


@dataclass(frozen=True)
class Operation:
    """An operation of a step.

    Attributes:
        name: torch's name, such as ``aten.mm.default``.
        shapes: shapes of the tensors that it reads.
        dtype: dtype of the result.
        flops: multiplications and additions, by torch's formulas; 0 for operations that have none.
        moved: bytes that it reads and writes; 0 for a view.
        is_backward: whether autograd calls it, and no module.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    flops: int
    moved: int
    is_backward: bool = False


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
        steps: number of each operation and collective, by pass (forward, backward, weights, or optimizer) and phase
            (`fmoe.runtime.phases`). ``weights`` are gradients of weights in passes of their own.
        saved: largest number of bytes that autograd held for backward passes, without weights.
        peak: largest number of bytes that were allocated in the step and alive at the same time, without what
            existed before it.
        dense, experts: number of parameters that the rank holds outside of experts, and in experts.
        state: bytes of the optimizer's master weights and moments.
    """

    steps: dict[tuple[str, str], Counter[Operation | Collective]] = field(default_factory=lambda: defaultdict(Counter))
    saved: int = 0
    peak: int = 0
    dense: int = 0
    experts: int = 0
    state: int = 0


_EXCHANGES = ("all_to_all", "hierarchical")  # whose counts of rows `_given` gives

# Operations that read or change as many rows as they write or are given, and not all of a table.
_GATHERS = (
    torch.ops.aten.index_select,
    torch.ops.aten.index,
    torch.ops.aten.gather,
    torch.ops.aten.embedding,
)
_SCATTERS = (torch.ops.aten.index_put_, torch.ops.aten.index_add_, torch.ops.aten.scatter_add_)
# Operations that read no tensor.
_FILLS = (
    torch.ops.aten.new_zeros,
    torch.ops.aten.new_ones,
    torch.ops.aten.new_full,
    torch.ops.aten.zeros_like,
    torch.ops.aten.ones_like,
    torch.ops.aten.full_like,
    torch.ops.aten.zero_,
    torch.ops.aten.fill_,
)


def operation_of(func: Any, args: Any, kwargs: Any, result: Any) -> Operation:
    """Return the operation of a call of one of torch's operators, of which at least one result is a tensor."""
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    packet = func._overloadpacket
    flops = 0
    if packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=result)
    written = sum(tensor.nbytes for tensor in outputs)
    read = sum(tensor.nbytes for tensor in inputs)
    if packet in _FILLS:
        read = 0
    elif packet in _SCATTERS:
        read -= inputs[0].nbytes
        written = 2 * inputs[-1].nbytes
    elif packet in _GATHERS:
        read = sum(min(tensor.nbytes, written) for tensor in inputs)
    shapes = tuple(tuple(tensor.shape) for tensor in inputs)
    # Modules that are run again in a backward pass have gradients enabled.
    is_backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
    return Operation(str(func), shapes, outputs[0].dtype, flops, read + written, is_backward)


class _Recorder(FakeTensorMode):
    """Fake tensors of the CPU that count what is done with them, and collectives that do nothing."""

    # In torch's CUDA build, True makes autograd start a thread for each of 8 pretended GPUs, which forked processes may
    # not survive.
    avoid_device_init = False

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.trace = Trace()
        self.part = "forward"
        self.is_recording = False
        self._alive: dict[int, int] = {}  # bytes of each storage
        self._allocated = 0
        self._num_storages = 0
        self._depth = 0  # of operations within fake kernels of others

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].constant is None:
            if args[0].dtype == torch.bool:
                return False  # so that no loop repeats a draw of weights
            return 1.0 if args[0].is_floating_point() else 1  # a loss, a norm: any number that is finite
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs or {})
        before = self._num_storages
        self._depth += 1
        try:
            result = super().dispatch(func, types, args, kwargs)
        finally:
            self._depth -= 1
        if self.is_recording:
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
            for tensor in outputs:
                self._allocate(tensor.untyped_storage())
            is_view = self._num_storages == before and not func._schema.is_mutable
            if outputs and not is_view and not self._depth:
                self._add(operation_of(func, args, kwargs or {}, result))
        return result

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if self.is_recording:
            group = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.ScriptObject))
            ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
            kind = func._opname.strip("_")
            self._add(Collective(kind, ranks, max((t.nbytes for t in tensors), default=0)))
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
            if sent.constant is not None:  # such as the counts of expert tensor parallel ranks
                for output in outputs:  # all ranks have this rank's numbers
                    output.constant.view(-1, sent.numel()).copy_(sent.constant.flatten())
        given = iter(tensors)
        return tree_map_only(Tensor, lambda _: next(given), result)

    def _add(self, step: Operation | Collective) -> None:
        self.trace.steps[self.part, phases.current()][step] += 1

    def _allocate(self, storage: torch.UntypedStorage) -> None:
        """Count the bytes of a storage as long as it is alive."""
        if id(storage) in self._alive:
            return
        self._num_storages += 1
        self._alive[id(storage)] = storage.nbytes()
        weakref.finalize(storage, self._free, id(storage)).atexit = False
        self._allocated += storage.nbytes()
        self.trace.peak = max(self.trace.peak, self._allocated)

    def _free(self, key: int) -> None:
        self._allocated -= self._alive.pop(key)

    def begin(self, engine: Engine) -> None:
        """Start a trace of a step of the engine, whose present tensors are not counted."""
        for tensor in _persistent(engine):
            self._allocate(tensor.untyped_storage())
        self.trace.peak = self._allocated = 0
        self.is_recording = True


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


def _blank_samples(recipe: Recipe) -> Any:
    """Return samples of the model's kind, made of blocks of zeros."""
    if recipe.data.samples is not None:
        raise UserError(f"data.samples={recipe.data.samples} is not supported: a plan knows samples of tokens only")
    kind = kind_of(recipe)
    length = kind.block_length(recipe)
    block = np.zeros(length + 1, np.int64)
    sentinels = list(range(2, recipe.model.vocab_size))
    tokenizer = SimpleNamespace(
        role=lambda name: 0, end_of_document=1, sentinels=sentinels, special_ids=set(), vocab_size=2
    )
    return kind.samples(recipe, _Repeated(block), tokenizer, 0, length)


@dataclass(frozen=True)
class _Repeated:
    block: np.ndarray
    samples_per_epoch: int = 1

    def __getitem__(self, n: int) -> np.ndarray:
        return self.block


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
def _given(loads: Loads, recorder: _Recorder, on_gpu: bool) -> Iterator[None]:
    """Give the numbers that a step reads from its data: rows of each expert; and make torch take fake tensors."""
    layer = 0
    needed = 1  # chunks
    rows_WE = np.zeros((1, 1), np.int64)  # in the latest dispatch plan, without rows of shadowed experts
    split = MoE.split
    from_routing = DispatchPlan.from_routing
    tolist = FakeTensor.tolist
    attention = functional.scaled_dot_product_attention

    def split_of(moe: Any, *arguments: Any) -> Any:
        nonlocal layer
        layer = moe.layer_number
        return split(moe, *arguments)

    def planned(routing: Any, num_experts: int) -> DispatchPlan:
        nonlocal rows_WE, needed
        needed = 1
        group = parallel_state.get_expert_model_parallel_group()
        rows_WE = loads(layer, group.size(), routing.expert_TK.numel())
        if routing.max_load is not None:
            rows_WE = np.minimum(rows_WE, routing.max_load)  # of the gate's capacity
        return replace(from_routing(routing, num_experts), known_counts=rows_WE[group.rank()].tolist())

    def choose_shadows(exchange: Any, count_E: Tensor, cost: Any) -> tuple[list[tuple[int, int]], Tensor]:
        nonlocal rows_WE
        chosen = np.argsort(-rows_WE.sum(0), kind="stable")[: exchange.shadow]
        own = rows_WE[exchange.ep_rank, chosen]
        rows_WE = rows_WE.copy()
        rows_WE[:, chosen] = 0
        return list(zip(chosen.tolist(), own.tolist(), strict=True)), torch.zeros_like(count_E)

    def hops(exchange: Any, tensors: list[Tensor], on_host: Any) -> list[Any]:
        with_flags = [np.pad(counts, ((0, 0), (0, 1))).tolist() for counts in _counts(exchange, rows_WE)]
        return original_hops[type(exchange)](exchange, tensors, with_flags)

    def chunks_needed(exchange: Any, received: list[Tensor], max_rows: int) -> Tensor:
        nonlocal needed
        most = int(rows_WE.reshape(len(rows_WE), exchange.ep_size, -1).sum((0, 2)).max())
        needed = 1 if most <= max_rows else -(-most // (max_rows - exchange.num_experts))
        return received[0]

    def known(tensor: FakeTensor) -> Any:
        if tensor.constant is None:
            return tolist(tensor)
        with unset_fake_temporarily():
            return tensor.constant.tolist()

    def own_rows(_: Any, **limits: Any) -> int:
        return int(rows_WE[parallel_state.get_expert_model_parallel_rank()].sum())

    def gather_objects(result: list[Any], value: Any, group: Any = None) -> None:
        result[:] = [value] * len(result)

    def undrawn(keys: Sequence[int], count: int, device: torch.device, *options: Any) -> Tensor:
        return torch.empty(len(keys), count, dtype=torch.float32, device=device)

    def convert(module: nn.Module, device: Any = None, dtype: Any = None) -> nn.Module:
        for tensor in (*module.parameters(), *module.buffers()):
            if dtype is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)  # as for real tensors; torch would swap fake ones
        return module

    def attend(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Attention in one kernel, as on a GPU: the CPU's needs values as wide as the keys."""
        width = value.shape[-1]
        if not on_gpu or width >= query.shape[-1]:
            return attention(query, key, value, *arguments, **options)
        padded = functional.pad(value, (0, query.shape[-1] - width))
        return attention(query, key, padded, *arguments, **options)[..., :width]

    def within(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            outer = recorder.part
            recorder.part = part
            try:
                return function(*arguments, **options)
            finally:
                recorder.part = outer

        return run

    original_hops = {kind: kind._hops for kind in (AllToAllExchange, HierarchicalExchange)}
    patches = (
        (MoE, "split", split_of),
        (initial, "draw", undrawn),
        (DispatchPlan, "from_routing", staticmethod(planned)),
        (FakeTensor, "tolist", known),
        (fake_tensor, "CONSTANT_NUMEL_LIMIT", 1 << 24),  # so that tensors of known counts keep them
        (FakeImplCtx, "new_dynamic_size", own_rows),
        (base, "check_consistency", lambda *arguments: None),
        (all_to_all, "_to_host", lambda tensors: [[[1]]] * (len(tensors) - 1) + [[[needed]]]),
        (AllToAllExchange, "_choose_shadows", choose_shadows),
        (AllToAllExchange, "_chunks_needed", chunks_needed),
        *((kind, "_hops", hops) for kind in original_hops),
        (dist, "all_gather_object", gather_objects),
        (functional, "scaled_dot_product_attention", attend),
        (nn.Module, "to", convert),
        (nn.Module, "half", lambda module: convert(module, dtype=torch.float16)),
        (nn.Module, "bfloat16", lambda module: convert(module, dtype=torch.bfloat16)),
        (MoEAuxLossAutoScaler, "main_loss_backward_scale", None),  # so that no fake one remains
        (bf16_linear, "is_needed", (lambda: False) if on_gpu else bf16_linear.is_needed),
        (schedules, "backward_step", within("backward", schedules.backward_step)),
        (pipeline, "backward_inputs", within("backward", pipeline.backward_inputs)),
        (WeightGradients, "run", within("weights", WeightGradients.run)),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


@contextlib.contextmanager
def _with_attributes(engine: Engine) -> Iterator[None]:
    """Give the experts' backward pass the parameters, with their ``main_grad``: hooks of saved tensors pass copies."""
    parameters = {_place(parameter): parameter for parameter in engine.gpt.parameters()}

    def of_parameter(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        return lambda weight: function(parameters.get(_place(weight), weight))

    functions: dict[str, Any] = {
        name: of_parameter(getattr(fused, name)) for name in ("_main_grad", "_added_to_main_grad")
    }
    with mock.patch.multiple(fused, **functions):
        yield


def _place(tensor: Tensor) -> tuple[int, Any]:
    return id(tensor.untyped_storage()), tensor.storage_offset()


def _counts(exchange: Any, rows_WE: np.ndarray) -> list[np.ndarray]:
    """Return the counts that a rank's exchange reads (`AllToAllExchange._exchange_counts`), without flags."""
    rank = exchange.ep_rank
    if not isinstance(exchange, HierarchicalExchange):
        rows_WWL = rows_WE.reshape(exchange.ep_size, exchange.ep_size, -1)
        return [rows_WWL[rank], rows_WWL[:, rank]]
    nodes = (exchange.num_nodes, exchange.node_size)
    rows_NINIL = rows_WE.reshape(*nodes, *nodes, -1)
    node, index = divmod(rank, exchange.node_size)
    counts = (rows_NINIL[node, index].swapaxes(0, 1), rows_NINIL[node, :, :, index], rows_NINIL[:, :, node, index])
    return [part.reshape(len(part), -1) for part in counts]


@torch.enable_grad()
def trace_step(recipe: Recipe, rank: int, loads: Loads, on_gpu: bool = False) -> Trace:
    """Return what a rank of the recipe's run does in a training step up to the optimizer.

    Args:
        loads: rows of each expert (`pretrain.planner.loads.of_slowest`).
        on_gpu: whether to trace what a GPU does where the CPU does otherwise: multi-latent attention in one kernel, and
            bf16 products in bf16 on any processor.

    Raises:
        UserError: the recipe has samples of its own, or an exchange whose counts cannot be given.
        RuntimeError: torch sees a GPU, or this process is in a process group.
    """
    exchange = recipe.parallel.exchange
    if recipe.parallel.expert > 1 and exchange not in _EXCHANGES:
        names = " or ".join(_EXCHANGES)
        raise UserError(f"parallel.exchange={exchange} is not supported by fmoe plan: use {names}")
    cpu.install()
    recorder = _Recorder()
    samples = _blank_samples(recipe)
    with as_rank(recipe, rank) as processes, _given(loads, recorder, on_gpu), recorder:
        drop_tracked_losses()
        engine = Engine(recipe, processes)
        trace = recorder.trace
        for parameter in engine.gpt.parameters():
            if is_expert(parameter):
                trace.experts += parameter.numel()
            else:
                trace.dense += parameter.numel()
        held = hold(engine)
        trace.state = held.masters + held.moments
        phases.start(processes.device)
        recorder.begin(engine)
        try:
            with Saved(trace, engine), _with_attributes(engine):
                engine.backward(0, samples)
        finally:
            recorder.is_recording = False
            phases.stop()
            drop_tracked_losses()  # which are fake
        return trace
