"""Encoder-decoders: T5 (arXiv 1910.10683) and the Switch Transformer (arXiv 2101.03961).

T5 does not scale attention scores. fmoe scales them by d^-0.5 for heads of width d, unless ``attention.scale`` is 1.

* If d is a power of 4, import multiplies the query matrices by d^0.5, and export divides them by d^0.5. This is exact.
* For any other d, such as T5-3B's, import sets ``attention.scale`` to 1 and leaves the query matrices as they are.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fmoe.errors import UserError
from pretrain.config import ModelConfig
from pretrain.interchange.families.llama import SOFTMAX_SCORES, SPARSE, in_layers, weights_sum_to_one
from pretrain.interchange.family import DENSE_ONLY, Config, Demand, Family, KeyPair, Only, Values, read_int, toml
from pretrain.interchange.folder import HuggingFaceFolder
from pretrain.interchange.tensors import Entry, Halves, QueryKeyValue, Sizes, Stack, Transform

SHARED = "shared.weight"
HEAD = "lm_head.weight"


def _times(tensor: Tensor, factor: float) -> Tensor:
    """Multiply a tensor by a power of two; raise UserError if the product is not exact."""
    product = tensor * factor
    if not torch.equal(product / factor, tensor):  # subnormal or overflowing
        dtype = str(tensor.dtype).removeprefix("torch.")
        advice = "" if tensor.dtype == torch.float32 else ": use float32 weights"
        raise UserError(
            f"queries cannot be multiplied by {factor}, as T5's scores require, without rounding in {dtype}{advice}"
        )
    return product


class Query:
    """Transform of a query matrix.

    In T5's format, the matrix includes the factor d^-0.5 of attention scores, for heads of width d.
    """

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        return (_times(ours, sizes["d"] ** -0.5),)

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return _times(theirs[0], sizes["d"] ** 0.5)


class ScaledQueryKeyValue(QueryKeyValue):
    """`QueryKeyValue` that also converts the queries as `Query` does."""

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        query, key, value = super().split(ours, sizes)
        return (*Query().split(query, sizes), key, value)

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        query, key, value = theirs
        return super().join((Query().join((query,), sizes), key, value), sizes)


def _queries(entry: Entry) -> tuple[Entry, Entry]:
    """Return two versions of a table entry for query matrices.

    The first is unchanged, for models with ``attention.scale``. The second scales the queries as `Query` does, for all
    other models.
    """
    scaled: Transform = ScaledQueryKeyValue() if isinstance(entry.transform, QueryKeyValue) else Query()
    return (
        replace(entry, when=lambda model: model.attention.scale is not None),
        replace(entry, transform=scaled, when=lambda model: model.attention.scale is None),
    )


class KeyValue:
    """Transform of Megatron-core's fused matrix of cross attention, exported as a key matrix and a value matrix.

    The rows of the fused matrix are ordered by head: the head's key, then its value.
    """

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        width = ours.shape[-1]
        rows = ours.view(sizes["Q"], 2, sizes["d"], width)
        return tuple(part.reshape(-1, width) for part in rows.unbind(1))

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        width = theirs[0].shape[-1]
        return torch.stack([part.view(sizes["Q"], sizes["d"], width) for part in theirs], 1).view(-1, width)


def _stack(stack: Stack, block: str) -> tuple[Entry, ...]:
    """Return the entries of the encoder or decoder; ``block`` is the Hugging Face name of a feed-forward block."""
    ours = f"model/{stack}.layers.{{layer}}"
    theirs = f"{stack}.block.{{layer}}.layer"
    attention = f"{theirs}.0.SelfAttention"
    last = f"{theirs}.{2 if stack == 'decoder' else 1}"
    entries = [
        Entry(
            "model",
            f"model/{stack}_relative_pos_emb.relative_attention_bias.weight",
            {f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "32 Q"},
        ),
        Entry("layer", f"{ours}.self_attention.linear_qkv.layer_norm_weight", {f"{theirs}.0.layer_norm.weight": "D"}),
        *_queries(
            Entry(
                "layer",
                f"{ours}.self_attention.linear_qkv.weight",
                {f"{attention}.q.weight": "Qd D", f"{attention}.k.weight": "Qd D", f"{attention}.v.weight": "Qd D"},
                QueryKeyValue(),
            )
        ),
        Entry("layer", f"{ours}.self_attention.linear_proj.weight", {f"{attention}.o.weight": "D Qd"}),
        Entry("layer", f"{ours}.mlp.linear_fc1.layer_norm_weight", {f"{last}.layer_norm.weight": "D"}),
        Entry(
            "dense",
            f"{ours}.mlp.linear_fc1.weight",
            {f"{last}.{block}.wi.weight": "F D"},
            when=lambda model: not model.gated,
        ),
        Entry(
            "dense",
            f"{ours}.mlp.linear_fc1.weight",
            {f"{last}.{block}.wi_0.weight": "F D", f"{last}.{block}.wi_1.weight": "F D"},
            Halves(),
            when=lambda model: model.gated,
        ),
        Entry("dense", f"{ours}.mlp.linear_fc2.weight", {f"{last}.{block}.wo.weight": "D F"}),
        Entry("moe", f"{ours}.mlp.gate.weight", {f"{last}.{block}.router.classifier.weight": "E D"}),
        Entry(
            "expert", f"{ours}.mlp.experts.weight_in", {f"{last}.{block}.experts.expert_{{expert}}.wi.weight": "H D"}
        ),
        Entry(
            "expert", f"{ours}.mlp.experts.weight_out", {f"{last}.{block}.experts.expert_{{expert}}.wo.weight": "D H"}
        ),
        Entry("model", f"model/{stack}.final_layernorm.weight", {f"{stack}.final_layer_norm.weight": "D"}),
    ]
    return tuple(replace(entry, stack=stack) for entry in entries)


_CROSS = "model/decoder.layers.{layer}.cross_attention"
_THEIR_CROSS = "decoder.block.{layer}.layer.1.EncDecAttention"
_CROSS_ATTENTION = (
    Entry(
        "layer",
        "model/decoder.layers.{layer}.pre_cross_attn_layernorm.weight",
        {"decoder.block.{layer}.layer.1.layer_norm.weight": "D"},
        stack="decoder",
    ),
    *_queries(Entry("layer", f"{_CROSS}.linear_q.weight", {f"{_THEIR_CROSS}.q.weight": "Qd D"}, stack="decoder")),
    Entry(
        "layer",
        f"{_CROSS}.linear_kv.weight",
        {f"{_THEIR_CROSS}.k.weight": "Qd D", f"{_THEIR_CROSS}.v.weight": "Qd D"},
        KeyValue(),
        stack="decoder",
    ),
    Entry("layer", f"{_CROSS}.linear_proj.weight", {f"{_THEIR_CROSS}.o.weight": "D Qd"}, stack="decoder"),
)


def _table(block: str) -> tuple[Entry, ...]:
    return (
        Entry("model", "model/embedding.word_embeddings.weight", {SHARED: "V D"}),
        *_stack("encoder", block),
        *_stack("decoder", block),
        *_CROSS_ATTENTION,
        Entry("output", "model/output_layer.weight", {HEAD: "V D"}),
    )


KEYS = (
    KeyPair("vocab_size", "vocab_size", int),
    KeyPair("d_model", "hidden_size", int),
    KeyPair("d_kv", "attention.head_dim", int, 64, value=lambda m: m.head_width),
    KeyPair("num_layers", "num_layers", int),
    KeyPair("num_heads", "attention.num_heads", int),
    KeyPair("layer_norm_epsilon", "norm_eps", float, 1e-6),
    KeyPair("n_positions", "sequence_length", int, 512),
)
FIXED = {"kind": "t5", "norm": "rms", "position.encoding": "relative"}


def _is_power_of_4(number: int) -> bool:
    return number.bit_count() == 1 and number.bit_length() % 2 == 1


SCORES = (
    Demand("attention.scale", lambda m: m.attention.scale in (None, 1.0), "attention.scale=1.0 or none"),
    Demand(
        "attention.head_dim",
        lambda m: m.attention.scale is not None or _is_power_of_4(m.head_width),
        "a power of 4, such as 64, or attention.scale=1: T5's scores lack the factor head_dim^-0.5, which must "
        "be exact in the query matrices",
    ),
)
ONLY = (
    Only("is_encoder_decoder", (True, None)),
    Only("is_decoder", (False, None)),
    Only("relative_attention_num_buckets", (32, None)),
    Only("relative_attention_max_distance", (128, None)),
    Only("quantization_config", (None,)),
)
CONSTANTS = {
    "is_encoder_decoder": True,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "use_cache": True,
}
COPIES = {f"{stack}.embed_tokens.weight": SHARED for stack in ("encoder", "decoder")} | {HEAD: SHARED}
# The first releases of T5 have biases by relative position for cross attention, which no model uses.
IGNORED = (".EncDecAttention.relative_attention_bias.weight",)


def _read(config: Config) -> Values:
    depth = read_int(config, "num_decoder_layers", config["num_layers"])
    return {
        "num_decoder_layers": None if depth == config["num_layers"] else depth,
        "attention.scale": None if _is_power_of_4(config.get("d_kv", 64)) else 1.0,
    }


# Values of feed_forward_proj: our activation, and whether blocks are gated; the first of equal ones is exported.
_BLOCKS = {
    "relu": ("relu", False),
    "gelu": ("gelu", False),
    "gelu_new": ("gelu_tanh", False),
    "silu": ("silu", False),
    "gated-relu": ("relu", True),
    "gated-gelu_python": ("gelu", True),
    "gated-gelu": ("gelu_tanh", True),
    "gated-silu": ("silu", True),
    "gated-gelu_new": ("gelu_tanh", True),
    "swish": ("silu", False),
    "gated-swish": ("silu", True),
}


def _read_t5(config: Config) -> Values:
    block = config.get("feed_forward_proj", "relu")
    if not isinstance(block, str) or block not in _BLOCKS:
        raise UserError(f"feed_forward_proj={toml(block)} is not supported: it must be one of {', '.join(_BLOCKS)}")
    activation, gated = _BLOCKS[block]
    name = "gelu_new" if block == "gated-gelu" else block.removeprefix("gated-")
    for key, value in (("dense_act_fn", name), ("is_gated_act", gated)):  # older configs have these too
        if config.get(key, value) != value:
            raise UserError(f"{key}={toml(config[key])} contradicts feed_forward_proj={block}")
    tied = config.get("tie_word_embeddings", True)
    return _read(config) | {
        "activation": activation,
        "gated": gated,
        "tie_embeddings": tied,
        "tied_output_bias": not tied,
        "output_scale": config.get("scale_decoder_outputs", tied),
    }


def _adapt_t5(config: Config, folder: HuggingFaceFolder) -> Values:
    """Return config.json, with ``tie_word_embeddings`` set according to the weights."""
    config = dict(config)
    # The default is the stored tie_word_embeddings. The weights then decide that key, because transformers 5 writes it
    # as true for every T5.
    config.setdefault("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
    is_tied = True
    if HEAD in folder.tensors and SHARED in folder.tensors:
        has_one_shape = folder.tensors[HEAD].shape == folder.tensors[SHARED].shape
        is_tied = has_one_shape and torch.equal(folder.read(HEAD), folder.read(SHARED))
    return config | {"tie_word_embeddings": is_tied}


def _write_t5(model: ModelConfig) -> Values:
    return {
        "d_ff": model.dense_width,
        "num_decoder_layers": model.decoder_layers,
        "feed_forward_proj": next(n for n, block in _BLOCKS.items() if block == (model.activation, model.gated)),
        "tie_word_embeddings": model.tie_embeddings,
        "scale_decoder_outputs": model.output_scale,
        "dropout_rate": model.dropout,
    }


T5 = Family(
    name="t5",
    architecture="T5ForConditionalGeneration",
    tables=(_table("DenseReluDense"),),
    keys=(*KEYS, KeyPair("d_ff", "ffn_hidden_size", int, value=lambda m: m.dense_width)),
    fixed=FIXED | {"moe.num_experts": 0},
    demands=(
        *DENSE_ONLY,
        *SCORES,
        Demand("tied_output_bias", lambda m: not (m.tie_embeddings and m.tied_output_bias), "false"),
        Demand("activation", lambda m: (m.activation, m.gated) in _BLOCKS.values(), "gelu, gelu_tanh, relu or silu"),
    ),
    varies=("num_decoder_layers", "activation", "gated", "tie_embeddings", "output_scale"),
    constants=CONSTANTS,
    only=(*ONLY, Only("tie_word_embeddings", (True, False, None)), Only("scale_decoder_outputs", (True, False, None))),
    read=_read_t5,
    write=_write_t5,
    adapt=_adapt_t5,
    copies=COPIES,
    ignored=IGNORED,
)


def _with_experts(depth: int, step: int) -> list[int]:
    """Return the layers with experts, counted from 0, of a stack of ``depth`` layers with the sparse step ``step``."""
    return [n for n in range(depth) if step == 1 or (step > 1 and n % step == 1)]


def _steps(model: ModelConfig) -> list[int] | None:
    """Return ``encoder_sparse_step`` and ``decoder_sparse_step``; None if the layers with experts match no step."""
    steps = []
    for first, depth in ((1, model.num_layers), (model.num_layers + 1, model.decoder_layers)):
        layers = sorted(n - first for n in model.layers_with_experts if first <= n < first + depth)
        step = next((step for step in range(depth + 1) if _with_experts(depth, step) == layers), None)
        if step is None:
            return None
        steps.append(step)
    return steps


def _read_switch(config: Config) -> Values:
    layers: list[int] = []
    steps: list[str] = []
    total = 0
    for stack, depths in (("encoder", "num_layers"), ("decoder", "num_decoder_layers")):
        depth = read_int(config, depths, config["num_layers"])
        number = read_int(config, f"num_sparse_{stack}_layers", 3, 0)
        step = read_int(config, f"{stack}_sparse_step", depth // number if number else depth, 0)
        steps.append(f"{stack}_sparse_step={step}")
        layers += [total + n + 1 for n in _with_experts(depth, step)]
        total += depth
    if not layers:
        raise UserError(f"no layer has experts with {' and '.join(steps)}")
    every = next((n for n in range(1, total + 1) if list(range(n, total + 1, n)) == layers), None)
    activation = config.get("dense_act_fn", "relu")
    names = [name for name, (_, gated) in _BLOCKS.items() if not gated]
    if activation not in names:
        raise UserError(f"dense_act_fn={toml(activation)} is not supported: it must be one of {', '.join(names)}")
    return _read(config) | {
        "moe.gate": "switch",
        "moe.capacity_factor": None,
        "moe.eval_capacity_factor": None,
        "activation": _BLOCKS[activation][0],
        **({"moe.layers": tuple(layers)} if every is None else {"moe.every": every}),
        # No expert gets more than expert_capacity tokens of so short a sequence, so none is dropped.
        "sequence_length": min(read_int(config, "n_positions", 512), read_int(config, "expert_capacity", 64)),
    }


def _write_switch(model: ModelConfig) -> Values:
    encoder, decoder = _steps(model) or [0, 0]
    return {
        "num_decoder_layers": model.decoder_layers,
        "encoder_sparse_step": encoder,
        "decoder_sparse_step": decoder,
        "num_sparse_encoder_layers": len(_with_experts(model.num_layers, encoder)),
        "num_sparse_decoder_layers": len(_with_experts(model.decoder_layers, decoder)),
        "dense_act_fn": next(n for n, block in _BLOCKS.items() if block == (model.activation, False)),
        "dropout_rate": model.dropout,
    }


SWITCH = Family(
    name="switch_transformers",
    architecture="SwitchTransformersForConditionalGeneration",
    tables=(_table("mlp"),),
    keys=(
        *KEYS,
        KeyPair("d_ff", "ffn_hidden_size", int),
        KeyPair("num_experts", "moe.num_experts", int, 8),
        KeyPair(
            "router_jitter_noise",
            "moe.jitter",
            float,
            0.01,
            value=lambda m: m.moe.jitter if m.moe.gate == "switch" else 0.0,
        ),
        KeyPair("router_z_loss_coef", "moe.z_loss", float, 0.001),
        KeyPair("router_aux_loss_coef", "moe.balance_loss", float, 0.001),
    ),
    fixed=FIXED
    | {"gated": False, "moe.top_k": 1, "tie_embeddings": True, "tied_output_bias": False, "output_scale": True},
    demands=(
        *SCORES,
        Demand("moe.gate", lambda m: m.moe.gate in ("switch", "naive"), "switch, or naive with moe.normalize=false"),
        Demand("moe.normalize", lambda m: not weights_sum_to_one(m), "false, or moe.gate=switch"),
        SOFTMAX_SCORES,
        *in_layers(
            lambda m: _steps(m) is not None,
            "experts in all layers of a stack, in none of them, or in layer 2 and every n-th after it",
        ),
        Demand(
            "dense_ffn_hidden_size",
            lambda m: m.dense_width == m.ffn_hidden_size,
            "model.dense_ffn_hidden_size=none: dense blocks are as wide as experts",
        ),
        *SPARSE,
    ),
    varies=("num_decoder_layers", "activation", "moe.normalize", "moe.layers", "moe.every"),
    # An expert_capacity that no sequence exceeds.
    constants=CONSTANTS
    | {
        "expert_capacity": 2**31 - 1,
        "router_bias": False,
        "router_dtype": "float32",
        "router_ignore_padding_tokens": False,
        "tie_word_embeddings": True,
    },
    only=(
        *ONLY,
        Only("tie_word_embeddings", (True, None)),
        Only("router_bias", (False, None)),
        Only("router_dtype", ("float32", None)),
        Only("router_ignore_padding_tokens", (False, None)),
        Only("is_gated_act", (False, None)),
    ),
    read=_read_switch,
    write=_write_switch,
    copies=COPIES,
    ignored=IGNORED,
)
