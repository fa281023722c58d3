"""The recipe's ``[model]``."""

import math
from dataclasses import dataclass
from typing import Literal

from fmoe.errors import UserError
from pretrain.config.checks import divides


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
    """Attention heads; divides hidden_size unless there is a head_dim."""
    num_query_groups: int | None = None
    """Heads of keys and values, each for num_heads / num_query_groups queries (grouped-query attention); None for as
    many as num_heads."""
    head_dim: int | None = None
    """Width of an attention head; None for hidden_size / num_heads."""
    qk_norm: bool = False
    """Norms over the width of a head, of queries and keys before the scores."""
    ffn_hidden_size: int = 768
    """Hidden width of a feed-forward block: of the dense ones, and of each expert."""
    dense_ffn_hidden_size: int | None = None
    """Hidden width of the feed-forward blocks of layers without experts; None for ffn_hidden_size."""
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
    rope_theta: float = 10000.0
    """Base of the wavelengths of position=rope."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm, with weight and bias, or RMSNorm, with a weight."""
    norm_eps: float = 1e-5
    """What a norm adds to the variance or mean square."""
    dropout: float = 0.0
    """Of the embedding, attention probabilities and residual branches. Keyed by step, layer, token and feature, so that
    it is the same at every split."""
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
    num_shared_experts: int = 0
    """Experts that every token goes through beside those, each of ffn_hidden_size (DeepSeekMoE)."""
    gate: str = "switch"
    """Name of a gate: naive, switch, gshard, sigmoid, ... (docs/gates.md), or one that is registered."""
    score: Literal["softmax", "sigmoid"] | None = None
    """What a gate that lets choose (naive, sigmoid) makes of the router's logits; None for its own."""
    normalize: bool | None = None
    """Whether the weights of a token's experts sum to one, where a gate lets choose (naive, sigmoid); None for its own:
    they do."""
    routed_scale: float = 1.0
    """Factor of those weights (naive, sigmoid)."""
    bias_step: float | None = None
    """How far a step moves the bias of an expert by which the sigmoid gate balances loads; 0 leaves that to the loss;
    None for its own, 0.001."""
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
    def head_width(self) -> int:
        """Of an attention head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def query_groups(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def dense_width(self) -> int:
        """Hidden width of the feed-forward blocks of layers without experts."""
        return self.ffn_hidden_size if self.dense_ffn_hidden_size is None else self.dense_ffn_hidden_size

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

    def check(self) -> None:
        """Raises UserError for the first value that cannot be, alone or with another of the section."""
        if self.head_dim is None:
            divides("model.num_heads", self.num_heads, "model.hidden_size", self.hidden_size)
        if self.position == "rope" and self.head_width % 2:
            name = f"model.hidden_size={self.hidden_size} / model.num_heads={self.num_heads}"
            name = name if self.head_dim is None else f"model.head_dim={self.head_dim}"
            raise UserError(f"{name} is odd, which model.position=rope cannot be")
        if self.num_query_groups is not None:
            divides("model.num_query_groups", self.num_query_groups, "model.num_heads", self.num_heads)
            if self.kind == "t5" and self.num_query_groups != self.num_heads:
                raise UserError(
                    f"model.num_query_groups={self.num_query_groups}: the cross attention of a model.kind=t5 has as "
                    f"many as model.num_heads={self.num_heads}"
                )
        if self.position != "rope" and self.rope_theta != ModelConfig.rope_theta:
            raise UserError(f"model.rope_theta={self.rope_theta} is of model.position=rope, not {self.position}")
        for name in ("rope_theta", "norm_eps", "routed_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"model.{name}={getattr(self, name)} is not a positive number")
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout={self.dropout} is not in [0, 1)")
        if self.num_experts:
            self._check_experts()
        elif self.num_shared_experts:
            raise UserError(f"model.num_shared_experts={self.num_shared_experts} without experts (model.num_experts=0)")
        for name in ("capacity_factor", "eval_capacity_factor"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"model.{name}={value} is not positive; None drops nothing")
        if not 0 <= self.jitter < 1:
            raise UserError(f"model.jitter={self.jitter} is not in [0, 1)")

    def _check_experts(self) -> None:
        if self.top_k > self.num_experts:
            raise UserError(f"model.top_k={self.top_k} is more than model.num_experts={self.num_experts}")
        for number in self.moe_layers:
            if self.moe_layers.count(number) > 1:
                raise UserError(f"model.moe_layers={self.moe_layers} has {number} twice")
            if number not in self.layer_numbers:
                last = f"model.num_layers={self.num_layers}"
                last += f" + model.num_decoder_layers={self.decoder_layers}" if self.kind == "t5" else ""
                raise UserError(f"model.moe_layers has {number}; layers are 1 to {last}")
        if not self.layers_with_experts:
            raise UserError(f"model.moe_every={self.moe_every} is more than the {len(self.layer_numbers)} layers")
        if self.dense_ffn_hidden_size is not None and len(self.layers_with_experts) == len(self.layer_numbers):
            raise UserError(
                f"model.dense_ffn_hidden_size={self.dense_ffn_hidden_size} is of layers without experts, and all have "
                "some (model.moe_layers, model.moe_every)"
            )
