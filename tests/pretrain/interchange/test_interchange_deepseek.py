"""Which recipes and which config.json are a DeepSeek-V2 or DeepSeek-V3, and what is refused in one line."""

from dataclasses import replace

import pytest
import torch
from test_interchange_mtp import MODEL
from tiny_models import ERNIE as ERNIE_CASE
from tiny_models import LATENT, ROUTED

from fmoe.errors import UserError
from pretrain.config import Recipe
from pretrain.interchange.configs import config_of, model_of
from pretrain.interchange.families import family_for, why_own
from pretrain.interchange.families.ernie import PairedQueryKeyValue
from pretrain.interchange.tensors import QueryKeyValue, sizes_of

V2 = MODEL.with_values(
    {
        "moe.gate": "naive",
        "moe.normalize": False,
        "moe.gate_options": {},
        "moe.routed_scale": 1.0,
        "mtp_layers": 0,
        "num_layers": 3,
        "moe.layers": (2, 3),
    }
)
STANDARD = {
    "attention.kv_lora_rank": None,
    "attention.q_lora_rank": None,
    "attention.qk_head_dim": None,
    "attention.qk_rope_head_dim": None,
    "attention.v_head_dim": None,
}
GLM = MODEL.with_values(
    {
        **STANDARD,
        "norm_eps": 1e-5,
        "attention.qkv_bias": True,
        "attention.qk_norm": True,
        "position.rotary_fraction": 0.5,
        "attention.num_query_groups": 2,
    }
)
ERNIE = MODEL.with_values(
    {
        **STANDARD,
        "moe.gate_options": {},
        "moe.score": "softmax",
        "moe.routed_scale": 1.0,
        "mtp_layers": 0,
        "num_layers": 4,
    }
)
FITS = {
    "v2": (V2, "deepseek_v2"),
    "v2, switch": (V2.with_values({"moe.gate": "switch", "moe.normalize": None, "moe.jitter": 0.0}), "deepseek_v2"),
    "v2, experts in every layer": (V2.with_values({"moe.layers": (), "dense_ffn_hidden_size": None}), "deepseek_v2"),
    "v2, groups": (V2.with_values({"moe.gate_options": {"expert_groups": 2}}), "deepseek_v2"),
    "v3": (MODEL, "deepseek_v3"),
    "v3, one expert per token": (MODEL.with_values({"moe.top_k": 1, "moe.routed_scale": 1.0}), "deepseek_v3"),
    "ernie": (ERNIE, "ernie4_5_moe"),
    "ernie, every second layer": (ERNIE.with_values({"moe.layers": (), "moe.every": 2}), "ernie4_5_moe"),
    "ernie, no shared experts": (ERNIE.with_values({"moe.num_shared_experts": 0, "moe.layers": (2,)}), "ernie4_5_moe"),
    "glm": (GLM, "glm4_moe"),
    "glm, without options": (
        GLM.with_values({"attention.qkv_bias": False, "attention.qk_norm": False, "position.rotary_fraction": 1.0}),
        "glm4_moe",
    ),
    "v3, drops in training alone": (
        MODEL.with_values({"moe.capacity_factor": 1.0, "moe.eval_capacity_factor": 3.0}),
        "deepseek_v3",
    ),
}


@pytest.mark.parametrize("case", FITS)
def test_recipes_of_a_family(case):
    model, name = FITS[case]
    Recipe(model=model).check()
    family = family_for(model)
    assert family.name == name
    again, found = model_of(config_of(family, model, "float32") | {"num_nextn_predict_layers": model.mtp_layers})
    assert again is family
    assert found.layers_with_experts == model.layers_with_experts and found.num_layers == model.num_layers
    for key in (
        "attention.kv_lora_rank",
        "attention.q_lora_rank",
        "attention.v_head_dim",
        "moe.routed_scale",
        "mtp_layers",
        "moe.num_shared_experts",
        "attention.qkv_bias",
    ):
        assert found.value(key) == model.value(key), key
    assert found.moe.gate_options == (
        {} if not model.moe.gate_options else {"kept_groups": 1} | dict(model.moe.gate_options)
    )


REFUSED = {
    "another epsilon": (replace(MODEL, norm_eps=1e-5), "auto", "model.norm_eps=1e-05", "1e-06"),
    "standard attention": (MODEL.with_values(STANDARD), "deepseek_v3", "attention.kv_lora_rank=none", "latent"),
    "no shared experts": (
        MODEL.with_values({"moe.num_shared_experts": 0}),
        "auto",
        "moe.num_shared_experts=0",
        "at least 1",
    ),
    "experts first": (V2.with_values({"moe.layers": (1, 2)}), "auto", "moe.layers=[1, 2]", "all layers but the first"),
    "every second": (
        V2.with_values({"moe.layers": (), "moe.every": 2}),
        "auto",
        "moe.every=2",
        "all layers but the first",
    ),
    "weights that sum to one": (V2.with_values({"moe.normalize": None}), "auto", "moe.normalize=none", "false"),
    "further tokens": (replace(V2, mtp_layers=1), "auto", "model.mtp_layers=1", "0"),
    "heads": (V2.with_values({"attention.num_heads": 3}), "auto", "model.hidden_size=32", "attention.num_heads"),
    "softmax in the sigmoid gate": (
        MODEL.with_values({"moe.score": "softmax"}),
        "auto",
        "moe.score=softmax",
        "sigmoid",
    ),
    "groups of one": (
        MODEL.with_values({"moe.gate_options": {"expert_groups": 8, "kept_groups": 3}}),
        "auto",
        "gate_options",
        "2",
    ),
    "another option": (
        V2.with_values({"moe.gate_options": {"bias": True}}),
        "auto",
        "moe.gate_options={'bias': True}",
        "groups",
    ),
    "drops": (
        MODEL.with_values({"moe.eval_capacity_factor": 1.0}),
        "auto",
        "moe.eval_capacity_factor=1.0",
        "num_experts",
    ),
    "one expert per token": (ERNIE.with_values({"moe.top_k": 1}), "ernie4_5_moe", "moe.top_k=1", "at least 2"),
    "irregular layers": (
        ERNIE.with_values({"moe.layers": (1, 3)}),
        "ernie4_5_moe",
        "moe.layers=[1, 3]",
        "the multiples of a number",
    ),
    "groups of ernie": (
        ERNIE.with_values({"moe.gate_options": {"expert_groups": 2}}),
        "ernie4_5_moe",
        "expert_groups",
        "{}",
    ),
    "scale of ernie": (ERNIE.with_values({"moe.routed_scale": 2.0}), "ernie4_5_moe", "moe.routed_scale=2.0", "1.0"),
    "sigmoid scores": (ERNIE.with_values({"moe.score": None}), "ernie4_5_moe", "moe.score=none", "softmax"),
    "part of a head": (
        V2.with_values({**STANDARD, "moe.gate": "sigmoid", "position.rotary_fraction": 0.5, "norm": "layer"}),
        "glm4_moe",
        "norm=layer",
        "rms",
    ),
    "moe.granularity": (MODEL.with_values({"moe.granularity": 2}), "auto", "moe.granularity=2", "1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_recipes(case):
    model, form, key, allowed = REFUSED[case]
    if form == "auto":  # our own family holds it, unless its values exclude each other
        line = why_own(model)
    else:
        with pytest.raises(UserError) as error:
            family_for(model, form)
        line = str(error.value)
    assert key in line and allowed in line and "\n" not in line, line
    assert f"supported by {'deepseek_v' if form == 'auto' else form}" in line


CONFIG = LATENT | {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
CONFIG_V2 = LATENT | {"model_type": "deepseek_v2"}
CONFIG_GLM = ROUTED | {"model_type": "glm4_moe", "num_key_value_heads": 2, "head_dim": 8}
CONFIG_ERNIE = ERNIE_CASE | {"model_type": "ernie4_5_moe", "num_key_value_heads": 2}
CONFIGS = {
    "rotary halves": (CONFIG, {"rope_interleave": False}, "rope_interleave=false"),
    "biases": (CONFIG, {"attention_bias": True}, "attention_bias=true"),
    "two names": (CONFIG_ERNIE, {"moe_k": 2, "num_experts_per_tok": 3}, "moe_k=2 and num_experts_per_tok=3"),
    "two numbers of experts": (CONFIG, {"n_routed_experts": 8, "num_local_experts": 4}, "num_local_experts=4"),
    "two bases": (
        CONFIG_ERNIE,
        {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "differs from rope_parameters",
    ),
    "a huge number": (CONFIG_ERNIE, {"rms_norm_eps": 10**400}, "rms_norm_eps=1"),
    "another epsilon": (CONFIG, {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
    "longrope": (CONFIG, {"rope_scaling": {"type": "longrope", "factor": 40}}, "rope_scaling="),
    "8 bits": (CONFIG, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    "another choice": (CONFIG, {"topk_method": "greedy"}, "topk_method=greedy"),
    "softmax": (CONFIG, {"scoring_func": "softmax"}, "scoring_func=softmax"),
    "no experts": (CONFIG, {"first_k_dense_replace": 3}, "first_k_dense_replace=3"),
    "no width": (CONFIG, {"intermediate_size": 0}, "intermediate_size=0"),
    "weight of one": (CONFIG, {"num_experts_per_tok": 1}, "norm_topk_prob=true"),
    "truth": (CONFIG, {"norm_topk_prob": 1}, "norm_topk_prob=1"),
    "groups": (CONFIG, {"n_group": 0}, "n_group=0"),
    "uneven groups": (CONFIG, {"n_group": 3}, "expert_groups=3"),
    "further tokens": (CONFIG, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers=-1"),
    "rank of queries": (CONFIG, {"q_lora_rank": 0}, "q_lora_rank=0"),
    "heads of keys": (CONFIG, {"num_key_value_heads": 2}, "attention.num_query_groups=2"),
    "layers between": (CONFIG, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
    "no shared experts": (CONFIG_V2, {"n_shared_experts": 0}, "n_shared_experts=0"),
    "weights that sum to one": (CONFIG_V2, {"norm_topk_prob": True}, "norm_topk_prob=true"),
    "V3's choice": (CONFIG_V2, {"topk_method": "noaux_tc"}, "topk_method=noaux_tc"),
    "scaled positions": (CONFIG_GLM, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters="),
    "odd share": (CONFIG_GLM, {"partial_rotary_factor": 0.4}, "position.rotary_fraction=0.4"),
    "a share in words": (
        CONFIG_GLM,
        {"rope_parameters": {"partial_rotary_factor": "half"}},
        "partial_rotary_factor=half",
    ),
    "groups of GLM": (CONFIG_GLM, {"n_group": 3}, "n_group=3"),
    "another activation": (CONFIG_GLM, {"hidden_act": "gelu"}, "hidden_act=gelu"),
    "one expert": (CONFIG_ERNIE, {"moe_k": 1}, "moe_k=1"),
    "biases of ernie": (CONFIG_ERNIE, {"use_bias": True}, "use_bias=true"),
    "layers that are not there": (CONFIG_ERNIE, {"moe_layer_end_index": 3}, "moe_layer_end_index=3"),
    "no layers": (CONFIG_ERNIE, {"moe_layer_start_index": 2, "moe_layer_end_index": 1}, "moe_layer_start_index=2"),
    "least sum": (CONFIG_ERNIE, {"moe_norm_min": 0.1}, "moe_norm_min=0.1"),
    "biases of blocks": (CONFIG_V2, {"mlp_bias": True}, "mlp_bias=true"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_other_configurations(case):
    config, values, key = CONFIGS[case]
    Recipe(model=model_of(config)[1]).check()
    with pytest.raises(UserError) as error:
        Recipe(model=model_of(config | values)[1]).check()
    assert key in str(error.value) and "\n" not in str(error.value), str(error.value)


@pytest.mark.parametrize("width", [(), (3,)], ids=["bias", "matrix"])
def test_neighbouring_elements_become_those_of_two_halves(width):
    sizes = sizes_of(
        GLM.with_values({"attention.num_heads": 4, "attention.num_query_groups": 2, "attention.head_dim": 6})
    )
    ours = torch.randn(2 * (2 + 2) * 6, *width)
    straight, paired = QueryKeyValue().split(ours, sizes), PairedQueryKeyValue().split(ours, sizes)
    for ours_part, theirs in zip(straight[:2], paired[:2], strict=True):
        for head, found in zip(ours_part.split(6), theirs.split(6), strict=True):
            for i in range(3):
                assert torch.equal(found[2 * i], head[i]) and torch.equal(found[2 * i + 1], head[i + 3])
    assert torch.equal(paired[2], straight[2])
    assert torch.equal(PairedQueryKeyValue().join(paired, sizes), ours)


def test_a_rotary_factor_of_null_is_one():
    """As in transformers, whose default of one half is for a missing key."""
    config = CONFIG_GLM | {"num_hidden_layers": 2, "first_k_dense_replace": 1, "intermediate_size": 40}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert model_of(config | rope)[1].position.rotary_fraction == 0.5
    assert model_of(config | rope | {"partial_rotary_factor": None})[1].position.rotary_fraction == 1.0
