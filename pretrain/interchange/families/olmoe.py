"""OLMoE (arXiv 2409.02060): queries and keys are normalized over all heads."""

from pretrain.interchange.families.llama import (
    ATTENTION,
    COMMON,
    DROPLESS,
    EVERY_LAYER,
    EXPERTS,
    FIXED,
    KEYS,
    ONLY,
    OUR_LAYER,
    SOFTMAX,
    STACKED,
    WIDTH,
    norm_and_rope,
    read_llama,
    weights_sum_to_one,
    write_llama,
)
from pretrain.interchange.family import PLAIN_HEADS, Family, KeyPair, Only, without
from pretrain.interchange.rope import YARN
from pretrain.interchange.tensors import Entry

_TABLE = (
    *COMMON,
    Entry("layer", f"{OUR_LAYER}.self_attention.q_layernorm.weight", {f"{ATTENTION}.q_norm.weight": "Qd"}),
    Entry("layer", f"{OUR_LAYER}.self_attention.k_layernorm.weight", {f"{ATTENTION}.k_norm.weight": "Gd"}),
)
OLMOE = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    tables=((*_TABLE, *EXPERTS), (*_TABLE, *STACKED)),
    keys=(
        *without(KEYS, "moe.balance_loss"),
        KeyPair("router_aux_loss_coef", "moe.balance_loss", float, 0.01),
        KeyPair("num_experts", "moe.num_experts", int, other="num_local_experts"),
        WIDTH,
        KeyPair("norm_topk_prob", "moe.normalize", bool, False, value=weights_sum_to_one),
        *norm_and_rope(1e-5, 1e4),
    ),
    fixed=FIXED | {"attention.qk_norm": True, "attention.qk_norm_over": "all"},
    demands=(*SOFTMAX, *EVERY_LAYER, PLAIN_HEADS),
    varies=YARN,
    constants={"attention_bias": False, "clip_qkv": None, "pad_token_id": None},
    only=(*ONLY, Only("clip_qkv", (None,))),
    read=lambda config: read_llama(config) | DROPLESS,
    write=write_llama,
)
