"""Published models by their config.json: parameters, and every tensor of the index that comes with them."""

import json
from math import prod

import pytest
import torch
import transformers
from published import ENCODERS, GPTS, NOT_WRITTEN, WITH_MTP

from fmoe.errors import UserError
from pretrain.config import AttentionConfig, ModelConfig, MoEConfig, Recipe, load_recipe
from pretrain.interchange.configs import config_of, model_of
from pretrain.interchange.families import FAMILIES, family_for
from pretrain.interchange.families.deepseek_moe import Twice
from pretrain.interchange.families.ernie import PairedQueryKeyValue
from pretrain.interchange.families.t5 import KeyValue, Query
from pretrain.interchange.tensors import Halves, QueryKeyValue, places, shape_of, sizes_of

NO_DENSE = ("Mixtral", "OLMoE", "granite")  # families without dense layers
RECIPES = {
    "Mixtral-8x7B": "mixtral-8x7b",
    "Qwen3-30B-A3B": "qwen3-moe-30b-a3b",
    "DeepSeek-V2-Lite": "deepseek-v2-lite",
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_of_that_shape_is_exported_as_it(name):
    config, model = GPTS[name][0], load_recipe(RECIPES[name]).model
    family = family_for(model)
    assert family.name == config["model_type"]
    written = config_of(family, model, "bfloat16")
    kinds = ("num_", "hidden_", "vocab_", "head_", "moe_", "norm_", "rms_", "n_", "q", "kv_", "v_", "topk_", "routed_")
    sizes = [key for key in config if key.startswith(kinds)]
    assert {key: written[key] for key in sizes} == {key: config[key] for key in sizes}


@pytest.mark.parametrize("name", GPTS)
def test_published_models(name):
    config, total, active, tensors = GPTS[name]
    family, model = model_of(config)
    recipe = Recipe(model=model)
    assert recipe.num_params() == pytest.approx(total, rel=0.002)
    assert recipe.num_active_params() == pytest.approx(active, rel=0.02)
    found = list(family.tensors(model))
    names = [name for place in found for name in place.theirs]
    assert len(names) == len(set(names)) == tensors
    weights = [place for place in found if place.dtype is None]
    assert sum(prod(shape) for place in weights for shape in place.theirs.values()) == recipe.num_params()
    assert {place.ours for place in found} and all(place.ours.startswith("model/") for place in found)
    written = config_of(family, model, "bfloat16")
    ignored = NOT_WRITTEN - ({"intermediate_size", "sliding_window"} if name.startswith(NO_DENSE) else set())
    for key, value in config.items():
        if key == "rope_scaling" and value:  # "type" is an old name of "rope_type"
            value = {"rope_type": "yarn", "rope_theta": config["rope_theta"], **value}
            value.pop("type", None)
        assert key in ignored or written[key] == value, key
    assert model_of(json.loads(json.dumps(written))) == (family, model)


@pytest.mark.parametrize("name", ENCODERS)
def test_published_encoders(name):
    config, num_params, num_tensors = ENCODERS[name]
    family, model = model_of(config)
    assert family.name == config["model_type"]
    names = [name for place in family.tensors(model) for name in place.theirs]
    assert len(names) == len(set(names)) == num_tensors
    assert Recipe(model=model).num_params() == num_params
    assert model_of(json.loads(json.dumps(config_of(family, model, "bfloat16"))))[1] == model
    theirs = transformers.AutoConfig.for_model(**config)
    if name != "t5-v1_1-base":  # transformers 5 ties every T5, and imports look at its weights
        assert model_of(theirs.to_dict())[1] == model
    with torch.device("meta"):
        built = getattr(transformers, family.architecture)(theirs)
    assert set(built.state_dict()) - (family.copies.keys() - set(names)) == set(names)
    # An export of few tokens is not an import of another capacity.
    assert model.sequence_length == (64 if family.name == "switch_transformers" else 512)


@pytest.mark.parametrize("name", WITH_MTP)
def test_published_models_with_a_layer_of_further_tokens(name):
    family, model = model_of(GPTS[name][0] | {"num_nextn_predict_layers": 1})
    copies = 2 * model.vocab_size * model.hidden_size
    assert Recipe(model=model).num_params() + copies == pytest.approx(WITH_MTP[name], rel=0.0005)
    last = f"model.layers.{model.num_layers}"
    names = {name for place in family.tensors(model) for name in place.theirs if name.startswith(f"{last}.")}
    assert {f"{last}.{part}" for part in ("enorm.weight", "eh_proj.weight", "shared_head.norm.weight")} <= names
    assert f"{last}.mlp.gate.e_score_correction_bias" in names


def test_the_tensors_of_latent_attention_and_experts():
    """Names and shapes as in the index of DeepSeek-V3 on the hub."""
    family, model = model_of(GPTS["DeepSeek-V3"][0] | {"num_hidden_layers": 4})
    shapes = {name: shape for place in family.tensors(model) for name, shape in place.theirs.items()}
    expected = {
        "model.layers.0.mlp.gate_proj.weight": (18432, 7168),
        "model.layers.3.input_layernorm.weight": (7168,),
        "model.layers.3.self_attn.q_a_proj.weight": (1536, 7168),
        "model.layers.3.self_attn.q_a_layernorm.weight": (1536,),
        "model.layers.3.self_attn.q_b_proj.weight": (24576, 1536),
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        "model.layers.3.self_attn.kv_a_layernorm.weight": (512,),
        "model.layers.3.self_attn.kv_b_proj.weight": (32768, 512),
        "model.layers.3.self_attn.o_proj.weight": (7168, 16384),
        "model.layers.3.post_attention_layernorm.weight": (7168,),
        "model.layers.3.mlp.gate.weight": (256, 7168),
        "model.layers.3.mlp.gate.e_score_correction_bias": (256,),
        "model.layers.3.mlp.experts.255.up_proj.weight": (2048, 7168),
        "model.layers.3.mlp.shared_experts.down_proj.weight": (7168, 2048),
    }
    assert {name: shapes.get(name) for name in expected} == expected


def test_the_same_model_by_transformers_own_configuration():
    for name, (config, *_) in GPTS.items():
        theirs = transformers.AutoConfig.for_model(**config).to_dict()
        assert model_of(theirs)[1] == model_of(config)[1], name


KINDS = {
    "MixtralConfig": "mixtral",
    "Qwen3MoeConfig": "qwen3_moe",
    "Qwen2MoeConfig": "qwen2_moe",
    "OlmoeConfig": "olmoe",
    "GraniteMoeConfig": "granitemoe",
    "PhimoeConfig": "phimoe",
    "DeepseekV2Config": "deepseek_v2",
    "DeepseekV3Config": "deepseek_v3",
    "Glm4MoeConfig": "glm4_moe",
    "Ernie4_5_MoeConfig": "ernie4_5_moe",
}


def test_what_transformers_has_where_a_key_is_missing():
    # Keys that a family's `read` has.
    read = {"first_k_dense_replace", "n_group", "topk_group", "topk_method", "norm_topk_prob"}
    read |= {"moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", "moe_num_shared_experts"}
    for kind, family in KINDS.items():
        full = getattr(transformers, kind)(num_experts_per_tok=2).to_dict()
        left_out = {key.theirs for key in FAMILIES[family].keys if key.default is not None} | read
        bare = {key: value for key, value in full.items() if key not in left_out}
        bare.pop("rope_parameters")
        assert model_of(bare)[1] == model_of(full)[1]


def test_tables_have_every_tensor_of_ours_once():
    model = ModelConfig(
        norm="rms", gated=True, activation="silu", num_layers=2, moe=MoEConfig(num_experts=3, layers=(2,))
    )
    for family in FAMILIES.values():
        for table in family.tables:
            ours = [(place.ours, place.expert) for place in places(table, model) if place.ours]
            assert len(ours) == len(set(ours))


def test_sizes_and_transforms_by_hand():
    model = ModelConfig(hidden_size=7, attention=AttentionConfig(num_heads=6, num_query_groups=2, head_dim=5))
    sizes = sizes_of(model)
    assert shape_of("Qd D", sizes) == (30, 7) and shape_of("E 2H D", sizes) == (8, 1536, 7)
    # A row says (head, element): queries 0-2 and key, value 0 come before queries 3-5 and key, value 1.
    rows = [("q", 0), ("q", 1), ("q", 2), ("k", 0), ("v", 0), ("q", 3), ("q", 4), ("q", 5), ("k", 1), ("v", 1)]
    ours = torch.arange(10).repeat_interleave(5).unsqueeze(1).expand(-1, 7)
    query, key, value = QueryKeyValue().split(ours, sizes)
    for part, letter in ((query, "q"), (key, "k"), (value, "v")):
        assert part[::5, 0].tolist() == [rows.index((letter, n)) for n in range(len(part) // 5)]
    assert torch.equal(QueryKeyValue().join((query, key, value), sizes), ours)
    assert [part[0, 0].item() for part in Halves().split(ours, sizes)] == [0, 5]


@pytest.mark.parametrize("width", [(), (3,)], ids=["bias", "matrix"])
def test_neighbouring_elements_become_those_of_two_halves(width):
    """Of ERNIE, whose rotary positions pair elements 2 i and 2 i + 1."""
    sizes = {"Q": 4, "G": 2, "d": 6}
    ours = torch.randn(2 * (2 + 2) * 6, *width)
    straight = QueryKeyValue().split(ours, sizes)
    paired = PairedQueryKeyValue().split(ours, sizes)
    for ours_part, theirs in zip(straight[:2], paired[:2], strict=True):
        for head, pairs in zip(ours_part.split(6), theirs.split(6), strict=True):
            assert torch.equal(pairs[0::2], head[:3]) and torch.equal(pairs[1::2], head[3:])
    assert torch.equal(paired[2], straight[2])
    assert torch.equal(PairedQueryKeyValue().join(paired, sizes), ours)


def test_rows_of_t5s_cross_attention():
    """Rows of a fused matrix say (head, key or value), in this order."""
    sizes = {"Q": 2, "d": 3}
    ours = torch.arange(12).unsqueeze(1)
    key, value = KeyValue().split(ours, sizes)
    assert key.flatten().tolist() == [0, 1, 2, 6, 7, 8] and value.flatten().tolist() == [3, 4, 5, 9, 10, 11]
    assert torch.equal(KeyValue().join((key, value), sizes), ours)


def test_values_that_have_no_exact_product():
    """In float16, a quarter of a small query is rounded, and large values overflow."""
    sizes = {"d": 16}
    small, large = torch.full((1,), 2.0**-14 + 2.0**-24).half(), torch.full((1,), 60000.0).half()
    with pytest.raises(UserError, match=r"without rounding in float16: use float32"):
        Query().split(small, sizes)
    with pytest.raises(UserError, match=r"without rounding in float16: use float32"):
        Query().join((large,), sizes)
    assert torch.equal(Query().join(Query().split(large, sizes), sizes), large)
    with pytest.raises(UserError, match=r"half of torch\.float16"):
        Twice().split(large, sizes)
