"""GLM-4.5 (``glm4_moe``, arXiv 2508.06471): the router of DeepSeek-V3 with standard attention."""

from dataclasses import replace

from pretrain.config import ModelConfig
from pretrain.interchange.families.deepseek import (
    CHOICE_BIAS,
    DENSE_FIRST,
    MTP,
    MTP_COPIES,
    SHARED_EXPERTS,
    SIGMOID,
    adapt_mtp,
    read_dense,
    read_sigmoid,
    write_dense,
    write_sigmoid,
)
from pretrain.interchange.families.llama import (
    COMMON,
    DENSE,
    EXPERT_WIDTH,
    EXPERTS,
    FIXED,
    KEYS,
    ONLY,
    QK_NORM,
    QKV_BIAS,
    SHARED,
    STACKED,
    norm_and_rope,
    read_llama,
    write_llama,
)
from pretrain.interchange.family import Family, KeyPair, Only, Values, without
from pretrain.interchange.rope import YARN

_HEAD_NORMS = tuple(replace(entry, when=lambda model: model.attention.qk_norm) for entry in QK_NORM)
_TABLE = (*COMMON, QKV_BIAS, *_HEAD_NORMS, *DENSE, *SHARED_EXPERTS, *CHOICE_BIAS, *MTP)


def _write(model: ModelConfig) -> Values:
    written = write_llama(model) | write_dense(model) | write_sigmoid(model)
    for key in ("rope_parameters", "rope_scaling"):
        if written[key]:
            written[key]["partial_rotary_factor"] = model.position.rotary_fraction
    return written


GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    tables=((*_TABLE, *EXPERTS), (*_TABLE, *STACKED)),
    keys=(
        *without(KEYS, "router_aux_loss_coef"),
        KeyPair("n_routed_experts", "moe.num_experts", int, other="num_experts", alias="num_local_experts"),
        KeyPair("n_shared_experts", "moe.num_shared_experts", int, 1),
        EXPERT_WIDTH,
        KeyPair("routed_scaling_factor", "moe.routed_scale", float, 1.0),
        KeyPair("attention_bias", "attention.qkv_bias", bool, False),
        KeyPair("use_qk_norm", "attention.qk_norm", bool, False),
        KeyPair("partial_rotary_factor", "position.rotary_fraction", float, 0.5),
        *norm_and_rope(1e-5, 1e4),
    ),
    fixed=FIXED,
    demands=(*SIGMOID, SHARED, *DENSE_FIRST),
    varies=("attention.head_dim", "moe.normalize", "mtp_layers", "moe.jitter", *YARN),
    only=(*without(ONLY, "attention_bias", "partial_rotary_factor"), Only("moe_layer_freq", (1, None))),
    read=lambda config: read_llama(config) | read_dense(config, 1) | read_sigmoid(config, 1, 1),
    write=_write,
    ignored=MTP_COPIES,
    adapt=adapt_mtp,
)
