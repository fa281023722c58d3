"""The sections of a recipe that describe the model: ``[model]``, ``[attention]``, ``[position]`` and ``[moe]``.

`ModelConfig` has the keys of ``[model]`` and, as fields, the other sections: ``model.moe.num_experts`` is the key
``moe.num_experts``.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval, MultipleOf

from pretrain.config.keys import (
    BelowOne,
    Name,
    NotNegative,
    NotNegativeFloat,
    OnResume,
    Positive,
    PositiveFloat,
    Section,
    Table,
)

# Factors that only models of kind gpt have.
GPT_SCALES = ("embedding_scale", "residual_scale", "logit_divisor")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Section):
    """Attention: heads, norms, biases, windows, multi-latent attention."""

    num_heads: Positive = 6
    """Number of attention heads; must divide model.hidden_size unless head_dim or kv_lora_rank is set."""
    num_query_groups: Positive | None = None
    """Key/value heads, each shared by num_heads / num_query_groups query heads (grouped-query attention); None for
    num_heads."""
    head_dim: Positive | None = None
    """Width of an attention head; None for model.hidden_size / num_heads."""
    qk_norm: bool = False
    """Normalize queries and keys of self-attention before the scores."""
    qk_norm_over: Literal["head", "all"] = "head"
    """Elements that qk_norm normalizes together: with head, those of each head; with all, those of all heads (OLMoE;
    needs model.norm=rms)."""
    qkv_bias: bool = False
    """Add a bias to queries, keys and values."""
    output_bias: bool = False
    """Add a bias to the output of attention (needs model.kind=gpt)."""
    sinks: bool = False
    """Add exp(s) to the denominator of attention's softmax, with a learned s per head, initially 0 (GPT-OSS, arXiv
    2508.10925; needs model.kind=gpt)."""
    scale: PositiveFloat | None = None
    """Factor of attention scores; None for 1 / sqrt(width of a head)."""
    sliding_window: Positive | None = None
    """Number of tokens that a token attends to in `sliding_layers`: itself and those just before it; None for all
    (needs model.kind=gpt)."""
    sliding_layers: tuple[Positive, ...] = ()
    """Numbers of the layers with `sliding_window`, from 1; empty for all."""
    sliding_stride: Positive | None = None
    """In `sliding_layers`, a token also attends to every N-th token before its window (the pattern "fixed" of arXiv
    1904.10509); None for the window only."""
    kv_lora_rank: Positive | None = None
    """Width of the vector into which multi-latent attention (DeepSeek-V2, arXiv 2405.04434) compresses the keys and
    values of a token; None for standard attention. Needs qk_head_dim, qk_rope_head_dim and v_head_dim."""
    q_lora_rank: Positive | None = None
    """Width of the vector into which multi-latent attention compresses queries; None for uncompressed queries."""
    qk_head_dim: Positive | None = None
    """Number of elements without a rotary position in each query and key head (multi-latent attention)."""
    qk_rope_head_dim: Annotated[Positive, MultipleOf(2)] | None = None
    """Number of elements with a rotary position in each query head, and in the rotary key that all heads share
    (multi-latent attention)."""
    v_head_dim: Positive | None = None
    """Width of a value head (multi-latent attention)."""


@dataclass(frozen=True, kw_only=True)
class PositionConfig(Section):
    """Position encoding, its scaling to long sequences, and Transformer-XL's memory."""

    encoding: Literal["rope", "learned_absolute", "relative", "transformer_xl"] = "rope"
    """Position encoding. rope: rotary positions; learned_absolute: learned vectors added to the embedding; relative (t5
    only): one bias per head and range of distances (32 ranges, up to 128 tokens), added to the scores of all layers
    of a stack; transformer_xl (gpt only): projected sinusoids of the distance and two biases per head
    (Transformer-XL, arXiv 1901.02860)."""
    memory_length: Annotated[int, Interval(ge=0, le=2**28)] = 0
    """Memory of a Transformer-XL: in each layer, a sequence attends to the hidden states of this many tokens before it.
    If positive, each epoch is read as global_batch contiguous streams of text. Needs encoding=transformer_xl."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the wavelengths of rotary positions (encoding=rope)."""
    rotary_fraction: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Share of a head's elements, counted from the first, that get a rotary position (encoding=rope)."""
    rope_scaling: Literal["yarn"] | None = None
    """Scaling of rotary positions for sequences longer than those of earlier training: yarn (arXiv 2309.00071); None
    for no scaling. Needs model.kind=gpt, encoding=rope and rope_original_length."""
    rope_factor: Annotated[float, Ge(1)] = 1.0
    """Factor by which YaRN lengthens the long wavelengths; usually model.sequence_length / rope_original_length."""
    rope_original_length: Positive | None = None
    """Tokens per sequence before the extension by YaRN."""
    rope_beta_fast: float = 32.0
    """YaRN keeps the wavelength of a pair of elements that makes at least this many turns in rope_original_length
    tokens."""
    rope_beta_slow: PositiveFloat = 1.0
    """YaRN multiplies by rope_factor the wavelength of a pair of elements that makes at most this many turns in
    rope_original_length tokens. Between rope_beta_slow and rope_beta_fast turns, the factor is smaller."""
    rope_truncate: bool = True
    """Round down the pair index at which rope_beta_fast applies, and round up that of rope_beta_slow; false in
    GPT-OSS."""
    rope_mscale: PositiveFloat = 1.0
    """With m(x) = 1 + x ln(rope_factor) / 10, YaRN multiplies rotated queries and keys by m(rope_mscale) /
    m(rope_mscale_all_dim). Values other than 1 need rope_mscale_all_dim > 0."""
    rope_mscale_all_dim: NotNegativeFloat = 0.0
    """See rope_mscale. Multi-latent attention also multiplies its scores by the square of m(rope_mscale_all_dim)."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig(Section):
    """Experts, gate, capacity, auxiliary losses."""

    num_experts: Annotated[int, Interval(ge=0, le=2**20)] = 8
    """Routed experts in each MoE layer, over all ranks, before the split by granularity; 0 for a dense model."""
    layers: tuple[Positive, ...] = ()
    """Numbers of the layers with experts, from 1; a t5's decoder layers follow its encoder's; empty to use `every`."""
    every: Positive = 1
    """Every n-th layer has experts, starting with layer n; ignored if `layers` is set."""
    top_k: Positive = 1
    """Number of routed experts per token, before the split by granularity."""
    expert: Name = "ffn"
    """Kind of experts: ffn (with model.activation and model.gated), swiglu, geglu, or a registered kind."""
    expert_options: Table = field(default_factory=dict)
    """Table of further options of the experts, such as dropout: see the last table of docs/recipe-reference.md."""
    granularity: Positive = 1
    """Number of finer experts into which every expert is split, each of width model.ffn_hidden_size / granularity. A
    token is routed to granularity x top_k finer experts (DeepSeekMoE)."""
    num_shared_experts: Annotated[int, Interval(ge=0, le=2**20)] = 0
    """Number of additional experts that process every token, each of width shared_ffn_hidden_size (DeepSeekMoE)."""
    shared_ffn_hidden_size: Positive | None = None
    """Hidden width of a shared expert; None for model.ffn_hidden_size."""
    shared_expert_gate: bool = False
    """Multiply the output of the shared experts for token x by sigmoid(w x), with a learned vector w (Qwen2-MoE)."""
    gate: Name = "switch"
    """Name of a gate: naive, switch, gshard, sigmoid, ... (docs/gates.md), or a registered one."""
    gate_options: Table = field(default_factory=dict)
    """Table of further options of the gate, such as expert_groups: see the last table of docs/recipe-reference.md."""
    score: Literal["softmax", "sigmoid"] | None = None
    """Activation of the router's logits, for gates with this option (naive, sigmoid); None for the gate's default."""
    normalize: bool | None = None
    """Make the combine weights of a token's experts sum to one, for gates with this option (naive, and sigmoid with
    several experts per token); None for the gate's default, true."""
    routed_scale: PositiveFloat = 1.0
    """Factor of the combine weights of a token's experts, for gates with this option (naive, sigmoid)."""
    bias_step: NotNegativeFloat | None = None
    """Step size of the expert biases with which the sigmoid gate balances loads; 0 leaves balancing to the loss; None
    for the gate's default, 0.001."""
    capacity_factor: Annotated[float, Interval(gt=0, le=2.0**20)] | None = 1.25
    """Maximum assignments per expert and routing group, relative to an even share; None for no maximum; with
    gate=expert_choice, None means granularity x top_k."""
    eval_capacity_factor: Annotated[float, Interval(gt=0, le=2.0**20), OnResume("validation only")] | None = 2.0
    """Capacity factor in evaluation; None for no maximum; with gate=expert_choice, None means capacity_factor."""
    jitter: BelowOne = 0.01
    """Half width of the multiplicative noise that the switch gate applies to its input in training."""
    group_size: Positive | None = None
    """Tokens per routing group, within which capacity and balance loss are computed; None for one sequence."""
    balance_loss: NotNegativeFloat = 0.01
    """Factor of the load balancing loss."""
    balance_scope: Literal["routing_group", "data_parallel"] = "routing_group"
    """Tokens over which the balance loss counts loads: those of a routing group, or of the micro batches of all data
    parallel ranks together (global-batch balance, arXiv 2501.11873)."""
    z_loss: NotNegativeFloat = 0.001
    """Factor of the router z-loss."""
    loss_weights: Table = field(default_factory=dict)
    """Table of the factors of other auxiliary losses: see the last table of docs/recipe-reference.md."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The transformer: kind, sizes, norms, embeddings, output."""

    kind: Name = "gpt"
    """Architecture and objective: gpt predicts the next token, t5 (encoder and decoder) predicts masked spans, bert
    predicts masked tokens; classifier is a classifier of images in
    transformers, which `config` describes; or a registered kind,
    which predicts the next token."""
    config: Table = field(default_factory=dict)
    """Table of the configuration of a classifier: ``model_type``, such as vit or swin, and keys of its configuration in
    transformers. Needs kind=classifier and data.samples."""
    num_layers: Annotated[int, Interval(ge=1, le=2**16)] = 4
    """Transformer layers; for t5, those of the encoder; for a classifier, its feed-forward blocks."""
    num_decoder_layers: Annotated[int, Interval(ge=1, le=2**16)] | None = None
    """Layers of a t5's decoder; None for num_layers."""
    hidden_size: Positive = 192
    """Width of the residual stream."""
    ffn_hidden_size: Positive = 768
    """Hidden width of a dense feed-forward block, and of each expert before the split by moe.granularity."""
    dense_ffn_hidden_size: Positive | None = None
    """Hidden width of the feed-forward block in layers without experts; None for ffn_hidden_size."""
    sequence_length: Annotated[int, Interval(ge=1, le=2**28)] = 256
    """Tokens per training sequence; for t5, those of the encoder; for a classifier, tokens that count as one sample."""
    vocab_size: Positive = 2048
    """Rows of the embedding; at least the size of the tokenizer's vocabulary. For a classifier, number of classes."""
    activation: Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu_oai"] = "gelu"
    """Activation of the feed-forward blocks. gelu_tanh is GELU's approximation by a tanh, as in T5 version 1.1.
    swiglu_oai, for gated blocks, is the activation of GPT-OSS: (v + 1) g sigmoid(1.702 g), with the gate g limited to
    at most 7 and the value v to [-7, 7]."""
    gated: bool = False
    """Use gated feed-forward blocks (SwiGLU, if activation=silu)."""
    linear_bias: bool = False
    """Add biases to the linear maps of attention and feed-forward blocks (needs kind=bert and moe.num_experts=0)."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm (weight and bias) or RMSNorm (weight)."""
    norm_eps: PositiveFloat = 1e-5
    """Constant that norms add to the variance or mean square."""
    embedding_scale: PositiveFloat = 1.0
    """Factor of token embeddings (Granite, arXiv 2408.13359; needs kind=gpt)."""
    residual_scale: PositiveFloat = 1.0
    """Factor of the output of each attention and feed-forward block (Granite; needs kind=gpt)."""
    logit_divisor: PositiveFloat = 1.0
    """Number by which logits are divided (Granite; needs kind=gpt)."""
    segment_types: NotNegative = 0
    """Rows of a bert's segment embedding, which is added to the token embedding (all tokens are of segment 0); 0 for no
    segment embedding."""
    dropout: BelowOne = 0.0
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
    """Add a bias to the logits (needs kind=gpt)."""
    mtp_layers: Annotated[int, Interval(ge=0, le=2**8)] = 0
    """Number of further tokens that each position predicts in training (multi-token prediction, DeepSeek-V3, arXiv
    2412.19437 section 2.2). Each further token has a layer of its own, with experts if the model's last layer has them.
    Needs kind=gpt."""
    mtp_loss: Annotated[float, Gt(0), OnResume("from here on")] = 0.3
    """Factor with which the mean loss of the further tokens is added to the training loss."""
    init: Literal["normal", "switch"] = "normal"
    """Distribution of initial weights: normal, with standard deviation init_std; or switch, the Switch Transformer's
    truncated normal, with standard deviation sqrt(0.1 / number of inputs). Embeddings and output layer are always
    normal."""
    init_std: NotNegativeFloat = 0.02
    """Standard deviation of normal initial weights; for the output matrices of attention and feed-forward blocks,
    divided by sqrt(2 num_layers), or sqrt(2 num_decoder_layers) in a t5's decoder."""

    attention: AttentionConfig = field(default_factory=AttentionConfig)
    position: PositionConfig = field(default_factory=PositionConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)

    @property
    def objective(self) -> str:
        """Prediction task: ``t5``, ``bert``, ``classifier`` or, for any other kind of model, ``gpt``."""
        return self.kind if self.kind in ("t5", "bert", "classifier") else "gpt"

    @property
    def head_width(self) -> int:
        """Width of a query or key head."""
        attention = self.attention
        if attention.qk_head_dim is not None and attention.qk_rope_head_dim is not None:
            return attention.qk_head_dim + attention.qk_rope_head_dim
        return self.hidden_size // attention.num_heads if attention.head_dim is None else attention.head_dim

    @property
    def value_width(self) -> int:
        """Width of a value head."""
        return self.head_width if self.attention.v_head_dim is None else self.attention.v_head_dim

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        groups = self.attention.num_query_groups
        return self.attention.num_heads if groups is None else groups

    @property
    def dense_width(self) -> int:
        """Hidden width of the feed-forward blocks of layers without experts."""
        return self.ffn_hidden_size if self.dense_ffn_hidden_size is None else self.dense_ffn_hidden_size

    @property
    def routed_experts(self) -> int:
        """Number of routed experts of a layer, after the split by ``moe.granularity``."""
        return self.moe.num_experts * self.moe.granularity

    @property
    def chosen_experts(self) -> int:
        """Number of routed experts per token, after the split by ``moe.granularity``."""
        return self.moe.top_k * self.moe.granularity

    @property
    def expert_width(self) -> int:
        """Hidden width of a routed expert."""
        return self.ffn_hidden_size // self.moe.granularity

    @property
    def shared_width(self) -> int:
        """Hidden width of a layer's shared experts together."""
        width = self.moe.shared_ffn_hidden_size
        return self.moe.num_shared_experts * (self.ffn_hidden_size if width is None else width)

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
    def stack_numbers(self) -> range:
        """Layer numbers without `mtp_numbers`: the layers that pipeline stages divide."""
        return range(1, self.mtp_numbers.start)

    @property
    def mtp_numbers(self) -> range:
        """Numbers of the layers of multi-token prediction, which are used only in training."""
        first = self.num_layers + self.decoder_layers + 1
        return range(first, first + self.mtp_layers)

    @property
    def layers_with_experts(self) -> tuple[int, ...]:
        """Numbers of the layers that have experts."""
        if not self.moe.num_experts:
            return ()
        last = self.mtp_numbers.start - 1
        numbers = self.moe.layers or tuple(n for n in range(1, last + 1) if n % self.moe.every == 0)
        return (*numbers, *self.mtp_numbers) if last in numbers else numbers

    @property
    def layers_with_window(self) -> tuple[int, ...]:
        """Numbers of the layers whose attention is limited to ``attention.sliding_window``."""
        if self.attention.sliding_window is None:
            return ()
        return self.attention.sliding_layers or tuple(range(1, self.num_layers + 1))

    def value(self, name: str) -> Any:
        """Return the value of a key, which is named as in `values`."""
        return operator.attrgetter(name)(self)

    def values(self) -> dict[str, Any]:
        """Return the values of all keys by name: ``num_layers`` for ``[model]``, ``moe.top_k`` for other sections."""
        flat: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Section):
                flat |= {f"{entry.name}.{inner.name}": getattr(value, inner.name) for inner in fields(value)}
            else:
                flat[entry.name] = value
        return flat

    def with_values(self, values: Mapping[str, Any]) -> "ModelConfig":
        """Return a copy with other values of some keys, which are named as in `values`."""
        of_section: dict[str, dict[str, Any]] = {"": {}}
        for name, value in values.items():
            section, _, key = name.rpartition(".")
            of_section.setdefault(section, {})[key] = value
        changes = of_section.pop("")
        changes |= {section: replace(getattr(self, section), **keys) for section, keys in of_section.items()}
        return replace(self, **changes)


def full_name(name: str) -> str:
    """Return the recipe key with the name of `ModelConfig.values`, such as ``model.num_layers`` or ``moe.top_k``."""
    return name if "." in name else f"model.{name}"
