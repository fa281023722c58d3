"""Granite-MoE: experts in two tensors per layer, and constant factors on activations (arXiv 2408.13359)."""

from pretrain.interchange.families.llama import (
    COMMON,
    DROPLESS,
    EVERY_LAYER,
    FIXED,
    KEYS,
    LAYER,
    ONLY,
    OUR_LAYER,
    SOFTMAX,
    SUM_TO_ONE,
    WIDTH,
    norm_and_rope,
    read_llama,
    write_llama,
)
from pretrain.interchange.family import Config, Family, KeyPair, Values
from pretrain.interchange.rope import YARN
from pretrain.interchange.tensors import Entry


def _experts(router: str, gate_and_value: str, output: str) -> tuple[Entry, ...]:
    block = f"{LAYER}.block_sparse_moe"
    return (
        Entry("moe", f"{OUR_LAYER}.mlp.gate.weight", {f"{block}.{router}": "E D"}),
        Entry("moe", f"{OUR_LAYER}.mlp.experts.weight_in", {f"{block}.{gate_and_value}": "E 2H D"}),
        Entry("moe", f"{OUR_LAYER}.mlp.experts.weight_out", {f"{block}.{output}": "E D H"}),
    )


_PUBLISHED = _experts("router.layer.weight", "input_linear.weight", "output_linear.weight")
# transformers 5's in-memory names, which it writes on request.
_IN_MEMORY = _experts("router.weight", "experts.gate_up_proj", "experts.down_proj")


def _read(config: Config) -> Values:
    values = read_llama(config) | DROPLESS | {"moe.normalize": True}
    width = values["attention.head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    if config.get("attention_multiplier") == width**-0.5:
        values["attention.scale"] = None
    return values


GRANITE_MOE = Family(
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    tables=((*COMMON, *_PUBLISHED), (*COMMON, *_IN_MEMORY)),
    keys=(
        *KEYS,
        KeyPair("num_local_experts", "moe.num_experts", int),
        WIDTH,
        *norm_and_rope(1e-6, 1e4),
        KeyPair("embedding_multiplier", "embedding_scale", float, 1.0),
        KeyPair("residual_multiplier", "residual_scale", float, 1.0),
        KeyPair("logits_scaling", "logit_divisor", float, 1.0),
        KeyPair(
            "attention_multiplier",
            "attention.scale",
            float,
            1.0,
            value=lambda m: m.head_width**-0.5 if m.attention.scale is None else m.attention.scale,
        ),
    ),
    fixed=FIXED,
    demands=(*SOFTMAX, *EVERY_LAYER, *SUM_TO_ONE),
    varies=("attention.head_dim", *YARN),
    constants={"attention_bias": False},
    only=ONLY,
    read=_read,
    write=write_llama,
)
