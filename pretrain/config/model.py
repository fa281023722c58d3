"""The recipe's ``[model]``."""

from dataclasses import dataclass
from typing import Literal

from pretrain.config import counts


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The transformer and its experts."""

    kind: Literal["gpt", "t5", "bert"] = "gpt"
    """What is built and what it learns: gpt the next token, t5 (encoder and decoder) spans that are left out, bert
    tokens that are masked."""
    num_layers: int = 4
    """Transformer layers; of a t5, those of the encoder."""
    num_decoder_layers: int | None = None
    """Layers of a t5's decoder; None for as many as the encoder has."""
    hidden_size: int = 192
    """Width of the residual stream."""
    num_heads: int = 6
    """Attention heads; divides hidden_size."""
    ffn_hidden_size: int = 768
    """Hidden width of a feed-forward block: of the dense ones, and of each expert."""
    sequence_length: int = 256
    """Tokens of a training sequence; of a t5, those that its encoder gets."""
    vocab_size: int = 2048
    """Rows of the embedding; at least the tokenizer's vocabulary."""
    activation: Literal["gelu", "relu", "silu"] = "gelu"
    """Of the feed-forward blocks."""
    gated: bool = False
    """Gated feed-forward blocks: with activation silu, SwiGLU."""
    position: Literal["rope", "learned_absolute"] = "rope"
    """Position encoding."""
    dropout: float = 0.0
    """Of attention and residual branches."""
    tie_embeddings: bool = True
    """One matrix for the embedding and the output layer."""
    init_std: float = 0.02
    """Standard deviation of initial weights; output layers of blocks have it over sqrt(2 num_layers)."""

    num_experts: int = 8
    """Experts of a Mixture-of-Experts layer, in all; 0 for a dense model."""
    moe_layers: tuple[int, ...] = ()
    """Layers with experts, numbered from 1, a t5's decoder after its encoder; empty for every `moe_every`-th."""
    moe_every: int = 1
    """Every n-th layer has experts, n first; of no use beside `moe_layers`."""
    top_k: int = 1
    """Experts a token."""
    gate: str = "switch"
    """Name of a gate: naive, switch, gshard, or one that is registered."""
    capacity_factor: float | None = 1.25
    """Assignments an expert takes of a routing group, over an even share; None drops nothing."""
    eval_capacity_factor: float | None = 2.0
    """The same in evaluation."""
    jitter: float = 0.01
    """Half width of the noise on the switch gate's input in training."""
    group_size: int | None = None
    """Tokens of a routing group; None for one sequence."""
    balance_loss: float = 0.01
    """Factor of the load balancing loss."""
    z_loss: float = 0.001
    """Factor of the router z-loss."""

    @property
    def decoder_layers(self) -> int:
        """Layers of a T5's decoder; 0 of another model, whose one stack has `num_layers`."""
        if self.kind != "t5":
            return 0
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def layer_numbers(self) -> range:
        """From 1; of a T5 the encoder's first, and the decoder's go on counting."""
        return range(1, self.num_layers + self.decoder_layers + 1)

    @property
    def layers_with_experts(self) -> tuple[int, ...]:
        """Numbers of the layers that have experts."""
        if not self.num_experts:
            return ()
        return self.moe_layers or tuple(n for n in self.layer_numbers if n % self.moe_every == 0)

    def num_params(self) -> int:
        """Parameters in all."""
        return counts.num_params(self, self.num_experts)

    def num_active_params(self) -> int:
        """Parameters that a token meets: those of K experts instead of all."""
        return counts.num_params(self, self.top_k)

    def flops_per_token(self) -> float:
        """See `counts.flops_per_token`."""
        return counts.flops_per_token(self)
