"""Published models by their config.json: parameters, and every tensor of the index that comes with them."""

import json
from math import prod

import pytest
import torch
import transformers
from published import ENCODERS, GPTS, NOT_WRITTEN, WITH_MTP

from fmoe.errors import UserError
from pretrain.config import Recipe, load_recipe
from pretrain.interchange.configs import config_of, model_of
from pretrain.interchange.families import FAMILIES, family_for
from pretrain.interchange.families.deepseek_moe import Twice
from pretrain.interchange.families.t5 import Query

RECIPES = {
    "Mixtral-8x7B": "mixtral-8x7b",
    "Qwen3-30B-A3B": "qwen3-moe-30b-a3b",
    "DeepSeek-V2-Lite": "deepseek-v2-lite",
}

NO_DENSE = ("Mixtral", "OLMoE", "granite")  # families without dense layers


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


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_of_that_shape_is_exported_as_it(name):
    config, model = GPTS[name][0], load_recipe(RECIPES[name]).model
    family = family_for(model)
    assert family.name == config["model_type"]
    written = config_of(family, model, "bfloat16")
    kinds = ("num_", "hidden_", "vocab_", "head_", "moe_", "norm_", "rms_", "n_", "q", "kv_", "v_", "topk_", "routed_")
    sizes = [key for key in config if key.startswith(kinds)]
    assert {key: written[key] for key in sizes} == {key: config[key] for key in sizes}
