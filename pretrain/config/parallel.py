"""The section ``[parallel]`` of a recipe: the split of a job over ranks, and its checks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fmoe.errors import UserError
from pretrain.config.checks import divides
from pretrain.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The split of the job over ranks (docs/parallelism.md).

    World size: ``pipeline x max(tensor x context, expert_tensor x expert) x data``. One product in ``max``
    must divide the other. If the second product is larger, experts are also spread over data parallel ranks of the
    dense layers.
    """

    tensor: int = 1
    """Tensor parallel size: the number of slices of attention heads, dense feed-forward blocks and the vocabulary."""
    sequence: bool | None = None
    """Sequence parallelism: cut activations outside of attention and feed-forward blocks along the sequence; None
    enables it if tensor > 1."""
    context: int = 1
    """Context parallel size: the number of ranks among which each sequence is divided. In attention, each rank has
    whole sequences and a part of the heads instead. More than 1 needs model.kind=gpt."""
    pipeline: int = 1
    """Pipeline parallel size: the number of stages that the layers are cut into."""
    virtual_pipeline: int | None = None
    """Model chunks per stage (interleaved schedule); None for one."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of the pipeline's micro batches: 1f1b alternates forward and backward passes; gpipe runs all forward passes
    first and holds the activations of all."""
    expert: int = 1
    """Expert parallel size: the number of equal parts into which the experts of a layer are divided."""
    expert_tensor: int = 1
    """Slices of each expert's hidden units: 1, or the tensor parallel size."""
    data: int = 1
    """Replicas of the smallest group of ranks that holds the whole model. If experts span more ranks than the dense
    layers, the dense layers are also replicated within the group, each replica with its own sequences."""
    recompute: Literal["none", "selective", "full"] = "none"
    """In the backward pass, recompute nothing (none), feed-forward blocks including gate, exchange and experts
    (selective), or whole layers (full)."""
    overlap_gradients: bool = False
    """Overlap the gradient reduction over data parallel ranks with the backward pass."""
    overlap_parameters: bool = False
    """Overlap the gathering of updated parameters with the forward pass; needs optimizer.distributed and
    overlap_gradients."""
    overlap_shared_experts: bool = False
    """On a GPU, compute shared experts on a second stream, beside the exchange and the routed experts."""
    exchange: str = "all_to_all"
    """Communication scheme that brings tokens to their experts: all_to_all, padded, all_gather, hierarchical, deepep,
    symmetric (docs/parallelism.md), or a registered one. Results are equal up to rounding."""
    chunks: int = 1
    """Number of parts into which each expert's rows (token vectors) are split. The communication of one part overlaps
    with the computation of another."""
    max_rows: int | None = None
    """Maximum number of rows (token vectors) that a rank receives at a time, at least twice the number of experts. More
    rows are exchanged and computed in chunks. None for no bound."""
    shadow: int = 0
    """Maximum number of heavily loaded experts per layer that are broadcast to all ranks instead of receiving rows."""
    node_size: int | None = None
    """Ranks per node, for exchange=hierarchical; None for the launcher's LOCAL_WORLD_SIZE."""
    exchange_options: Mapping[str, Any] = field(default_factory=dict)
    """Table of further options of the exchange, such as slots with exchange=padded: see the last table of
    docs/recipe-reference.md."""
    wire: Literal["fp32", "bf16"] | None = None
    """Precision of the exchanged rows; None for the model's."""

    @property
    def is_sequence_parallel(self) -> bool:
        """True if activations are cut along the sequence outside of attention and feed-forward blocks."""
        return self.tensor > 1 and self.sequence is not False

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

        dense, experts = product("tensor", "context"), product("expert_tensor", "expert")
        inner = f"max({dense}, {experts})" if dense and experts else dense or experts or "parallel.expert=1"
        return " x ".join(x for x in (product("pipeline"), inner, f"parallel.data={self.data}") if x)

    def check(self, model: ModelConfig) -> None:
        """Raise UserError for a split that is invalid for this model."""
        if self._dense % self._experts and self._experts % self._dense:
            raise UserError(
                f"parallel.tensor x parallel.context={self._dense} and parallel.expert_tensor x parallel.expert="
                f"{self._experts}: one must divide the other"
            )
        divides("parallel.tensor", self.tensor, "model.num_heads", model.num_heads)
        divides("parallel.tensor", self.tensor, "model.num_query_groups", model.query_groups)
        if model.kv_lora_rank is not None and model.qk_rope_head_dim is not None:
            width = model.kv_lora_rank + model.qk_rope_head_dim
            divides("parallel.tensor", self.tensor, "model.kv_lora_rank + model.qk_rope_head_dim", width)
        if model.q_lora_rank is not None:
            divides("parallel.tensor", self.tensor, "model.q_lora_rank", model.q_lora_rank)
        divides("parallel.tensor", self.tensor, "model.vocab_size", model.vocab_size)
        # A T5 is built dense, then its experts are inserted.
        if len(model.layers_with_experts) < len(model.layer_numbers) or model.kind == "t5":
            name = "ffn_hidden_size" if model.dense_ffn_hidden_size is None else "dense_ffn_hidden_size"
            divides("parallel.tensor", self.tensor, f"model.{name}", model.dense_width)
        if self.sequence and self.tensor == 1:
            raise UserError("parallel.sequence=true has no effect with parallel.tensor=1")
        if self.is_sequence_parallel:
            divides("parallel.tensor", self.tensor, "model.sequence_length", model.sequence_length)
        if self.context > 1:
            self._check_context(model)
        if model.position == "transformer_xl":
            self._check_transformer_xl(model)
        if model.kind == "t5" and self.pipeline > 1:
            raise UserError(
                f"parallel.pipeline={self.pipeline} is not supported with model.kind=t5: use parallel.pipeline=1"
            )
        if self.virtual_pipeline is not None and self.pipeline == 1:
            raise UserError(f"parallel.virtual_pipeline={self.virtual_pipeline} has no effect with parallel.pipeline=1")
        if model.mtp_layers:
            self._check_mtp(model)
        if self.model_chunks > 1 and self.schedule == "gpipe":
            raise UserError(
                f"parallel.virtual_pipeline={self.virtual_pipeline} is not supported with parallel.schedule=gpipe: "
                "use parallel.schedule=1f1b"
            )
        name, stages = "parallel.pipeline", self.pipeline * self.model_chunks
        name += " x parallel.virtual_pipeline" if self.model_chunks > 1 else ""
        divides(name, stages, "model.num_layers", model.num_layers)
        if model.num_experts:
            name = "model.num_experts" + (" x model.granularity" if model.granularity > 1 else "")
            divides("parallel.expert", self.expert, name, model.routed_experts)
        elif self.expert > 1:
            raise UserError(f"parallel.expert={self.expert} needs model.num_experts > 0")
        if self.overlap_shared_experts and not model.num_shared_experts:
            raise UserError("parallel.overlap_shared_experts=true needs model.num_shared_experts > 0")
        if self.expert_tensor > 1:
            if self.expert_tensor != self.tensor:
                raise UserError(
                    f"parallel.expert_tensor={self.expert_tensor} must be 1 or equal parallel.tensor={self.tensor}"
                )
            if not model.num_experts:
                raise UserError(f"parallel.expert_tensor={self.expert_tensor} needs model.num_experts > 0")
            name = "model.ffn_hidden_size" + (" / model.granularity" if model.granularity > 1 else "")
            divides("parallel.expert_tensor", self.expert_tensor, name, model.expert_width)
            for key in ("max_rows", "shadow"):
                if getattr(self, key):
                    raise UserError(
                        f"parallel.{key}={getattr(self, key)} is not supported with parallel.expert_tensor="
                        f"{self.expert_tensor}, which splits experts: use parallel.expert_tensor=1"
                    )

    def _check_transformer_xl(self, model: ModelConfig) -> None:
        if self.context > 1:
            raise UserError(
                f"parallel.context={self.context} is not supported with model.position=transformer_xl: "
                "use parallel.context=1"
            )
        if not model.memory_length:
            return
        if self.is_sequence_parallel:
            divides("parallel.tensor", self.tensor, "model.memory_length", model.memory_length)
        if self.recompute == "full" and self.pipeline > 1:
            raise UserError(
                f"parallel.recompute=full is not supported with parallel.pipeline={self.pipeline} and "
                f"model.memory_length={model.memory_length}: a layer holds one micro batch's memory; use "
                "parallel.recompute=selective"
            )

    def _check_mtp(self, model: ModelConfig) -> None:
        if self.context > 1:
            raise UserError(
                f"parallel.context={self.context} is not supported with model.mtp_layers={model.mtp_layers}: "
                "use parallel.context=1"
            )
        if self.pipeline > 1 and model.position == "learned_absolute":
            raise UserError(
                f"parallel.pipeline={self.pipeline} is not supported with model.mtp_layers={model.mtp_layers} and "
                "model.position=learned_absolute: use model.position=rope"
            )

    def _check_context(self, model: ModelConfig) -> None:
        if model.kind != "gpt":
            raise UserError(f"parallel.context={self.context} needs model.kind=gpt, not {model.kind}")
        if model.kv_lora_rank is not None:
            raise UserError(
                f"parallel.context={self.context} is not supported with model.kv_lora_rank={model.kv_lora_rank}: "
                "use parallel.context=1"
            )
        name, ranks = "parallel.tensor x parallel.context", self._dense
        divides(name, ranks, "model.num_heads", model.num_heads)
        if self.is_sequence_parallel:
            divides(name, ranks, "model.sequence_length", model.sequence_length)
        elif self.tensor > 1 and model.num_experts:
            raise UserError(
                f"parallel.sequence=false is not supported with model.num_experts={model.num_experts}, "
                f"parallel.tensor={self.tensor} and parallel.context={self.context}: use parallel.sequence=true"
            )
        divides("parallel.context", self.context, "model.sequence_length", model.sequence_length)
