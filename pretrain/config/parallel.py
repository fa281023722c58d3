"""The section ``[parallel]`` of a recipe: the split of a job over ranks."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt

from pretrain.config.keys import BelowOne, Name, NotNegative, OnResume, Positive, Section, Table

_REDUCTION = OnResume("the average of gradients or parameters, from here on")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """The split of the job over ranks (docs/parallelism.md).

    World size: ``pipeline x max(tensor x context, expert_tensor x expert) x data``. One product in ``max``
    must divide the other. If the second product is larger, experts are also spread over data parallel ranks of the
    dense layers.
    """

    on_resume: ClassVar[str] = "the split; losses agree within rounding"

    tensor: Positive = 1
    """Tensor parallel size: the number of slices of attention heads, dense feed-forward blocks and the vocabulary."""
    sequence: bool | None = None
    """Sequence parallelism: cut activations outside of attention and feed-forward blocks along the sequence; None
    enables it if tensor > 1."""
    context: Positive = 1
    """Context parallel size: the number of ranks among which each sequence is divided. In attention, each rank has
    whole sequences and a part of the heads instead. More than 1 needs model.kind=gpt."""
    pipeline: Positive = 1
    """Pipeline parallel size: the number of stages that the layers are cut into."""
    virtual_pipeline: Positive | None = None
    """Model chunks per stage (interleaved schedule); None for one."""
    stage_layers: tuple[Positive, ...] = ()
    """Number of layers of each pipeline stage; with virtual_pipeline, of each chunk in the order of the layers. Empty
    for equal numbers, or for balance_stages."""
    balance_stages: bool = False
    """Choose the numbers of layers so that the slowest stage computes least: layers with experts, dense ones and the
    output layer cost their floating point operations."""
    schedule: Literal["1f1b", "gpipe", "zero_bubble"] = "1f1b"
    """Order of the pipeline's micro batches: 1f1b alternates forward and backward passes; gpipe runs all forward passes
    first and holds the activations of all; zero_bubble is 1f1b that fills waiting time with weight gradients."""
    expert: Positive = 1
    """Expert parallel size: the number of equal parts into which the experts of a layer are divided."""
    expert_tensor: Positive = 1
    """Slices of each expert's hidden units: 1, or the tensor parallel size."""
    data: Positive = 1
    """Replicas of the smallest group of ranks that holds the whole model. If experts span more ranks than the dense
    layers, the dense layers are also replicated within the group, each replica with its own sequences."""
    shard: Literal["none", "optimizer", "gradients", "parameters"] = "none"
    """What data parallel ranks divide among themselves: nothing (none), the optimizer's state and master weights
    (optimizer, ZeRO-1), gradients too (gradients, ZeRO-2), or parameters too (parameters, ZeRO-3)."""
    shard_size: Positive | None = None
    """With shard=gradients or parameters, number of adjacent data parallel ranks of the dense layers that divide these,
    such as those of a node; each group of such ranks has a copy (HSDP). None for all ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """In the backward pass, recompute nothing (none), feed-forward blocks including gate, exchange and experts
    (selective), or whole layers (full)."""
    all_reduce: Literal["library", "ring", "hierarchical", "grid"] = "library"
    """Algorithm that sums gradients over data parallel ranks: the library's choice, a ring, within nodes and then
    between them (hierarchical, with node_size), or rings along rows and columns of a grid (docs/communication.md)."""
    grad_reduce: Annotated[Literal["fp32", "bf16", "fp16"], _REDUCTION] = "fp32"
    """Precision in which gradients are reduced over data parallel ranks. They are accumulated in fp32."""
    grad_compress: Annotated[Name, _REDUCTION] = "none"
    """Compressed reduction of gradients over data parallel ranks: none, powersgd, dgc, onebit
    (docs/communication.md), or a registered one."""
    compress_options: Annotated[Table, _REDUCTION] = field(default_factory=dict)
    """Table of options of grad_compress, such as rank, density or warmup."""
    sync_every: Annotated[Positive, _REDUCTION] = 1
    """Number of steps between averages of the parameters over data parallel ranks (local SGD, DiLoCo:
    docs/communication.md). With 1, gradients are averaged in every step instead."""
    sync_outer: Annotated[Literal["average", "nesterov"], _REDUCTION] = "average"
    """With sync_every > 1, what replaces the parameters of all ranks: their mean (average), or a step of SGD with
    Nesterov momentum, whose gradient is the mean change (nesterov, as in DiLoCo)."""
    sync_lr: Annotated[float, Gt(0), _REDUCTION] = 0.7
    """Learning rate of sync_outer=nesterov."""
    sync_momentum: Annotated[BelowOne, _REDUCTION] = 0.9
    """Momentum of sync_outer=nesterov."""
    sync_warmup: Annotated[NotNegative, _REDUCTION] = 0
    """Number of first steps in which gradients are averaged, with sync_every > 1."""
    sync_adaptive: Annotated[bool, _REDUCTION] = False
    """Multiply sync_every by sqrt(loss / first loss x first learning rate / learning rate), at most by 16, where first
    means at the first average after optimizer.warmup_steps (adaptive local SGD)."""
    overlap_gradients: bool = False
    """Overlap the gradient reduction over data parallel ranks with the backward pass."""
    overlap_parameters: bool = False
    """Overlap the gathering of updated parameters with the forward pass; needs shard=optimizer and
    overlap_gradients."""
    overlap_shared_experts: bool = False
    """On a GPU, compute shared experts on a second stream, beside the exchange and the routed experts."""
    exchange: Name = "all_to_all"
    """Communication scheme that brings tokens to their experts: all_to_all, padded, all_gather, hierarchical, deepep,
    symmetric (docs/parallelism.md), or a registered one. Results are equal up to rounding."""
    chunks: Positive = 1
    """Number of parts into which each expert's rows (token vectors) are split. The communication of one part overlaps
    with the computation of another."""
    max_rows: Positive | None = None
    """Maximum number of rows (token vectors) that a rank receives at a time, at least twice the number of experts. More
    rows are exchanged and computed in chunks. None for no bound."""
    shadow: NotNegative = 0
    """Maximum number of heavily loaded experts per layer that are broadcast to all ranks instead of receiving rows."""
    node_size: Positive | None = None
    """Ranks per node, for exchange=hierarchical and all_reduce=hierarchical; None for the launcher's
    LOCAL_WORLD_SIZE."""
    exchange_options: Table = field(default_factory=dict)
    """Table of further options of the exchange, such as slots with exchange=padded: see the last table of
    docs/recipe-reference.md."""
    wire: Literal["fp32", "bf16"] | None = None
    """Precision of the exchanged rows; None for the model's."""

    @property
    def is_sequence_parallel(self) -> bool:
        """True if activations are cut along the sequence outside of attention and feed-forward blocks."""
        return self.tensor > 1 and self.sequence is not False

    @property
    def is_fully_sharded(self) -> bool:
        """True if gradients, or gradients and parameters, are sharded over data parallel ranks."""
        return self.shard in ("gradients", "parameters")

    @property
    def copies(self) -> int:
        """Number of groups of ``shard_size`` data parallel ranks, each with a copy of the model's shards."""
        return self.dense_data // self.shard_size if self.shard_size else 1

    @property
    def has_equal_stages(self) -> bool:
        """True if all pipeline stages have as many layers."""
        return not (self.stage_layers or self.balance_stages)

    @property
    def model_chunks(self) -> int:
        """Model chunks per pipeline stage."""
        return self.virtual_pipeline or 1

    @property
    def _dense(self) -> int:
        return self.tensor * self.context

    @property
    def _experts(self) -> int:
        return self.expert * self.expert_tensor

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pipeline * max(self._dense, self._experts) * self.data

    @property
    def dense_data(self) -> int:
        """Data parallel size of the dense layers."""
        return self.world_size // (self.pipeline * self._dense)

    @property
    def dense_data_name(self) -> str:
        """Formula that computes `dense_data` from recipe keys, for error messages."""
        if self._experts <= self._dense:
            return "parallel.data"
        tensor = f"parallel.expert_tensor={self.expert_tensor} x " if self.expert_tensor > 1 else ""
        over = f"parallel.tensor={self.tensor} x parallel.context={self.context}"
        return f"{tensor}parallel.expert x parallel.data" + (f" / ({over})" if self._dense > 1 else "")

    @property
    def world_size_name(self) -> str:
        """Formula that computes `world_size` from recipe keys, with their values, for error messages."""

        def product(*names: str) -> str:
            shown = [name for name in names if getattr(self, name) > 1]
            return " x ".join(f"parallel.{name}={getattr(self, name)}" for name in shown)

        dense = product("tensor", "context")
        experts = product("expert_tensor", "expert")
        inner = f"max({dense}, {experts})" if dense and experts else dense or experts or "parallel.expert=1"
        return " x ".join(x for x in (product("pipeline"), inner, f"parallel.data={self.data}") if x)
