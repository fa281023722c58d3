"""Published models by their config.json: parameters, and every tensor of the index that comes with them."""

import json
from math import prod

import pytest

from pretrain.config import ModelConfig, Recipe, load_recipe
from pretrain.interchange.configs import config_of, model_of
from pretrain.interchange.families import FAMILIES, family_for
from pretrain.interchange.tensors import Halves, QueryKeyValue, places, shape_of, sizes_of

# As on the hub, in the form of transformers 4.
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED = {
    "Mixtral-8x7B": (MIXTRAL_8X7B, 46.7e9, 12.9e9, 995),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30.5e9, 3.3e9, 18867),
}


RECIPES = {"Mixtral-8x7B": "mixtral-8x7b", "Qwen3-30B-A3B": "qwen3-moe-30b-a3b"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_recipe_of_that_shape_is_exported_as_it(name):
    config, model = PUBLISHED[name][0], load_recipe(RECIPES[name]).model
    family = family_for(model)
    assert family.name == config["model_type"]
    written = config_of(family, model, "bfloat16")
    sizes = [key for key in config if key.startswith(("num_", "hidden_", "vocab_", "head_", "moe_", "norm_", "rms_"))]
    assert {key: written[key] for key in sizes} == {key: config[key] for key in sizes}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name):
    config, total, active, tensors = PUBLISHED[name]
    family, model = model_of(config)
    recipe = Recipe(model=model)
    assert recipe.num_params() == pytest.approx(total, rel=0.002)
    assert recipe.num_active_params() == pytest.approx(active, rel=0.02)
    found = list(places(family.table, model))
    names = [name for place in found for name in place.theirs]
    assert len(names) == len(set(names)) == tensors
    assert sum(prod(shape) for place in found for shape in place.theirs.values()) == recipe.num_params()
    assert {place.ours for place in found} and all(place.ours.startswith("model/") for place in found)
    written = config_of(family, model, "bfloat16")
    ignored = {"bos_token_id", "eos_token_id", "max_window_layers", "intermediate_size"}
    ignored -= {"intermediate_size"} if name.startswith("Mixtral") else set()
    for key, value in config.items():
        assert key in ignored or written[key] == value, key
    assert model_of(json.loads(json.dumps(written))) == (family, model)


def test_the_same_model_by_transformers_own_configuration():
    import transformers

    for name, (config, *_) in PUBLISHED.items():
        theirs = transformers.AutoConfig.for_model(**config).to_dict()
        assert model_of(theirs)[1] == model_of(config)[1], name


def test_what_transformers_has_where_a_key_is_missing():
    import transformers

    for kind, family in (("MixtralConfig", "mixtral"), ("Qwen3MoeConfig", "qwen3_moe")):
        full = getattr(transformers, kind)().to_dict()
        keys = [key for key in FAMILIES[family].keys if key.default is not None]
        bare = {key: value for key, value in full.items() if key not in {key.theirs for key in keys}}
        bare.pop("rope_parameters")
        assert model_of(bare)[1] == model_of(full)[1]


def test_tables_have_every_tensor_of_ours_once():
    model = ModelConfig(norm="rms", gated=True, activation="silu", num_layers=2, num_experts=3, moe_layers=(2,))
    for family in FAMILIES.values():
        for table in family.tables:
            ours = [(place.ours, place.expert) for place in places(table, model)]
            assert len(ours) == len(set(ours))


def test_sizes_and_transforms_by_hand():
    import torch

    model = ModelConfig(num_heads=6, num_query_groups=2, head_dim=5, hidden_size=7)
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
