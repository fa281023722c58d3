"""The section ``[model]`` of a recipe."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from fmoe.errors import UserError
from pretrain.config.checks import divides

# Factors that only models of kind gpt have.
GPT_SCALES = ("embedding_scale", "residual_scale", "logit_divisor")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The transformer and its experts."""

    kind: str = "gpt"
    """Architecture and objective: gpt predicts the next token, t5 (encoder and decoder) predicts masked spans, bert
    predicts masked tokens; or a registered kind, which predicts the next token."""
    num_layers: int = 4
    """Transformer layers; for t5, those of the encoder."""
    num_decoder_layers: int | None = None
    """Layers of a t5's decoder; None for num_layers."""
    hidden_size: int = 192
    """Width of the residual stream."""
    num_heads: int = 6
    """Number of attention heads; must divide hidden_size unless head_dim or kv_lora_rank is set."""
    num_query_groups: int | None = None
    """Key/value heads, each shared by num_heads / num_query_groups query heads (grouped-query attention); None for
    num_heads."""
    head_dim: int | None = None
    """Width of an attention head; None for hidden_size / num_heads."""
    qk_norm: bool = False
    """Normalize queries and keys of self-attention before the scores."""
    qk_norm_over: Literal["head", "all"] = "head"
    """Elements that qk_norm normalizes together: with head, those of each head; with all, those of all heads (OLMoE;
    needs norm=rms)."""
    qkv_bias: bool = False
    """Add a bias to queries, keys and values."""
    attention_output_bias: bool = False
    """Add a bias to the output of attention (needs model.kind=gpt)."""
    attention_sinks: bool = False
    """Add exp(s) to the denominator of attention's softmax, with a learned s per head, initially 0 (GPT-OSS, arXiv
    2508.10925; needs model.kind=gpt)."""
    sliding_window: int | None = None
    """Number of tokens that a token attends to in `sliding_layers`: itself and those just before it; None for all
    (needs model.kind=gpt)."""
    sliding_layers: tuple[int, ...] = ()
    """Numbers of the layers with `sliding_window`, from 1; empty for all."""
    kv_lora_rank: int | None = None
    """Width of the vector into which multi-latent attention (DeepSeek-V2, arXiv 2405.04434) compresses the keys and
    values of a token; None for standard attention. Needs qk_head_dim, qk_rope_head_dim and v_head_dim."""
    q_lora_rank: int | None = None
    """Width of the vector into which multi-latent attention compresses queries; None for uncompressed queries."""
    qk_head_dim: int | None = None
    """Number of elements without a rotary position in each query and key head (multi-latent attention)."""
    qk_rope_head_dim: int | None = None
    """Number of elements with a rotary position in each query head, and in the rotary key that all heads share
    (multi-latent attention)."""
    v_head_dim: int | None = None
    """Width of a value head (multi-latent attention)."""
    ffn_hidden_size: int = 768
    """Hidden width of a dense feed-forward block, and of each expert before the split by granularity."""
    dense_ffn_hidden_size: int | None = None
    """Hidden width of the feed-forward block in layers without experts; None for ffn_hidden_size."""
    sequence_length: int = 256
    """Tokens per training sequence; for t5, those of the encoder."""
    vocab_size: int = 2048
    """Rows of the embedding; at least the size of the tokenizer's vocabulary."""
    activation: Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu_oai"] = "gelu"
    """Activation of the feed-forward blocks. gelu_tanh is GELU's approximation by a tanh, as in T5 version 1.1.
    swiglu_oai, for gated blocks, is the activation of GPT-OSS: (v + 1) g sigmoid(1.702 g), with the gate g limited to
    at most 7 and the value v to [-7, 7]."""
    gated: bool = False
    """Use gated feed-forward blocks (SwiGLU, if activation=silu)."""
    linear_bias: bool = False
    """Add biases to the linear maps of attention and feed-forward blocks (needs model.kind=bert and num_experts=0)."""
    position: Literal["rope", "learned_absolute", "relative", "transformer_xl"] = "rope"
    """Position encoding. rope: rotary positions; learned_absolute: learned vectors added to the embedding; relative (t5
    only): one bias per head and range of distances (32 ranges, up to 128 tokens), added to the scores of all layers
    of a stack; transformer_xl (gpt only): projected sinusoids of the distance and two biases per head
    (Transformer-XL, arXiv 1901.02860)."""
    memory_length: int = 0
    """Memory of a Transformer-XL: in each layer, a sequence attends to the hidden states of this many tokens before it.
    If positive, each epoch is read as global_batch contiguous streams of text. Needs position=transformer_xl."""
    rope_theta: float = 10000.0
    """Base of the wavelengths of rotary positions (position=rope)."""
    rotary_fraction: float = 1.0
    """Share of a head's elements, counted from the first, that get a rotary position (position=rope)."""
    rope_scaling: Literal["yarn"] | None = None
    """Scaling of rotary positions for sequences longer than those of earlier training: yarn (arXiv 2309.00071); None
    for no scaling. Needs model.kind=gpt, position=rope and rope_original_length."""
    rope_factor: float = 1.0
    """Factor by which YaRN lengthens the long wavelengths; usually sequence_length / rope_original_length."""
    rope_original_length: int | None = None
    """Tokens per sequence before the extension by YaRN."""
    rope_beta_fast: float = 32.0
    """YaRN keeps the wavelength of a pair of elements that makes at least this many turns in rope_original_length
    tokens."""
    rope_beta_slow: float = 1.0
    """YaRN multiplies by rope_factor the wavelength of a pair of elements that makes at most this many turns in
    rope_original_length tokens. Between rope_beta_slow and rope_beta_fast turns, the factor is smaller."""
    rope_truncate: bool = True
    """Round down the pair index at which rope_beta_fast applies, and round up that of rope_beta_slow; false in
    GPT-OSS."""
    rope_mscale: float = 1.0
    """With m(x) = 1 + x ln(rope_factor) / 10, YaRN multiplies rotated queries and keys by m(rope_mscale) /
    m(rope_mscale_all_dim). Values other than 1 need rope_mscale_all_dim > 0."""
    rope_mscale_all_dim: float = 0.0
    """See rope_mscale. Multi-latent attention also multiplies its scores by the square of m(rope_mscale_all_dim)."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm (weight and bias) or RMSNorm (weight)."""
    norm_eps: float = 1e-5
    """Constant that norms add to the variance or mean square."""
    attention_scale: float | None = None
    """Factor of attention scores; None for 1 / sqrt(width of a head)."""
    embedding_scale: float = 1.0
    """Factor of token embeddings (Granite, arXiv 2408.13359; needs model.kind=gpt)."""
    residual_scale: float = 1.0
    """Factor of the output of each attention and feed-forward block (Granite; needs model.kind=gpt)."""
    logit_divisor: float = 1.0
    """Number by which logits are divided (Granite; needs model.kind=gpt)."""
    segment_types: int = 0
    """Rows of a bert's segment embedding, which is added to the token embedding (all tokens are of segment 0); 0 for no
    segment embedding."""
    dropout: float = 0.0
    """Dropout rate of the embedding, attention probabilities and residual branches. Masks are keyed by step, layer,
    token and feature, so they are the same for every parallel split."""
    tie_embeddings: bool = True
    """Share one matrix between the embedding and the output layer."""
    tied_output_bias: bool = True
    """Add a bias to a t5's output layer if it shares the embedding's matrix (tie_embeddings), as Megatron-core does; T5
    (arXiv 1910.10683) has none."""
    output_scale: bool = False
    """Multiply a t5's last hidden states by hidden_size^-0.5 before the output layer, as T5 (arXiv 1910.10683) does."""
    output_bias: bool = False
    """Add a bias to the logits (needs model.kind=gpt)."""
    mtp_layers: int = 0
    """Number of further tokens that each position predicts in training (multi-token prediction, DeepSeek-V3, arXiv
    2412.19437 section 2.2). Each further token has a layer of its own, with experts if the model's last layer has them.
    Needs model.kind=gpt."""
    mtp_loss: float = 0.3
    """Factor with which the mean loss of the further tokens is added to the training loss."""
    init: Literal["normal", "switch"] = "normal"
    """Distribution of initial weights: normal, with standard deviation init_std; or switch, the Switch Transformer's
    truncated normal, with standard deviation sqrt(0.1 / number of inputs). Embeddings and output layer are always
    normal."""
    init_std: float = 0.02
    """Standard deviation of normal initial weights; for the output matrices of attention and feed-forward blocks,
    divided by sqrt(2 num_layers), or sqrt(2 num_decoder_layers) in a t5's decoder."""

    num_experts: int = 8
    """Routed experts in each MoE layer, over all ranks, before the split by granularity; 0 for a dense model."""
    moe_layers: tuple[int, ...] = ()
    """Numbers of the layers with experts, from 1; a t5's decoder layers follow its encoder's; empty to use `moe_every`.
    """
    moe_every: int = 1
    """Every n-th layer has experts, starting with layer n; ignored if `moe_layers` is set."""
    top_k: int = 1
    """Number of routed experts per token, before the split by granularity."""
    expert: str = "ffn"
    """Kind of experts: ffn (with `activation` and `gated`), swiglu, geglu, or a registered kind."""
    expert_options: Mapping[str, Any] = field(default_factory=dict)
    """Table of further options of the experts, such as dropout: see the last table of docs/recipe-reference.md."""
    granularity: int = 1
    """Number of finer experts into which every expert is split, each of width ffn_hidden_size / granularity. A token is
    routed to granularity x top_k finer experts (DeepSeekMoE)."""
    num_shared_experts: int = 0
    """Number of additional experts that process every token, each of width shared_ffn_hidden_size (DeepSeekMoE)."""
    shared_ffn_hidden_size: int | None = None
    """Hidden width of a shared expert; None for ffn_hidden_size."""
    shared_expert_gate: bool = False
    """Multiply the output of the shared experts for token x by sigmoid(w x), with a learned vector w (Qwen2-MoE)."""
    gate: str = "switch"
    """Name of a gate: naive, switch, gshard, sigmoid, ... (docs/gates.md), or a registered one."""
    gate_options: Mapping[str, Any] = field(default_factory=dict)
    """Table of further options of the gate, such as expert_groups: see the last table of docs/recipe-reference.md."""
    score: Literal["softmax", "sigmoid"] | None = None
    """Activation of the router's logits, for gates with this option (naive, sigmoid); None for the gate's default."""
    normalize: bool | None = None
    """Make the combine weights of a token's experts sum to one, for gates with this option (naive, and sigmoid with
    several experts per token); None for the gate's default, true."""
    routed_scale: float = 1.0
    """Factor of the combine weights of a token's experts, for gates with this option (naive, sigmoid)."""
    bias_step: float | None = None
    """Step size of the expert biases with which the sigmoid gate balances loads; 0 leaves balancing to the loss; None
    for the gate's default, 0.001."""
    capacity_factor: float | None = 1.25
    """Maximum assignments per expert and routing group, relative to an even share; None for no maximum; with
    gate=expert_choice, None means granularity x top_k."""
    eval_capacity_factor: float | None = 2.0
    """Capacity factor in evaluation; None for no maximum; with gate=expert_choice, None means capacity_factor."""
    jitter: float = 0.01
    """Half width of the multiplicative noise that the switch gate applies to its input in training."""
    group_size: int | None = None
    """Tokens per routing group, within which capacity and balance loss are computed; None for one sequence."""
    balance_loss: float = 0.01
    """Factor of the load balancing loss."""
    balance_scope: Literal["routing_group", "data_parallel"] = "routing_group"
    """Tokens over which the balance loss counts loads: those of a routing group, or of the micro batches of all data
    parallel ranks together (global-batch balance, arXiv 2501.11873)."""
    z_loss: float = 0.001
    """Factor of the router z-loss."""
    loss_weights: Mapping[str, Any] = field(default_factory=dict)
    """Table of the factors of other auxiliary losses: see the last table of docs/recipe-reference.md."""

    @property
    def objective(self) -> str:
        """Prediction task: ``t5``, ``bert`` or, for any other kind of model, ``gpt``."""
        return self.kind if self.kind in ("t5", "bert") else "gpt"

    @property
    def head_width(self) -> int:
        """Width of a query or key head."""
        if self.qk_head_dim is not None and self.qk_rope_head_dim is not None:
            return self.qk_head_dim + self.qk_rope_head_dim
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def value_width(self) -> int:
        """Width of a value head."""
        return self.head_width if self.v_head_dim is None else self.v_head_dim

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def dense_width(self) -> int:
        """Hidden width of the feed-forward blocks of layers without experts."""
        return self.ffn_hidden_size if self.dense_ffn_hidden_size is None else self.dense_ffn_hidden_size

    @property
    def routed_experts(self) -> int:
        """Number of routed experts of a layer, after the split by `granularity`."""
        return self.num_experts * self.granularity

    @property
    def chosen_experts(self) -> int:
        """Number of routed experts per token, after the split by `granularity`."""
        return self.top_k * self.granularity

    @property
    def expert_width(self) -> int:
        """Hidden width of a routed expert."""
        return self.ffn_hidden_size // self.granularity

    @property
    def shared_width(self) -> int:
        """Hidden width of a layer's shared experts together."""
        width = self.ffn_hidden_size if self.shared_ffn_hidden_size is None else self.shared_ffn_hidden_size
        return self.num_shared_experts * width

    @property
    def decoder_layers(self) -> int:
        """Number of layers of a T5's decoder; 0 for other models."""
        if self.kind != "t5":
            return 0
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def layer_numbers(self) -> range:
        """Layer numbers from 1. A T5's decoder layers follow its encoder's, and `mtp_numbers` come last."""
        return range(1, self.mtp_numbers.stop)

    @property
    def mtp_numbers(self) -> range:
        """Numbers of the layers of multi-token prediction, which are used only in training."""
        first = self.num_layers + self.decoder_layers + 1
        return range(first, first + self.mtp_layers)

    @property
    def layers_with_experts(self) -> tuple[int, ...]:
        """Numbers of the layers that have experts."""
        if not self.num_experts:
            return ()
        last = self.mtp_numbers.start - 1
        found = self.moe_layers or tuple(n for n in range(1, last + 1) if n % self.moe_every == 0)
        return (*found, *self.mtp_numbers) if last in found else found

    @property
    def layers_with_window(self) -> tuple[int, ...]:
        """Numbers of the layers whose attention is limited to `sliding_window`."""
        return () if self.sliding_window is None else self.sliding_layers or tuple(range(1, self.num_layers + 1))

    def check(self) -> None:
        """Raise UserError for the first invalid value or combination of values of the section."""
        self._check_latent()
        if self.head_dim is None and self.kv_lora_rank is None:
            divides("model.num_heads", self.num_heads, "model.hidden_size", self.hidden_size)
        if self.position == "rope" and self.kv_lora_rank is None and self.head_width % 2:
            name = f"model.hidden_size={self.hidden_size} / model.num_heads={self.num_heads}"
            name = name if self.head_dim is None else f"model.head_dim={self.head_dim}"
            raise UserError(f"{name} must be even with model.position=rope")
        if self.num_query_groups is not None:
            divides("model.num_query_groups", self.num_query_groups, "model.num_heads", self.num_heads)
            if self.kind == "t5" and self.num_query_groups != self.num_heads:
                raise UserError(
                    f"model.num_query_groups={self.num_query_groups} must equal model.num_heads={self.num_heads} with "
                    "model.kind=t5: its cross attention does not support groups"
                )
        if self.qk_norm_over != "head":
            if not self.qk_norm:
                raise UserError(f"model.qk_norm_over={self.qk_norm_over} needs model.qk_norm=true")
            if self.norm != "rms":
                raise UserError(f"model.qk_norm_over={self.qk_norm_over} needs model.norm=rms, not {self.norm}")
        if self.qkv_bias and self.kind == "t5":
            raise UserError("model.qkv_bias=true is not supported with model.kind=t5: its cross attention has no bias")
        if self.position == "relative" and self.kind != "t5":
            raise UserError(f"model.position=relative needs model.kind=t5, not {self.kind}")
        self._check_transformer_xl()
        for name, value in (("linear_bias", "true"), ("segment_types", self.segment_types)):
            if getattr(self, name) and self.kind != "bert":
                raise UserError(f"model.{name}={value} needs model.kind=bert, not {self.kind}")
        for name in ("attention_output_bias", "output_bias"):
            if getattr(self, name) and self.kind != "gpt":
                raise UserError(f"model.{name}=true needs model.kind=gpt, not {self.kind}")
        if self.linear_bias and self.qkv_bias:
            raise UserError("model.qkv_bias=true is not supported with model.linear_bias=true, which includes it")
        if self.linear_bias and self.num_experts:
            raise UserError(
                f"model.linear_bias=true is not supported with model.num_experts={self.num_experts}: use "
                "model.linear_bias=false; for biases in experts, set model.expert_options.bias"
            )
        if not self.tied_output_bias and not (self.kind == "t5" and self.tie_embeddings):
            raise UserError(
                f"model.tied_output_bias=false needs model.kind=t5, not {self.kind}"
                if self.kind != "t5"
                else "model.tied_output_bias=false needs model.tie_embeddings=true: a t5 without tied embeddings has "
                "no output bias"
            )
        if self.output_scale and self.kind != "t5":
            raise UserError(f"model.output_scale=true needs model.kind=t5, not {self.kind}")
        if self.position != "rope" and self.rope_theta != ModelConfig.rope_theta:
            raise UserError(f"model.rope_theta={self.rope_theta} needs model.position=rope, not {self.position}")
        self._check_rotary_fraction()
        self._check_local_attention()
        if self.activation == "swiglu_oai" and not self.gated:
            raise UserError("model.activation=swiglu_oai needs model.gated=true: it multiplies gates and values")
        self._check_yarn()
        for name in ("rope_theta", "norm_eps", "routed_scale", "attention_scale", *GPT_SCALES):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise UserError(f"model.{name}={getattr(self, name)} is not a positive number")
        for name in GPT_SCALES:
            if getattr(self, name) != 1 and self.kind != "gpt":
                raise UserError(f"model.{name}={getattr(self, name)} needs model.kind=gpt, not {self.kind}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout={self.dropout} is not in [0, 1)")
        if self.num_experts:
            self._check_experts()
        elif self.num_shared_experts:
            raise UserError(f"model.num_shared_experts={self.num_shared_experts} needs model.num_experts > 0")
        if not self.num_shared_experts:
            if self.shared_ffn_hidden_size is not None:
                name = f"model.shared_ffn_hidden_size={self.shared_ffn_hidden_size}"
                raise UserError(f"{name} needs model.num_shared_experts > 0")
            if self.shared_expert_gate:
                raise UserError("model.shared_expert_gate=true needs model.num_shared_experts > 0")
        for name in ("capacity_factor", "eval_capacity_factor"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"model.{name}={value} must be positive or none")
        if not 0 <= self.jitter < 1:
            raise UserError(f"model.jitter={self.jitter} is not in [0, 1)")
        self._check_mtp()

    def _check_transformer_xl(self) -> None:
        if self.position != "transformer_xl":
            if self.memory_length:
                name = f"model.memory_length={self.memory_length}"
                raise UserError(f"{name} needs model.position=transformer_xl, not {self.position}")
            return
        if self.kind != "gpt":
            raise UserError(f"model.position=transformer_xl needs model.kind=gpt, not {self.kind}")
        if self.hidden_size % 2:
            raise UserError(f"model.hidden_size={self.hidden_size} must be even with model.position=transformer_xl")
        if self.mtp_layers:
            name = f"model.mtp_layers={self.mtp_layers}"
            raise UserError(f"{name} is not supported with model.position=transformer_xl: use model.mtp_layers=0")

    def _check_rotary_fraction(self) -> None:
        if self.rotary_fraction == 1:
            return
        key = f"model.rotary_fraction={self.rotary_fraction}"
        if self.position != "rope":
            raise UserError(f"{key} needs model.position=rope, not {self.position}")
        if self.kv_lora_rank is not None:
            raise UserError(f"{key} is not supported with model.kv_lora_rank: set model.qk_rope_head_dim instead")
        if (
            not 0 < self.rotary_fraction < 1
            or (elements := int(self.head_width * self.rotary_fraction)) % 2
            or not elements
        ):
            raise UserError(
                f"{key} must be in (0, 1], and rotate an even number (2 or more) of a head's {self.head_width} elements"
            )

    def _check_local_attention(self) -> None:
        named = ["attention_sinks=true"] if self.attention_sinks else []
        named += [] if self.sliding_window is None else [f"sliding_window={self.sliding_window}"]
        if named and self.kind != "gpt":
            raise UserError(f"model.{named[0]} needs model.kind=gpt, not {self.kind}")
        if named and self.kv_lora_rank is not None:
            raise UserError(f"model.{named[0]} is not supported with model.kv_lora_rank={self.kv_lora_rank}")
        if named and self.position == "transformer_xl":
            raise UserError(f"model.{named[0]} is not supported with model.position=transformer_xl")
        if self.sliding_window is None:
            if self.sliding_layers:
                raise UserError(f"model.sliding_layers={self.sliding_layers} needs model.sliding_window")
            return
        if self.sliding_window < 1:
            raise UserError(f"model.sliding_window={self.sliding_window} must be at least 1, or none for no window")
        if self.mtp_layers:
            raise UserError(
                f"model.sliding_window={self.sliding_window} is not supported with model.mtp_layers={self.mtp_layers}: "
                "use model.sliding_window=none or model.mtp_layers=0"
            )
        for number in self.sliding_layers:
            if self.sliding_layers.count(number) > 1:
                raise UserError(f"model.sliding_layers={self.sliding_layers} has layer {number} twice")
            if not 1 <= number <= self.num_layers:
                raise UserError(
                    f"model.sliding_layers has layer {number}; layers are 1 to model.num_layers={self.num_layers}"
                )

    def _check_yarn(self) -> None:
        if self.rope_scaling is None:
            for entry in fields(self):
                value = getattr(self, entry.name)
                if entry.name.startswith("rope_") and entry.name != "rope_theta" and value != entry.default:
                    raise UserError(f"model.{entry.name}={str(value).lower()} needs model.rope_scaling=yarn")
            return
        key = f"model.rope_scaling={self.rope_scaling}"
        for name, value in (("kind", "gpt"), ("position", "rope")):
            if getattr(self, name) != value:
                raise UserError(f"{key} needs model.{name}={value}, not {getattr(self, name)}")
        if self.rope_original_length is None:
            raise UserError(f"{key} needs model.rope_original_length")
        if not self.rope_theta > 1:
            raise UserError(f"model.rope_theta={self.rope_theta} must be more than 1 with {key}")
        if not self.rope_factor >= 1:
            raise UserError(f"model.rope_factor={self.rope_factor} must be at least 1 with {key}")
        if not 0 < self.rope_beta_slow <= self.rope_beta_fast:
            raise UserError(
                f"model.rope_beta_slow={self.rope_beta_slow} must be positive and at most "
                f"model.rope_beta_fast={self.rope_beta_fast}"
            )
        low, high = 2 * math.pi * self.rope_beta_slow, 2 * math.pi * self.rope_beta_fast * self.rope_theta
        if not low < self.rope_original_length < high:
            raise UserError(
                f"model.rope_original_length={self.rope_original_length} must be between {low:.1f} (2 pi "
                f"model.rope_beta_slow) and {high:.1f} (2 pi model.rope_beta_fast x model.rope_theta): otherwise YaRN "
                "scales all or no wavelengths"
            )
        if not self.rope_mscale > 0:
            raise UserError(f"model.rope_mscale={self.rope_mscale} is not positive")
        if self.rope_mscale != 1 and not self.rope_mscale_all_dim:
            raise UserError(f"model.rope_mscale={self.rope_mscale} must be 1 unless model.rope_mscale_all_dim > 0")

    def _check_mtp(self) -> None:
        if not self.mtp_layers:
            if self.mtp_loss != ModelConfig.mtp_loss:
                raise UserError(f"model.mtp_loss={self.mtp_loss} needs model.mtp_layers > 0")
            return
        if self.kind != "gpt":
            raise UserError(f"model.mtp_layers={self.mtp_layers} needs model.kind=gpt, not {self.kind}")
        if not self.mtp_loss > 0:
            raise UserError(f"model.mtp_loss={self.mtp_loss} is not positive; use model.mtp_layers=0 to omit this loss")
        if self.mtp_layers >= self.sequence_length:
            raise UserError(
                f"model.mtp_layers={self.mtp_layers} must be less than model.sequence_length={self.sequence_length}: "
                "no token would be left to predict"
            )

    def _check_latent(self) -> None:
        widths = ("qk_head_dim", "qk_rope_head_dim", "v_head_dim")
        if self.kv_lora_rank is None:
            for name in ("q_lora_rank", *widths):
                if getattr(self, name) is not None:
                    raise UserError(f"model.{name}={getattr(self, name)} needs model.kv_lora_rank")
            return
        key = f"model.kv_lora_rank={self.kv_lora_rank}"
        for name in widths:
            if getattr(self, name) is None:
                raise UserError(f"{key} needs model.{name}")
        for name, value in (("kind", "gpt"), ("position", "rope")):
            if getattr(self, name) != value:
                raise UserError(f"{key} needs model.{name}={value}, not {getattr(self, name)}")
        for name in ("num_query_groups", "head_dim"):
            if getattr(self, name) is not None:
                raise UserError(
                    f"model.{name}={getattr(self, name)} is not supported with {key}: use model.{name}=none"
                )
        if self.qk_norm:
            raise UserError(f"model.qk_norm=true is not supported with {key}, which normalizes the compressed vectors")
        if self.attention_scale is not None:
            raise UserError(
                f"model.attention_scale={self.attention_scale} is not supported with {key}: use "
                "model.attention_scale=none"
            )
        for name in ("qkv_bias", "attention_output_bias"):
            if getattr(self, name):
                raise UserError(f"model.{name}=true is not supported with {key}: multi-latent attention has no biases")
        if self.qk_rope_head_dim is not None and self.qk_rope_head_dim % 2:
            raise UserError(f"model.qk_rope_head_dim={self.qk_rope_head_dim} must be even")

    def _check_experts(self) -> None:
        if self.top_k > self.num_experts:
            raise UserError(f"model.top_k={self.top_k} exceeds model.num_experts={self.num_experts}")
        divides("model.granularity", self.granularity, "model.ffn_hidden_size", self.ffn_hidden_size)
        for number in self.moe_layers:
            if self.moe_layers.count(number) > 1:
                raise UserError(f"model.moe_layers={self.moe_layers} has layer {number} twice")
            if not 1 <= number < self.mtp_numbers.start:
                last = f"model.num_layers={self.num_layers}"
                last += f" + model.num_decoder_layers={self.decoder_layers}" if self.kind == "t5" else ""
                raise UserError(f"model.moe_layers has layer {number}; layers are 1 to {last}")
        if not self.layers_with_experts:
            raise UserError(f"model.moe_every={self.moe_every} exceeds the model's {self.mtp_numbers.start - 1} layers")
        if self.dense_ffn_hidden_size is not None and len(self.layers_with_experts) == len(self.layer_numbers):
            raise UserError(
                f"model.dense_ffn_hidden_size={self.dense_ffn_hidden_size} needs layers without experts: "
                "set model.moe_layers or model.moe_every"
            )
