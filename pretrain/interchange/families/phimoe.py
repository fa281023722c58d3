"""Phi-3.5-MoE (``phimoe``): LayerNorm, biases of attention and logits, and SparseMixer, which chooses two experts."""

import sys
from dataclasses import replace

from fmoe.errors import UserError
from pretrain.config import ModelConfig
from pretrain.interchange.families.llama import (
    ALL_WINDOWS,
    COMMON,
    DROPLESS,
    EQUAL_BIASES,
    EVERY_LAYER,
    FIXED,
    KEYS,
    LAYER,
    ONLY,
    OUR_LAYER,
    OUTPUT_BIAS,
    QKV_BIAS,
    SOFTMAX_SCORES,
    SPARSE,
    STACKED,
    W1_W3_W2,
    WIDTH,
    norm_and_rope,
    read_llama,
    write_llama,
)
from pretrain.interchange.family import Config, Demand, Family, KeyPair, Values, read_int, toml, without
from pretrain.interchange.tensors import Entry

_MARGIN = 0.02  # default of the gate, and twice transformers' default

_TABLE = (
    *COMMON,
    Entry("layer", f"{OUR_LAYER}.self_attention.linear_qkv.layer_norm_bias", {f"{LAYER}.input_layernorm.bias": "D"}),
    Entry("layer", f"{OUR_LAYER}.mlp.linear_fc1.layer_norm_bias", {f"{LAYER}.post_attention_layernorm.bias": "D"}),
    QKV_BIAS,
    OUTPUT_BIAS,
    Entry("model", "model/decoder.final_layernorm.bias", {"model.norm.bias": "D"}),
    Entry("model", "model/output_layer.bias", {"lm_head.bias": "V"}, when=lambda model: model.output_bias),
)
# In its in-memory layout of this family, transformers 5 has another name for the router.
_ROUTER = {f"{LAYER}.mlp.router.weight": "E D"}
_STACKED = tuple(replace(e, theirs=_ROUTER) if e.ours.endswith(".gate.weight") else e for e in STACKED)


def _write(model: ModelConfig) -> Values:
    noise = model.moe.gate_options.get("margin", _MARGIN) / 2
    return write_llama(model) | {"router_jitter_noise": noise, "sliding_window": model.attention.sliding_window}


def _read(config: Config) -> Values:
    if config["num_experts_per_tok"] != 2:
        raise UserError(f"num_experts_per_tok={config['num_experts_per_tok']} is not supported: SparseMixer chooses 2")
    window = read_int(config, "sliding_window") if "sliding_window" in config else None
    if window is not None and window >= config["max_position_embeddings"]:  # as in Phi-3.5-MoE, without effect
        window = None
    noise = config.get("router_jitter_noise", _MARGIN / 2)
    if type(noise) not in (int, float) or not 0 <= noise <= sys.float_info.max / 2:
        raise UserError(f"router_jitter_noise={toml(noise)} must be a finite number of at least 0")
    values = {"moe.gate": "sparsemixer", "attention.output_bias": config.get("attention_bias", False)}
    values |= {} if 2 * noise == _MARGIN else {"moe.gate_options": {"margin": 2.0 * noise}}
    return read_llama(config) | DROPLESS | values | {"attention.sliding_window": window}


PHIMOE = Family(
    name="phimoe",
    architecture="PhimoeForCausalLM",
    tables=((*_TABLE, *W1_W3_W2), (*_TABLE, *_STACKED)),
    keys=(
        *KEYS,
        KeyPair("num_local_experts", "moe.num_experts", int, 16, alias="num_experts"),
        WIDTH,
        *norm_and_rope(1e-5, 1e6),  # of a LayerNorm
        KeyPair("attention_bias", "attention.qkv_bias", bool, False),
        KeyPair("lm_head_bias", "output_bias", bool, False),
    ),
    fixed=FIXED | {"norm": "layer"},
    demands=(
        SOFTMAX_SCORES,
        *SPARSE,
        *EVERY_LAYER,
        Demand("moe.gate", lambda m: m.moe.gate == "sparsemixer", "sparsemixer"),
        Demand("moe.gate_options", lambda m: not m.moe.gate_options.keys() - {"margin"}, "no options except margin"),
        Demand("moe.top_k", lambda m: m.moe.top_k == 2, "2"),
        ALL_WINDOWS,
        EQUAL_BIASES,
    ),
    varies=("attention.head_dim", "attention.sliding_window", "moe.jitter"),
    constants={"input_jitter_noise": 0.0},
    only=without(ONLY, "attention_bias"),
    read=_read,
    write=_write,
)
