"""The families Mixtral and Qwen3-MoE, and the tables and keys that they share with similar models with experts."""

from collections.abc import Callable, Sequence

from fmoe.errors import UserError
from pretrain.config import ModelConfig
from pretrain.interchange.family import Config, Demand, Family, KeyPair, Only, Values, read_bool, read_int, toml
from pretrain.interchange.rope import YARN, write_rope
from pretrain.interchange.tensors import Entry, Halves, OfOne, QueryKeyValue, Same, Transform

LAYER = "model.layers.{layer}"
ATTENTION = f"{LAYER}.self_attn"
OUR_LAYER = "model/decoder.layers.{layer}"

# Common to Llama's descendants.
COMMON = (
    Entry("model", "model/embedding.word_embeddings.weight", {"model.embed_tokens.weight": "V D"}),
    Entry(
        "layer", f"{OUR_LAYER}.self_attention.linear_qkv.layer_norm_weight", {f"{LAYER}.input_layernorm.weight": "D"}
    ),
    Entry(
        "layer",
        f"{OUR_LAYER}.self_attention.linear_qkv.weight",
        {
            f"{ATTENTION}.q_proj.weight": "Qd D",
            f"{ATTENTION}.k_proj.weight": "Gd D",
            f"{ATTENTION}.v_proj.weight": "Gd D",
        },
        QueryKeyValue(),
    ),
    Entry("layer", f"{OUR_LAYER}.self_attention.linear_proj.weight", {f"{ATTENTION}.o_proj.weight": "D Qd"}),
    Entry("layer", f"{OUR_LAYER}.mlp.linear_fc1.layer_norm_weight", {f"{LAYER}.post_attention_layernorm.weight": "D"}),
    Entry("model", "model/decoder.final_layernorm.weight", {"model.norm.weight": "D"}),
    Entry("output", "model/output_layer.weight", {"lm_head.weight": "V D"}),
)
OUTPUT_BIAS = Entry(
    "layer",
    f"{OUR_LAYER}.self_attention.linear_proj.bias",
    {f"{ATTENTION}.o_proj.bias": "D"},
    when=lambda model: model.attention.output_bias,
)
QKV_BIAS = Entry(
    "layer",
    f"{OUR_LAYER}.self_attention.linear_qkv.bias",
    {f"{ATTENTION}.q_proj.bias": "Qd", f"{ATTENTION}.k_proj.bias": "Gd", f"{ATTENTION}.v_proj.bias": "Gd"},
    QueryKeyValue(),
    when=lambda model: model.attention.qkv_bias,
)
QK_NORM = (
    Entry("layer", f"{OUR_LAYER}.self_attention.q_layernorm.weight", {f"{ATTENTION}.q_norm.weight": "d"}),
    Entry("layer", f"{OUR_LAYER}.self_attention.k_layernorm.weight", {f"{ATTENTION}.k_norm.weight": "d"}),
)
DENSE = (
    Entry(
        "dense",
        f"{OUR_LAYER}.mlp.linear_fc1.weight",
        {f"{LAYER}.mlp.gate_proj.weight": "F D", f"{LAYER}.mlp.up_proj.weight": "F D"},
        Halves(),
    ),
    Entry("dense", f"{OUR_LAYER}.mlp.linear_fc2.weight", {f"{LAYER}.mlp.down_proj.weight": "D F"}),
)


def expert_entries(block: str, gate: str, value: str, output: str) -> tuple[Entry, ...]:
    """Return the entries of a layer's router and experts.

    Args:
        block: name of the Hugging Face module that contains the router and the experts, such as "mlp".
        gate, value, output: Hugging Face names of an expert's matrices, such as "gate_proj", "up_proj" and
            "down_proj".
    """
    expert = f"{LAYER}.{block}.experts.{{expert}}"
    return (
        Entry("moe", f"{OUR_LAYER}.mlp.gate.weight", {f"{LAYER}.{block}.gate.weight": "E D"}),
        Entry(
            "expert",
            f"{OUR_LAYER}.mlp.experts.weight_in",
            {f"{expert}.{gate}.weight": "H D", f"{expert}.{value}.weight": "H D"},
            Halves(),
        ),
        Entry("expert", f"{OUR_LAYER}.mlp.experts.weight_out", {f"{expert}.{output}.weight": "D H"}),
    )


def shared_entries(block: str, output: Transform = Same()) -> tuple[Entry, ...]:  # noqa: B008 - stateless
    """Return the entries of the shared experts, which the Hugging Face format has as one wide expert.

    Args:
        block: name of that expert's module.
        output: transform of the output matrix.
    """
    ours = f"{OUR_LAYER}.mlp.shared.expert"
    theirs = f"{LAYER}.mlp.{block}"
    halves = {f"{theirs}.gate_proj.weight": "S D", f"{theirs}.up_proj.weight": "S D"}
    return (
        Entry("moe", f"{ours}.weight_in", halves, OfOne(Halves())),
        Entry("moe", f"{ours}.weight_out", {f"{theirs}.down_proj.weight": "D S"}, OfOne(output)),
    )


# Experts in transformers 5's in-memory layout, which it writes on request.
STACKED = (
    Entry("moe", f"{OUR_LAYER}.mlp.gate.weight", {f"{LAYER}.mlp.gate.weight": "E D"}),
    Entry("moe", f"{OUR_LAYER}.mlp.experts.weight_in", {f"{LAYER}.mlp.experts.gate_up_proj": "E 2H D"}),
    Entry("moe", f"{OUR_LAYER}.mlp.experts.weight_out", {f"{LAYER}.mlp.experts.down_proj": "E D H"}),
)

# Experts in separate tensors, under the names that Mixtral has and those that most other families have.
W1_W3_W2 = expert_entries("block_sparse_moe", "w1", "w3", "w2")
EXPERTS = expert_entries("mlp", "gate_proj", "up_proj", "down_proj")


def norm_and_rope(eps: float, theta: float) -> tuple[KeyPair, KeyPair]:
    """Return the keys of the norms' epsilon and of the rotary base, whose defaults differ between families."""
    return (
        KeyPair("rms_norm_eps", "norm_eps", float, eps),
        KeyPair("rope_theta", "position.rope_theta", float, theta),
    )


def weights_sum_to_one(model: ModelConfig) -> bool:
    """Return whether a softmax gate makes the combine weights of a token sum to one in evaluation."""
    return model.moe.gate != "switch" and model.moe.normalize is not False


WIDTH = KeyPair("intermediate_size", "ffn_hidden_size", int)
EXPERT_WIDTH = KeyPair("moe_intermediate_size", "ffn_hidden_size", int)
SIZES = (
    KeyPair("vocab_size", "vocab_size", int),
    KeyPair("hidden_size", "hidden_size", int),
    KeyPair("num_hidden_layers", "num_layers", int),
    KeyPair("num_attention_heads", "attention.num_heads", int),
)
KEYS = (
    *SIZES,
    KeyPair("max_position_embeddings", "sequence_length", int),
    KeyPair("num_experts_per_tok", "moe.top_k", int),
    KeyPair("num_key_value_heads", "attention.num_query_groups", int, value=lambda m: m.query_groups),
    KeyPair("initializer_range", "init_std", float, 0.02),
    KeyPair("router_aux_loss_coef", "moe.balance_loss", float, 0.001),
    KeyPair("tie_word_embeddings", "tie_embeddings", bool, False),
)
FIXED = {"kind": "gpt", "norm": "rms", "position.encoding": "rope", "activation": "silu", "gated": True}
# Experts without options, which drop no token in evaluation.
SPARSE = (
    Demand("moe.num_experts", lambda m: m.moe.num_experts > 0, "a model with experts"),
    Demand("moe.expert_options", lambda m: not m.moe.expert_options.keys() - {"dropout"}, "no options except dropout"),
    Demand(
        "moe.eval_capacity_factor",
        lambda m: m.moe.eval_capacity_factor is None or m.moe.eval_capacity_factor * m.moe.top_k >= m.moe.num_experts,
        "at least moe.num_experts / moe.top_k, or moe.eval_capacity_factor=none, so that no token is dropped; "
        "or pass --no-drops",
    ),
)
SOFTMAX_SCORES = Demand("moe.score", lambda m: m.moe.score in (None, "softmax"), "softmax")
# The gate takes the top k of a softmax.
SOFTMAX = (
    Demand(
        "moe.gate", lambda m: m.moe.gate in ("naive", "switch"), "naive, or switch without jitter: top-k of a softmax"
    ),
    Demand("moe.jitter", lambda m: m.moe.gate != "switch" or not m.moe.jitter, "moe.jitter=0, or moe.gate=naive"),
    SOFTMAX_SCORES,
    *SPARSE,
)
SUM_TO_ONE = (
    Demand("moe.gate", lambda m: m.moe.gate == "naive", "naive, whose weights sum to one"),
    Demand("moe.normalize", weights_sum_to_one, "true: weights that sum to one"),
)
AS_THEY_ARE = Demand(
    "moe.normalize", lambda m: not weights_sum_to_one(m), "moe.normalize=false: weights of the softmax over all experts"
)
SHARED = Demand("moe.num_shared_experts", lambda m: m.moe.num_shared_experts > 0, "at least 1")
ALL_WINDOWS = Demand(
    "attention.sliding_layers",
    lambda m: len(m.layers_with_window) in (0, m.num_layers),
    "[], so that all layers have a window",
)
EQUAL_BIASES = Demand(
    "attention.output_bias",
    lambda m: m.attention.output_bias == m.attention.qkv_bias,
    "the value of attention.qkv_bias",
)
ONLY = (
    Only("hidden_act", ("silu", None)),
    Only("attention_bias", (False, None)),
    Only("mlp_bias", (False, None)),
    Only("quantization_config", (None,)),
    Only("partial_rotary_factor", (1, 1.0, None)),
    Only("is_encoder_decoder", (False, None)),
)
# Settings of an imported model: routed without drops, balanced by the loss alone.
DROPLESS = {
    "moe.gate": "naive",
    "moe.capacity_factor": None,
    "moe.eval_capacity_factor": None,
    "moe.jitter": 0.0,
    "moe.z_loss": 0.0,
}


def write_llama(model: ModelConfig) -> Values:
    """Return the keys of config.json that all families similar to Llama share."""
    return {
        "hidden_act": "silu",
        "head_dim": model.head_width,
        "attention_dropout": 0.0,
        "output_router_logits": False,
        "use_cache": True,
        **write_rope(model),
    }


def read_llama(config: Config) -> Values:
    """Return a dict with the recipe key ``head_dim``. Its value is None if config.json lacks ``head_dim``.

    Raises:
        UserError: ``head_dim`` is invalid, or a layer in ``layer_types`` has other than full attention.
    """
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, Sequence) or any(kind != "full_attention" for kind in kinds)):
        raise UserError(f"layer_types={toml(kinds)} is not supported: all must be full_attention")
    return {"attention.head_dim": read_int(config, "head_dim") if "head_dim" in config else None}


def in_layers(holds: Callable[[ModelConfig], bool], why: str) -> tuple[Demand, Demand]:
    """Return a condition on the layers with experts: of ``moe_layers``, which comes first, or of ``moe_every``."""
    return (
        Demand("moe.layers", lambda m: not m.moe.layers or holds(m), why),
        Demand("moe.every", lambda m: bool(m.moe.layers) or holds(m), why),
    )


_EVERY_LAYER = "experts in every layer (qwen3_moe allows dense layers, and needs attention.qk_norm=true)"


def _are_all_with_experts(model: ModelConfig) -> bool:
    return len(model.layers_with_experts) == model.num_layers


EVERY_LAYER = (
    Demand("moe.layers", lambda m: not m.moe.layers or _are_all_with_experts(m), _EVERY_LAYER),
    Demand("moe.every", _are_all_with_experts, _EVERY_LAYER),
)


def _read_mixtral(config: Config) -> Values:
    window = {"attention.sliding_window": read_int(config, "sliding_window")} if "sliding_window" in config else {}
    return read_llama(config) | DROPLESS | {"moe.normalize": True} | window


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    tables=((*COMMON, *W1_W3_W2), (*COMMON, *STACKED)),
    keys=(
        *KEYS,
        KeyPair("num_local_experts", "moe.num_experts", int, alias="num_experts"),
        WIDTH,
        *norm_and_rope(1e-5, 1e6),
    ),
    fixed=FIXED,
    demands=(
        *SOFTMAX,
        *EVERY_LAYER,
        *SUM_TO_ONE,
        ALL_WINDOWS,
    ),
    varies=("attention.head_dim", "attention.sliding_window", *YARN),
    constants={"router_jitter_noise": 0.0},
    only=ONLY,
    read=_read_mixtral,
    write=lambda model: write_llama(model) | {"sliding_window": model.attention.sliding_window},
)


def write_qwen_moe(model: ModelConfig) -> Values:
    """Return the keys of config.json that Qwen2-MoE and Qwen3-MoE have."""
    dense = [number for number in model.layer_numbers if number not in model.layers_with_experts]
    every = [number for number in model.layer_numbers if number % model.moe.every]
    is_regular = dense == every
    return write_llama(model) | {
        "decoder_sparse_step": model.moe.every if is_regular else 1,
        "mlp_only_layers": [] if is_regular else [number - 1 for number in dense],
        "intermediate_size": model.dense_width,
        "norm_topk_prob": weights_sum_to_one(model),
    }


def read_qwen_moe(config: Config) -> Values:
    """Return recipe keys of a Qwen2-MoE or Qwen3-MoE: routing, layers with experts, widths of heads and dense layers.

    Raises:
        UserError: a value is invalid or not supported.
    """
    if config.get("use_sliding_window"):
        raise UserError(f"use_sliding_window={toml(config['use_sliding_window'])} is not supported: it must be false")
    step = read_int(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    layers = range(config["num_hidden_layers"])
    if not isinstance(dense, list) or any(type(n) is not int or n not in layers for n in dense):
        raise UserError(f"mlp_only_layers={toml(dense)} must be a list of layers from 0 to {len(layers) - 1}")
    with_experts = [n + 1 for n in layers if n not in dense and (n + 1) % step == 0]
    if not with_experts:
        raise UserError(f"no layer has experts with decoder_sparse_step={step} and mlp_only_layers={dense}")
    values = read_llama(config) | DROPLESS | {"moe.normalize": read_bool(config, "norm_topk_prob", False)}
    if dense:
        values["moe.layers"] = tuple(with_experts)
    else:
        values["moe.every"] = step
    if len(with_experts) < len(layers):
        values["dense_ffn_hidden_size"] = read_int(config, "intermediate_size")
    return values


_QWEN3 = (*COMMON, *QK_NORM, *DENSE)
QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    tables=((*_QWEN3, *EXPERTS), (*_QWEN3, *STACKED)),
    keys=(
        *KEYS,
        KeyPair("num_experts", "moe.num_experts", int, other="num_local_experts"),
        EXPERT_WIDTH,
        *norm_and_rope(1e-6, 1e4),
    ),
    fixed=FIXED | {"attention.qk_norm": True},
    demands=SOFTMAX,
    varies=("attention.head_dim", "moe.normalize", "moe.layers", "moe.every", *YARN),
    constants={"attention_bias": False, "use_sliding_window": False, "sliding_window": None},
    only=ONLY,
    read=read_qwen_moe,
    write=write_qwen_moe,
)
