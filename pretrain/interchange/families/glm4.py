"""GLM-4.5 (``glm4_moe``, arXiv 2508.06471): the router of DeepSeek-V3 with standard attention."""

from collections.abc import Mapping
from typing import Any

from pretrain.config import ModelConfig
from pretrain.interchange.families.deepseek import (
    CHOICE_BIAS,
    DENSE_FIRST,
    EXPERTS,
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
    FIXED,
    KEYS,
    ONLY,
    QK_NORM,
    QKV_BIAS,
    STACKED,
    read_llama,
    write_llama,
)
from pretrain.interchange.family import Demand, Family, Key, Only
from pretrain.interchange.rope import YARN
from pretrain.interchange.tensors import Entry

HEAD_NORMS = tuple(Entry(e.where, e.ours, e.theirs, when=lambda model: model.qk_norm) for e in QK_NORM)
_REST = (*COMMON, QKV_BIAS, *HEAD_NORMS, *DENSE, *SHARED_EXPERTS, *CHOICE_BIAS, *MTP)
GLM4_MOE_TABLE = (*_REST, *EXPERTS)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    return read_llama(config) | read_dense(config, 1) | read_sigmoid(config, 1, 1)


def _write(model: ModelConfig) -> dict[str, Any]:
    written = write_llama(model) | write_dense(model) | write_sigmoid(model)
    for key in ("rope_parameters", "rope_scaling"):
        if written[key]:
            written[key] |= {"partial_rotary_factor": model.rotary_fraction}
    return written


GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    tables=(GLM4_MOE_TABLE, (*_REST, *STACKED)),
    keys=(
        *(key for key in KEYS if key.theirs != "router_aux_loss_coef"),
        Key("n_routed_experts", "num_experts", int, other="num_experts", alias="num_local_experts"),
        Key("n_shared_experts", "num_shared_experts", int, 1),
        Key("moe_intermediate_size", "ffn_hidden_size", int),
        Key("routed_scaling_factor", "routed_scale", float, 1.0),
        Key("attention_bias", "qkv_bias", bool, False),
        Key("use_qk_norm", "qk_norm", bool, False),
        Key("partial_rotary_factor", "rotary_fraction", float, 0.5),
        Key("rms_norm_eps", "norm_eps", float, 1e-5),
        Key("rope_theta", "rope_theta", float, 1e4),
    ),
    fixed=FIXED,
    demands=(*SIGMOID, Demand("num_shared_experts", lambda m: m.num_shared_experts > 0, "at least 1"), *DENSE_FIRST),
    varies=("head_dim", "normalize", "mtp_layers", "jitter", *YARN),
    only=(
        *(only for only in ONLY if only.theirs not in ("attention_bias", "partial_rotary_factor")),
        Only("moe_layer_freq", (1, None)),
    ),
    read=_read,
    write=_write,
    ignored=MTP_COPIES,
    adapt=adapt_mtp,
)
