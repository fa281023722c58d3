"""DeepSeek-V2 and DeepSeek-V3 (arXiv 2405.04434, 2412.19437): latent attention, shared experts, groups of experts.

Rotary elements of a head are interleaved pairs, as in Megatron-core's latent attention, so rows of
matrices keep their order.
"""

import torch

from fmoe.errors import UserError
from fmoe.gates.naive import check_groups
from pretrain.config import ModelConfig
from pretrain.interchange.families.llama import (
    AS_THEY_ARE,
    ATTENTION,
    COMMON,
    DENSE,
    DROPLESS,
    EXPERT_WIDTH,
    EXPERTS,
    FIXED,
    KEYS,
    LAYER,
    ONLY,
    OUR_LAYER,
    SHARED,
    SOFTMAX,
    SPARSE,
    STACKED,
    in_layers,
    shared_entries,
    write_llama,
)
from pretrain.interchange.family import (
    Config,
    Demand,
    Family,
    KeyPair,
    Only,
    Values,
    read_bool,
    read_int,
    toml,
    without,
)
from pretrain.interchange.folder import HuggingFaceFolder
from pretrain.interchange.rope import YARN
from pretrain.interchange.tensors import Entry

OUR_ATTENTION = f"{OUR_LAYER}.self_attention"


LATENT_ATTENTION = (
    Entry("layer", f"{OUR_LAYER}.input_layernorm.weight", {f"{LAYER}.input_layernorm.weight": "D"}),
    Entry(
        "layer",
        f"{OUR_ATTENTION}.linear_q_proj.weight",
        {f"{ATTENTION}.q_proj.weight": "Qd D"},
        when=lambda model: model.attention.q_lora_rank is None,
    ),
    Entry(
        "layer",
        f"{OUR_ATTENTION}.linear_q_down_proj.weight",
        {f"{ATTENTION}.q_a_proj.weight": "C D"},
        when=lambda model: model.attention.q_lora_rank is not None,
    ),
    Entry(
        "layer",
        f"{OUR_ATTENTION}.q_layernorm.weight",
        {f"{ATTENTION}.q_a_layernorm.weight": "C"},
        when=lambda model: model.attention.q_lora_rank is not None,
    ),
    Entry(
        "layer",
        f"{OUR_ATTENTION}.linear_q_up_proj.weight",
        {f"{ATTENTION}.q_b_proj.weight": "Qd C"},
        when=lambda model: model.attention.q_lora_rank is not None,
    ),
    Entry("layer", f"{OUR_ATTENTION}.linear_kv_down_proj.weight", {f"{ATTENTION}.kv_a_proj_with_mqa.weight": "K D"}),
    Entry("layer", f"{OUR_ATTENTION}.kv_layernorm.weight", {f"{ATTENTION}.kv_a_layernorm.weight": "R"}),
    Entry("layer", f"{OUR_ATTENTION}.linear_kv_up_proj.weight", {f"{ATTENTION}.kv_b_proj.weight": "QM R"}),
    Entry("layer", f"{OUR_ATTENTION}.linear_proj.weight", {f"{ATTENTION}.o_proj.weight": "D Qv"}),
    Entry("layer", f"{OUR_LAYER}.pre_mlp_layernorm.weight", {f"{LAYER}.post_attention_layernorm.weight": "D"}),
)
SHARED_EXPERTS = shared_entries("shared_experts")
CHOICE_BIAS = (
    Entry(
        "moe",
        f"{OUR_LAYER}.mlp.gate.expert_bias_E",
        {f"{LAYER}.mlp.gate.e_score_correction_bias": "E"},
        dtype=torch.float32,
    ),
)
MTP = (
    Entry("mtp", "model/mtp.layers.{depth}.enorm.weight", {f"{LAYER}.enorm.weight": "D"}),
    Entry("mtp", "model/mtp.layers.{depth}.hnorm.weight", {f"{LAYER}.hnorm.weight": "D"}),
    Entry("mtp", "model/mtp.layers.{depth}.eh_proj.weight", {f"{LAYER}.eh_proj.weight": "D 2D"}),
    Entry("mtp", "model/mtp.layers.{depth}.final_layernorm.weight", {f"{LAYER}.shared_head.norm.weight": "D"}),
)
# Copies of the embedding and the output layer.
MTP_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")
_MODEL = tuple(entry for entry in COMMON if entry.where in ("model", "output"))
_V2 = (*_MODEL, *LATENT_ATTENTION, *DENSE, *SHARED_EXPERTS)
_V3 = (*_V2, *CHOICE_BIAS, *MTP)


def num_dense(model: ModelConfig) -> int:
    """Return the number of layers without experts."""
    return len(model.layer_numbers) - len(model.layers_with_experts)


def is_dense_first(model: ModelConfig) -> bool:
    """Return whether all layers without experts precede those with experts. False for a model without experts."""
    return model.layers_with_experts == tuple(model.layer_numbers)[num_dense(model) :] and model.moe.num_experts > 0


def read_dense(config: Config, default: int) -> Values:
    """Return the recipe keys ``moe.layers`` and ``dense_ffn_hidden_size``; {} if all layers have experts.

    Args:
        default: default of ``first_k_dense_replace``.

    Raises:
        UserError: a value is invalid, or no layer has experts.
    """
    dense = config.get("first_k_dense_replace", default)
    layers = config["num_hidden_layers"]
    if type(dense) is not int or not 0 <= dense < layers:
        raise UserError(
            f"first_k_dense_replace={toml(dense)} must be an integer from 0 to {layers - 1}, so that a layer has "
            "experts"
        )
    if not dense:
        return {}
    width = read_int(config, "intermediate_size")
    return {"moe.layers": tuple(range(dense + 1, layers + 1)), "dense_ffn_hidden_size": width}


def write_dense(model: ModelConfig) -> Values:
    """Return the keys of config.json for layers without experts."""
    return {"first_k_dense_replace": num_dense(model), "intermediate_size": model.dense_width, "moe_layer_freq": 1}


def read_groups(config: Config, groups: int, kept: int) -> Values:
    """Return the gate's options for group-limited routing; {} for a single group of experts.

    Args:
        groups, kept: defaults of ``n_group`` and ``topk_group``.

    Raises:
        UserError: a value is not a positive integer, or the groups do not fit the experts.
    """
    groups = read_int(config, "n_group", groups)
    kept = read_int(config, "topk_group", kept)
    try:
        check_groups(config["n_routed_experts"], config["num_experts_per_tok"], groups, kept)
    except UserError as error:
        raise UserError(f"n_group={groups} and topk_group={kept} are not supported: {error}") from error
    return {"expert_groups": groups, "kept_groups": kept} if groups > 1 else {}


def write_groups(model: ModelConfig) -> Values:
    """Return the keys ``n_group`` and ``topk_group`` of config.json, for group-limited routing."""
    groups = model.moe.gate_options.get("expert_groups")
    return {"n_group": groups or 1, "topk_group": model.moe.gate_options.get("kept_groups", 1) if groups else 1}


def _write_latent(model: ModelConfig) -> Values:
    widths = {
        "head_dim": model.attention.qk_rope_head_dim,
        "q_lora_rank": model.attention.q_lora_rank,
        "qk_head_dim": model.head_width,
    }
    return write_llama(model) | write_dense(model) | write_groups(model) | widths


def _read_latent(config: Config) -> Values:
    return {"attention.q_lora_rank": read_int(config, "q_lora_rank") if "q_lora_rank" in config else None}


DENSE_FIRST = in_layers(is_dense_first, "experts in all layers but the first ones")
LATENT = (
    Demand(
        "attention.kv_lora_rank",
        lambda m: m.attention.kv_lora_rank is not None,
        "a number, which selects multi-latent attention",
    ),
    SHARED,
    *DENSE_FIRST,
)
# transformers has this epsilon for compressed vectors, whatever rms_norm_eps is.
LATENT_EPS = 1e-6
LATENT_KEYS = (
    *without(KEYS, "router_aux_loss_coef"),
    KeyPair("n_routed_experts", "moe.num_experts", int, alias="num_local_experts"),
    EXPERT_WIDTH,
    KeyPair("kv_lora_rank", "attention.kv_lora_rank", int, 512),
    KeyPair("qk_nope_head_dim", "attention.qk_head_dim", int, 128),
    KeyPair("qk_rope_head_dim", "attention.qk_rope_head_dim", int, 64),
    KeyPair("v_head_dim", "attention.v_head_dim", int, 128),
    KeyPair("rope_theta", "position.rope_theta", float, 1e4),
)
LATENT_ONLY = (*ONLY, Only("rms_norm_eps", (LATENT_EPS, None)), Only("moe_layer_freq", (1, None)))
GROUPS = Demand(
    "moe.gate_options",
    lambda m: not m.moe.gate_options.keys() - {"expert_groups", "kept_groups"},
    "no options except expert_groups and kept_groups",
)


def _read_deepseek_v2(config: Config) -> Values:
    values = _read_latent(config) | read_dense(config, 0) | DROPLESS | {"moe.normalize": False}
    method = config.get("topk_method", "greedy")
    if method == "group_limited_greedy":
        values["moe.gate_options"] = read_groups(config, 1, 1)
    elif method != "greedy":
        raise UserError(f"topk_method={toml(method)} is not supported: it must be greedy or group_limited_greedy")
    return values


def _write_deepseek_v2(model: ModelConfig) -> Values:
    method = "group_limited_greedy" if model.moe.gate_options.get("expert_groups") else "greedy"
    return _write_latent(model) | {"topk_method": method}


DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    tables=((*_V2, *EXPERTS), (*_V2, *STACKED)),
    keys=(
        *LATENT_KEYS,
        KeyPair("n_shared_experts", "moe.num_shared_experts", int, 2),
        KeyPair("routed_scaling_factor", "moe.routed_scale", float, 1.0),
        KeyPair("aux_loss_alpha", "moe.balance_loss", float, 0.001),
    ),
    fixed=FIXED | {"norm_eps": LATENT_EPS},
    demands=(
        *LATENT,
        *SOFTMAX,
        GROUPS,
        Demand(
            "hidden_size", lambda m: m.hidden_size % m.attention.num_heads == 0, "a multiple of attention.num_heads"
        ),
        AS_THEY_ARE,
    ),
    varies=("attention.q_lora_rank", *YARN),
    constants={
        "rms_norm_eps": LATENT_EPS,
        "attention_bias": False,
        "mlp_bias": False,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    },
    only=(*LATENT_ONLY, Only("scoring_func", ("softmax", None)), Only("norm_topk_prob", (False, None))),
    read=_read_deepseek_v2,
    write=_write_deepseek_v2,
)


def sums_weights(model: ModelConfig) -> bool:
    """Return whether the sigmoid gate makes a token's combine weights sum to one. False if ``top_k`` is 1."""
    return model.moe.normalize is not False and model.moe.top_k > 1


SIGMOID = (
    Demand("moe.gate", lambda m: m.moe.gate == "sigmoid", "sigmoid"),
    Demand("moe.score", lambda m: m.moe.score in (None, "sigmoid"), "sigmoid"),
    *SPARSE,
    GROUPS,
    Demand(
        "moe.gate_options",
        lambda m: m.moe.num_experts // (m.moe.gate_options.get("expert_groups") or 1) >= 2,
        "groups of at least 2 experts",
    ),
)


def read_sigmoid(config: Config, groups: int, kept: int) -> Values:
    """Return the keys of the model for the sigmoid gate and multi-token prediction.

    Args:
        groups, kept: defaults of ``n_group`` and ``topk_group``.

    Raises:
        UserError: a value is invalid or not supported.
    """
    normalize = read_bool(config, "norm_topk_prob", True)
    if normalize and config.get("num_experts_per_tok") == 1:
        raise UserError("norm_topk_prob=true is not supported with num_experts_per_tok=1: use norm_topk_prob=false")
    values = DROPLESS | {
        "moe.gate": "sigmoid",
        "moe.normalize": normalize,
        "moe.gate_options": read_groups(config, groups, kept),
    }
    return values | {"mtp_layers": read_int(config, "num_nextn_predict_layers", 0, least=0)}


def write_sigmoid(model: ModelConfig) -> Values:
    """Return the keys of config.json for the sigmoid gate and multi-token prediction."""
    return write_groups(model) | {"norm_topk_prob": sums_weights(model), "num_nextn_predict_layers": model.mtp_layers}


def adapt_mtp(config: Config, folder: HuggingFaceFolder) -> Values:
    """Return config.json. Set ``num_nextn_predict_layers`` to 0 if the folder has no multi-token prediction layers.

    transformers does not save these layers, but keeps their number in config.json.
    """
    first = f"model.layers.{config.get('num_hidden_layers')}."
    has_mtp = any(name.startswith(first) for name in folder.tensors)
    return dict(config) if has_mtp else {**config, "num_nextn_predict_layers": 0}


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    tables=((*_V3, *EXPERTS), (*_V3, *STACKED)),
    keys=(
        *LATENT_KEYS,
        KeyPair("n_shared_experts", "moe.num_shared_experts", int, 1),
        KeyPair("routed_scaling_factor", "moe.routed_scale", float, 2.5),
    ),
    fixed=FIXED | {"norm_eps": LATENT_EPS},
    demands=(*LATENT, *SIGMOID),
    varies=("attention.q_lora_rank", "moe.normalize", "mtp_layers", "moe.jitter", *YARN),
    constants={
        "rms_norm_eps": LATENT_EPS,
        "attention_bias": False,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    only=(
        *LATENT_ONLY,
        Only("rope_interleave", (True, None)),
        Only("scoring_func", ("sigmoid", None)),
        Only("topk_method", ("noaux_tc", None)),
    ),
    read=lambda config: _read_latent(config) | read_dense(config, 3) | read_sigmoid(config, 8, 4),
    write=lambda model: _write_latent(model) | write_sigmoid(model),
    ignored=MTP_COPIES,
    adapt=adapt_mtp,
)
