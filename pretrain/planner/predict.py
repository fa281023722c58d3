"""Time and memory of a recipe's step on a cluster, composed of traces of its kinds of layers.

1. One layer of each kind is traced with embeddings and losses, on one pipeline stage and one micro batch; then with one
   more layer of each kind. The difference is what a layer adds.
2. Operations and collectives are priced on the cluster.
3. The passes of all stages' layers are replayed in the order of the schedule.
4. Reduction of gradients and the optimizer's step follow from the numbers of parameters.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pretrain.config import ModelConfig, ParallelConfig, Recipe
from pretrain.models.config import DTYPES
from pretrain.planner import schedule
from pretrain.planner.cluster import Cluster
from pretrain.planner.prices import steps_seconds, update_bytes
from pretrain.planner.trace import Loads, Trace, trace_step

# In the decoder of a T5; with experts; with a window of attention.
LayerKind = tuple[bool, bool, bool]
Seconds = dict[str, float]  # by term

MARGIN = 0.05  # share of the memory in use that is kept free: for fragmentation, communication buffers and kernels
_PASSES = ("forward", "backward")


@dataclass
class Piece:
    """What a part of the model adds to a rank.

    Attributes:
        passes: seconds of a micro batch by pass and term (`prices.steps_seconds`).
        once: seconds of a step by term, besides its micro batches.
        saved: bytes that a micro batch holds for its backward pass.
        dense, experts: number of parameters outside of experts, and in experts.
    """

    passes: dict[str, Seconds]
    once: Seconds
    saved: float
    dense: int
    experts: int

    @classmethod
    def of(cls, trace: Trace, cluster: Cluster) -> "Piece":
        """Return the piece of a trace of one micro batch."""
        seconds: dict[str, Seconds] = {name: {} for name in ("once", *_PASSES)}
        for (part, phase), steps in trace.steps.items():
            name = "once" if part == "forward" and phase in ("other", "reduction") else part
            seconds[name] = _sum(seconds[name], steps_seconds(cluster, steps))
        return cls(seconds, seconds.pop("once"), trace.saved, trace.dense, trace.experts)

    def times(self, splits_backward: bool) -> schedule.Times:
        """Return the seconds of a micro batch's passes.

        Args:
            splits_backward: whether gradients of weights have passes of their own. They are one of the two products of
                each backward pass of a linear layer.
        """
        forward, backward = (sum(self.passes[name].values()) for name in _PASSES)
        of_backward = self.passes["backward"]
        weights = (of_backward.get("gemm", 0.0) + of_backward.get("experts", 0.0)) / 2 if splits_backward else 0.0
        return schedule.Times(forward, backward - weights, weights)

    def overlapped(self, chunks: int) -> "Piece":
        """Return the piece on an asynchronous device.

        In each pass, only those seconds of the host count that exceed the device's. The exchange of all ``chunks`` but
        one overlaps with the experts of others.
        """
        passes = {}
        for name, terms in self.passes.items():
            exchange = terms.get("exchange", 0.0)
            hidden = (1 - 1 / chunks) * min(exchange, terms.get("experts", 0.0))
            of_device = sum(terms.values()) - terms.get("host", 0.0) - hidden
            host = max(0.0, terms.get("host", 0.0) - of_device)
            passes[name] = {**terms, "exchange": exchange - hidden, "host": host}
        return replace(self, passes=passes, once={**self.once, "host": 0.0})

    def minus(self, other: "Piece", times: int = 1) -> "Piece":
        """Return this piece without ``times`` the other."""
        return Piece(
            {name: _sum(self.passes[name], other.passes[name], -times) for name in _PASSES},
            _sum(self.once, other.once, -times),
            self.saved - times * other.saved,
            self.dense - times * other.dense,
            self.experts - times * other.experts,
        )


@dataclass(frozen=True)
class Prediction:
    """Time and memory of a training step.

    Attributes:
        recipe: the recipe, with its split.
        seconds: time of a step.
        terms: seconds of the busiest stage by term: gemm, attention, experts, memory, exchange, groups
            (`prices.steps_seconds`), and bubble, reduction, optimizer. They add up to ``seconds``.
        phases: the same seconds by phase of a measured step (`fmoe.runtime.phases`).
        memory: bytes of the rank that needs the most: weights, gradients, optimizer, activations, transient (the most
            of other tensors at the same time), margin.
        stage: pipeline stage of this rank.
        dense: largest number of parameters outside of experts that a rank holds.
    """

    recipe: Recipe
    seconds: float
    terms: Seconds
    phases: Seconds
    memory: dict[str, float]
    stage: int
    dense: int

    @property
    def bytes(self) -> float:
        """Sum of ``memory``."""
        return sum(self.memory.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks together, per second."""
        return self.recipe.train.global_batch * self.recipe.tokens_per_sequence / self.seconds

    def mfu(self, cluster: Cluster) -> float:
        """Return the share of the cluster's peak that the model's FLOPs reach."""
        peaks: dict = dict(cluster.device.peak)
        peak = peaks.get(self.recipe.train.precision, max(peaks.values())) * self.recipe.parallel.world_size
        return self.recipe.flops_per_token() * self.tokens_per_second / peak


@dataclass
class Predictor:
    """Predictions for splits of one recipe on a cluster, under given loads. Traces are kept for later predictions."""

    cluster: Cluster
    loads: Loads
    _traces: dict[str, Trace] = field(default_factory=dict)

    def predict(self, recipe: Recipe) -> Prediction:
        """Return the time and memory of a step of a recipe that passed its check."""
        parallel = recipe.parallel
        kinds = layer_kinds(recipe.model)
        base, pieces, traces = self._pieces(recipe, sorted(set(kinds.values())))
        # The more layers there are, the more certainly the peak is where all activations are held.
        transient = min(trace.peak - trace.saved for trace in traces)
        stages = _stages(recipe, base, [pieces[kind] for kind in kinds.values()])
        micro_batches = recipe.train.global_batch // (recipe.train.micro_batch * parallel.dense_data)
        if self.cluster.device.asynchronous:
            stages = [[part.overlapped(parallel.chunks) for part in chunks] for chunks in stages]
        is_zero_bubble = parallel.schedule == "zero_bubble"
        times = [[part.times(is_zero_bubble) for part in chunks] for chunks in stages]
        seconds = schedule.seconds(parallel.schedule, times, micro_batches, self._hop(recipe))
        busiest = max(range(len(stages)), key=lambda stage: sum(t.total for t in times[stage]))
        terms: Seconds = {}
        phases: Seconds = {}
        for part in stages[busiest]:
            for name, of_pass in part.passes.items():
                terms = _sum(terms, of_pass, micro_batches)
                phases = _sum(phases, _by_phase(name, of_pass), micro_batches)
        bubble = seconds - sum(terms.values())
        terms = _sum(terms, {"bubble": bubble})
        phases = _sum(phases, {"collectives": bubble})
        for part in stages[busiest]:
            terms = _sum(terms, part.once)
            phases = _sum(phases, {"other": sum(part.once.values())})
        owned = [_parameters(chunks) for chunks in stages]
        state = traces[0].state / (traces[0].dense + traces[0].experts)
        reduction = max(self._reduction(recipe, *counts, micro_batches) for counts in owned)
        if parallel.overlap_gradients:  # with the last micro batch's backward pass
            reduction = max(0.0, reduction - sum(t.backward for t in times[busiest]))
        optimizer = max(self._optimizer(recipe, *counts, state) for counts in owned)
        terms |= {"reduction": reduction, "optimizer": optimizer}
        phases |= {"reduction": reduction, "optimizer": optimizer}
        memory = [
            _memory(recipe, stage, chunks, transient, state, micro_batches) for stage, chunks in enumerate(stages)
        ]
        largest = max(range(len(stages)), key=lambda stage: sum(memory[stage].values()))
        dense = max(dense for dense, _ in owned)
        return Prediction(recipe, sum(terms.values()), terms, phases, memory[largest], largest, dense)

    def _hop(self, recipe: Recipe) -> float:
        """Return the seconds of a micro batch's message between pipeline stages."""
        parallel = recipe.parallel
        if parallel.pipeline == 1:
            return 0.0
        rows = recipe.train.micro_batch * recipe.tokens_per_sequence / parallel.context
        rows /= parallel.tensor if parallel.is_sequence_parallel else 1
        num_bytes = rows * recipe.model.hidden_size * DTYPES[recipe.train.precision].itemsize
        return self.cluster.collective_seconds("send", 2, 2 * parallel.world_size // parallel.pipeline, num_bytes)

    def _pieces(self, recipe: Recipe, kinds: Sequence[LayerKind]) -> tuple[Piece, dict[LayerKind, Piece], list[Trace]]:
        """Return what is added by embeddings and losses, and by a layer of each kind; and all traces."""
        traces = [self._trace(recipe, kinds)]
        base = whole = Piece.of(traces[0], self.cluster)
        pieces = {}
        for kind in kinds:
            traces.append(self._trace(recipe, [*kinds, kind]))
            pieces[kind] = Piece.of(traces[-1], self.cluster).minus(whole)
            base = base.minus(pieces[kind])
        return base, pieces, traces

    def _trace(self, recipe: Recipe, kinds: Sequence[LayerKind]) -> Trace:
        recipe = with_layers(recipe, sorted(kinds))
        key = repr((recipe.model, recipe.parallel, recipe.train))
        if key not in self._traces:
            self._traces[key] = trace_step(recipe, 0, self.loads, self.cluster.device.asynchronous)
        return self._traces[key]

    def _reduction(self, recipe: Recipe, dense: int, experts: int, micro_batches: int) -> float:
        """Return the seconds in which a step's gradients are reduced, and sharded parameters are gathered."""
        parallel = recipe.parallel
        itemsize = DTYPES[recipe.train.precision].itemsize
        wire = 4 if parallel.grad_reduce == "fp32" else 2
        seconds = 0.0
        for count, size, stride in (
            (dense, parallel.dense_data, parallel.tensor * parallel.context),
            (experts, expert_data(parallel), parallel.expert * parallel.expert_tensor),
        ):
            size = min(size, parallel.shard_size or size)
            of = self.cluster.collective_seconds
            if parallel.shard == "none":
                seconds += of("all_reduce", size, size * stride, wire * count)
                continue
            scatter = of("reduce_scatter", size, size * stride, wire * count)
            gather = of("all_gather", size, size * stride, itemsize * count)
            scatters = micro_batches if parallel.is_fully_sharded else 1
            gathers = 2 * micro_batches if parallel.shard == "parameters" else 1
            seconds += scatters * scatter + gathers * gather
        return seconds / parallel.sync_every

    def _optimizer(self, recipe: Recipe, dense: int, experts: int, state: float) -> float:
        own = _own(recipe.parallel, dense, experts)
        moved = update_bytes(recipe.train.precision, own, own * state)
        return self.cluster.operation_seconds("optimizer", moved, recipe.train.precision)


def expert_data(parallel: ParallelConfig) -> int:
    """Return the data parallel size of the experts."""
    return parallel.world_size // (parallel.pipeline * parallel.expert * parallel.expert_tensor)


def layer_kinds(model: ModelConfig) -> dict[int, LayerKind]:
    """Return the kind of each layer of the stacks, by its number."""
    return {
        number: (number > model.num_layers, number in model.layers_with_experts, number in model.layers_with_window)
        for number in model.stack_numbers
    }


def with_layers(recipe: Recipe, kinds: Sequence[LayerKind]) -> Recipe:
    """Return a recipe with these layers, on one pipeline stage and one replica, for steps of one micro batch."""
    model = recipe.model
    numbers = range(1, len(kinds) + 1)
    with_experts = tuple(number for number in numbers if kinds[number - 1][1])
    windowed = tuple(number for number in numbers if kinds[number - 1][2])
    num_decoder = sum(in_decoder for in_decoder, _, _ in kinds)
    window = model.attention.sliding_window if windowed else None
    parallel = replace(
        recipe.parallel,
        pipeline=1,
        virtual_pipeline=None,
        stage_layers=(),
        balance_stages=False,
        data=1,
        shard="none",
        shard_size=None,
        overlap_gradients=False,
        overlap_parameters=False,
        grad_compress="none",
        all_reduce="library",
        sync_every=1,
    )
    train = replace(recipe.train, ramp_batch=None, global_batch=recipe.train.micro_batch * parallel.dense_data)
    return replace(
        recipe,
        model=replace(
            model,
            num_layers=len(kinds) - num_decoder,
            num_decoder_layers=num_decoder if model.kind == "t5" else None,
            moe=replace(model.moe, layers=with_experts, every=1 if with_experts else len(kinds) + 1),
            attention=replace(model.attention, sliding_window=window, sliding_layers=windowed),
        ),
        parallel=parallel,
        train=train,
    )


def _stages(recipe: Recipe, base: Piece, layers: Sequence[Piece]) -> list[list[Piece]]:
    """Return the parts of the model in each stage's chunks.

    Embeddings and losses cost their time and activations in the last chunk. The first one has as many parameters.
    """
    num_stages = recipe.parallel.pipeline
    ends = itertools.accumulate(recipe.stage_layers, initial=0)
    empty = base.minus(base)
    chunks = []
    for begin, end in itertools.pairwise(ends):
        chunk = empty
        for layer in layers[begin:end]:
            chunk = chunk.minus(layer, -1)
        chunks.append(chunk)
    chunks[-1] = chunks[-1].minus(base, -1)
    if len(chunks) > 1:
        at_end = base.dense if recipe.model.tie_embeddings else base.dense // 2
        chunks[-1].dense += at_end - base.dense
        chunks[0].dense += at_end
    return [chunks[stage::num_stages] for stage in range(num_stages)]


def _parameters(chunks: Sequence[Piece]) -> tuple[int, int]:
    """Return the numbers of parameters of a stage outside of experts, and in experts."""
    return sum(part.dense for part in chunks), sum(part.experts for part in chunks)


def _own(parallel: ParallelConfig, dense: int, experts: int) -> float:
    """Return the number of parameters whose optimizer state a rank has, of those that it or its shard group holds."""
    if parallel.shard == "none":
        return dense + experts
    size = parallel.shard_size or parallel.dense_data
    return dense / size + experts / max(1, expert_data(parallel) * size // parallel.dense_data)


def _memory(
    recipe: Recipe, stage: int, chunks: Sequence[Piece], transient: float, state: float, micro_batches: int
) -> dict[str, float]:
    parallel = recipe.parallel
    itemsize = DTYPES[recipe.train.precision].itemsize
    dense, experts = _parameters(chunks)
    held = dense + experts
    own = _own(parallel, dense, experts)
    in_flight = schedule.most_in_flight(
        parallel.schedule, stage, parallel.pipeline, parallel.model_chunks, micro_batches
    )
    gathered = max(part.dense + part.experts for part in chunks) / max(1, len(recipe.model.stack_numbers))
    memory = {
        "weights": itemsize * (own + gathered if parallel.shard == "parameters" else held),
        "gradients": 4 * (own if parallel.is_fully_sharded else held),
        "optimizer": state * own,
        "activations": in_flight * sum(part.saved for part in chunks) / len(chunks),
        "transient": transient,
    }
    return memory | {"margin": MARGIN * sum(memory.values())}


def _by_phase(name: str, terms: Seconds) -> Seconds:
    """Return the seconds of a pass by phase."""
    phases = {"exchange": terms.get("exchange", 0.0), "collectives": terms.get("groups", 0.0)}
    rest = sum(terms.values()) - sum(phases.values())
    if name != "forward":
        return phases | {"backward": rest}
    experts = terms.get("experts", 0.0)
    return phases | {"experts": experts, "forward": rest - experts}


def _sum(first: Seconds, second: Seconds, factor: int = 1) -> Seconds:
    return {name: first.get(name, 0.0) + factor * second.get(name, 0.0) for name in first.keys() | second.keys()}
