"""The section ``[parallel]`` of a recipe: how a job is split, and which splits there are."""

from dataclasses import dataclass
from typing import Literal

from fmoe.errors import UserError
from pretrain.config.checks import divides
from pretrain.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the job is split (docs/parallelism.md).

    Processes: ``pipeline x max(tensor x context, expert_tensor x expert) x data``. The experts' ranks are laid over the
    tensor parallel ones and go on over data parallel ones; of the two products in ``max`` one divides the other.
    """

    tensor: int = 1
    """Tensor parallel size: attention heads, dense feed-forward blocks and the vocabulary are cut in so many parts."""
    sequence: bool | None = None
    """Sequence parallelism: what tensor parallelism leaves whole is cut along the sequence; None for tensor > 1."""
    context: int = 1
    """Context parallel size: sequences are cut in so many parts, also in attention."""
    pipeline: int = 1
    """Pipeline parallel size: the layers are cut in so many stages."""
    virtual_pipeline: int | None = None
    """Model chunks of a stage (interleaved schedule); None for one."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Of the pipeline's micro batches: one forward, one backward; or all forward, then all backward, which holds the
    activations of all of them."""
    expert: int = 1
    """Expert parallel size: the experts of a layer are spread over so many processes."""
    expert_tensor: int = 1
    """Parts that each expert's hidden units are cut in: 1, or the tensor parallel size."""
    data: int = 1
    """Copies of the smallest group of processes that holds everything. Where experts are spread over more processes
    than the dense part, that is replicated within the group too, each copy with its own sequences."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: those of feed-forward blocks (gate, exchange and experts where
    there are experts); of whole layers."""
    overlap_gradients: bool = False
    """Reduce gradients over data parallel ranks while the backward pass goes on."""
    overlap_parameters: bool = False
    """Gather parameters that optimizer.distributed has updated while the forward pass goes on."""
    exchange: Literal["all_to_all", "padded", "all_gather", "hierarchical"] = "all_to_all"
    """How rows travel to their experts (docs/parallelism.md); changes no result."""
    chunks: int = 1
    """Parts of the exchange that overlap with the experts' work."""
    max_rows: int | None = None
    """Most rows that a process takes at once; None for no bound."""
    shadow: int = 0
    """Most hot experts of a layer that are sent to all processes instead of their rows to them."""
    node_size: int | None = None
    """Processes of a node, for exchange=hierarchical; None for the launcher's LOCAL_WORLD_SIZE."""
    wire: Literal["fp32", "bf16"] | None = None
    """Precision in which rows travel; None for the model's."""

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether sequences are cut over the tensor parallel ranks outside of attention and feed-forward blocks."""
        return self.tensor > 1 and self.sequence is not False

    @property
    def model_chunks(self) -> int:
        """Model chunks of a stage."""
        return self.virtual_pipeline or 1

    @property
    def _dense(self) -> int:
        return self.tensor * self.context

    @property
    def _experts(self) -> int:
        return self.expert * self.expert_tensor

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.pipeline * max(self._dense, self._experts) * self.data

    @property
    def dense_data(self) -> int:
        """Data parallel size of the dense part."""
        return self.world_size // (self.pipeline * self._dense)

    @property
    def dense_data_name(self) -> str:
        """`dense_data` in terms of keys."""
        if self._experts <= self._dense:
            return "parallel.data"
        tensor = f"parallel.expert_tensor={self.expert_tensor} x " if self.expert_tensor > 1 else ""
        over = f"parallel.tensor={self.tensor} x parallel.context={self.context}"
        return f"{tensor}parallel.expert x parallel.data" + (f" / ({over})" if self._dense > 1 else "")

    @property
    def world_size_name(self) -> str:
        """`world_size` in terms of keys, with their values."""

        def product(*names: str) -> str:
            shown = [name for name in names if getattr(self, name) > 1]
            return " x ".join(f"parallel.{name}={getattr(self, name)}" for name in shown)

        dense, experts = product("tensor", "context"), product("expert_tensor", "expert")
        inner = f"max({dense}, {experts})" if dense and experts else dense or experts or "parallel.expert=1"
        return " x ".join(x for x in (product("pipeline"), inner, f"parallel.data={self.data}") if x)

    def check(self, model: ModelConfig) -> None:
        """Raises UserError where a split cannot be of this model."""
        if self._dense % self._experts and self._experts % self._dense:
            raise UserError(
                f"parallel.tensor x parallel.context={self._dense} and parallel.expert_tensor x parallel.expert="
                f"{self._experts}: one has to divide the other"
            )
        divides("parallel.tensor", self.tensor, "model.num_heads", model.num_heads)
        divides("parallel.tensor", self.tensor, "model.num_query_groups", model.query_groups)
        divides("parallel.tensor", self.tensor, "model.vocab_size", model.vocab_size)
        # A T5 is built dense, and then given experts.
        if len(model.layers_with_experts) < len(model.layer_numbers) or model.kind == "t5":
            name = "ffn_hidden_size" if model.dense_ffn_hidden_size is None else "dense_ffn_hidden_size"
            divides("parallel.tensor", self.tensor, f"model.{name}", model.dense_width)
        if self.sequence and self.tensor == 1:
            raise UserError("parallel.sequence=true is nothing at parallel.tensor=1, whose ranks cut sequences")
        if self.is_sequence_parallel:
            divides("parallel.tensor", self.tensor, "model.sequence_length", model.sequence_length)
        if self.context > 1:
            divides("2 x parallel.context", 2 * self.context, "model.sequence_length", model.sequence_length)
            raise UserError(
                f"parallel.context={self.context}: megatron-core's attention runs at 1 without Transformer Engine, and "
                "model.num_experts layers do in any case; cut sequences by parallel.tensor"
            )
        if model.kind == "t5" and self.pipeline > 1:
            raise UserError(f"parallel.pipeline={self.pipeline}: a model.kind=t5 is not cut into stages; use 1")
        if self.virtual_pipeline is not None and self.pipeline == 1:
            raise UserError(f"parallel.virtual_pipeline={self.virtual_pipeline} is nothing at parallel.pipeline=1")
        if self.model_chunks > 1 and self.schedule == "gpipe":
            raise UserError(
                f"parallel.schedule=gpipe has no parallel.virtual_pipeline={self.virtual_pipeline}: use 1f1b"
            )
        name, stages = "parallel.pipeline", self.pipeline * self.model_chunks
        name += " x parallel.virtual_pipeline" if self.model_chunks > 1 else ""
        divides(name, stages, "model.num_layers", model.num_layers)
        if model.num_experts:
            divides("parallel.expert", self.expert, "model.num_experts", model.num_experts)
        elif self.expert > 1:
            raise UserError(f"parallel.expert={self.expert} without experts (model.num_experts=0)")
        if self.expert_tensor > 1:
            if self.expert_tensor != self.tensor:
                raise UserError(
                    f"parallel.expert_tensor={self.expert_tensor} is neither 1 nor parallel.tensor={self.tensor}"
                )
            if not model.num_experts:
                raise UserError(f"parallel.expert_tensor={self.expert_tensor} without experts (model.num_experts=0)")
            divides("parallel.expert_tensor", self.expert_tensor, "model.ffn_hidden_size", model.ffn_hidden_size)
            for key in ("max_rows", "shadow"):
                if getattr(self, key):
                    raise UserError(
                        f"parallel.{key}={getattr(self, key)} is for whole experts, parallel.expert_tensor=1; it is "
                        f"{self.expert_tensor}"
                    )
