"""OLMoE (arXiv 2409.02060): queries and keys are normalized over all heads."""

from collections.abc import Mapping
from typing import Any

from pretrain.config import ModelConfig
from pretrain.interchange.families.llama import (
    ATTENTION,
    COMMON,
    DROPLESS,
    EVERY_LAYER,
    FIXED,
    KEYS,
    ONLY,
    OUR_LAYER,
    SOFTMAX,
    STACKED,
    expert_entries,
    read_llama,
    weights_sum_to_one,
    write_llama,
)
from pretrain.interchange.family import Demand, Family, Key, Only
from pretrain.interchange.rope import YARN
from pretrain.interchange.tensors import Entry

NORMS = (
    Entry("layer", f"{OUR_LAYER}.self_attention.q_layernorm.weight", {f"{ATTENTION}.q_norm.weight": "Qd"}),
    Entry("layer", f"{OUR_LAYER}.self_attention.k_layernorm.weight", {f"{ATTENTION}.k_norm.weight": "Gd"}),
)
OLMOE_TABLE = (*COMMON, *NORMS, *expert_entries("mlp", "gate_proj", "up_proj", "down_proj"))


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    return read_llama(config) | DROPLESS


def _write(model: ModelConfig) -> dict[str, Any]:
    return write_llama(model) | {"norm_topk_prob": weights_sum_to_one(model)}


OLMOE = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    tables=(OLMOE_TABLE, (*COMMON, *NORMS, *STACKED)),
    keys=(
        *(key for key in KEYS if key.ours != "balance_loss"),
        Key("router_aux_loss_coef", "balance_loss", float, 0.01),
        Key("num_experts", "num_experts", int, other="num_local_experts"),
        Key("intermediate_size", "ffn_hidden_size", int),
        Key("norm_topk_prob", "normalize", bool, False, value=weights_sum_to_one),
        Key("rms_norm_eps", "norm_eps", float, 1e-5),
        Key("rope_theta", "rope_theta", float, 1e4),
    ),
    fixed=FIXED | {"qk_norm": True, "qk_norm_over": "all"},
    demands=(
        *SOFTMAX,
        *EVERY_LAYER,
        Demand(
            "head_dim",
            lambda m: m.head_width * m.num_heads == m.hidden_size,
            "model.head_dim=none, which stands for hidden_size / num_heads",
        ),
    ),
    varies=YARN,
    constants={"attention_bias": False, "clip_qkv": None, "pad_token_id": None},
    only=(*ONLY, Only("clip_qkv", (None,))),
    read=_read,
    write=_write,
)
