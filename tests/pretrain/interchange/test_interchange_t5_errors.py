"""What T5 and the Switch Transformer do not have is one line that names the key, and nothing is written."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from huggingface_folders import save_random
from safetensors.torch import load_file, save_file

from fmoe.errors import UserError
from pretrain.config import ModelConfig, Recipe, load_recipe
from pretrain.interchange import FAMILIES, import_folder
from pretrain.interchange.configs import config_of, model_of
from pretrain.interchange.families import family_for
from pretrain.interchange.families.t5 import KeyValue, Query
from pretrain.interchange.folder import CONFIG, WEIGHTS

T5 = {"kind": "t5", "norm": "rms", "position.encoding": "relative", "attention.head_dim": 16, "tied_output_bias": False}
GOOD = {
    "switch_transformers": T5 | {"output_scale": True, "moe.eval_capacity_factor": None, "activation": "relu"},
    "t5": T5 | {"moe.num_experts": 0},
}
REFUSED = {
    "layer norm": (
        "switch_transformers",
        {"norm": "layer"},
        "model.norm=layer is not supported by switch_",
    ),
    "rotary positions": (
        "t5",
        {"position.encoding": "rope"},
        "position.encoding=rope is not supported by t5, the nearest family",
    ),
    "gated experts": ("switch_transformers", {"gated": True}, "model.gated=true .* use model.gated=false"),
    "a bias": ("switch_transformers", {"tied_output_bias": True}, "model.tied_output_bias=true .*_bias=false"),
    "a bias, dense": ("t5", {"tied_output_bias": True}, "model.tied_output_bias=true .* use false"),
    "no scale": ("switch_transformers", {"output_scale": False}, "model.output_scale=false .* use .*_scale=true"),
    "another output": (
        "switch_transformers",
        {"tie_embeddings": False, "tied_output_bias": True},
        "model.tie_embeddings=false .* use model.tie_embeddings=true",
    ),
    "two experts": ("switch_transformers", {"moe.top_k": 2}, "moe.top_k=2 .* use moe.top_k=1"),
    "weights that sum to one": ("switch_transformers", {"moe.gate": "naive"}, "moe.normalize=none .* use false"),
    "random gate": ("switch_transformers", {"moe.gate": "gshard"}, "moe.gate=gshard"),
    "drops": ("switch_transformers", {"moe.eval_capacity_factor": 2.0}, "moe.eval_capacity_factor=2.0 .*, or .*=none"),
    "the second of three": ("switch_transformers", {"moe.layers": (3, 7)}, r"moe.layers=\[3, 7\] .* layer 2 and"),
    "every third": ("switch_transformers", {"moe.every": 3}, "moe.every=3 .* layer 2 and"),
    "wide dense blocks": (
        "switch_transformers",
        {"moe.every": 2, "dense_ffn_hidden_size": 9},
        "dense_ffn_hidden_size=9",
    ),
    "another activation": ("t5", {"activation": "swiglu_oai", "gated": True}, "model.activation=swiglu_oai .* gelu"),
    "wide heads": ("t5", {"attention.head_dim": 32}, "attention.head_dim=32 is not supported by t5, .* a power of 4"),
    "scores": ("t5", {"attention.head_dim": 32, "attention.scale": 0.5}, ".scale=0.5 .* use .*.scale=1.0 or none"),
    "shared experts": ("switch_transformers", {"moe.num_shared_experts": 1}, "moe.num_shared_experts=1"),
    "groups of queries": ("t5", {"attention.num_query_groups": 6}, "attention.num_query_groups=6"),
    "t5 with experts": (
        "t5",
        {"moe.num_experts": 4, "moe.gate": "gshard"},
        "model.* is not supported by switch_transformers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_family_holds(case):
    of, values, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as raised:
        family_for(ModelConfig().with_values(GOOD[of] | values))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("values", "form"),
    [
        ({}, "switch_transformers"),
        ({"moe.gate": "naive", "moe.normalize": False, "moe.jitter": 0.0}, "switch_transformers"),
        ({"moe.layers": (2, 4, 6, 8)}, "switch_transformers"),
        ({"moe.layers": (2,), "moe.eval_capacity_factor": 8.0}, "switch_transformers"),
        ({"num_layers": 3, "num_decoder_layers": 2, "moe.layers": (1, 2, 3, 5)}, "switch_transformers"),
        ({"moe.num_experts": 0, "output_scale": False, "gated": True, "moe.top_k": 2, "moe.gate": "naive"}, "t5"),
        ({"moe.num_experts": 0, "tie_embeddings": False, "tied_output_bias": True}, "t5"),
        ({"moe.num_experts": 0, "attention.head_dim": 32, "attention.scale": 1.0}, "t5"),
        ({"attention.scale": 1.0}, "switch_transformers"),
    ],
)
def test_what_a_family_holds(values, form):
    model = ModelConfig().with_values(GOOD["switch_transformers"] | values)
    assert family_for(model).name == form
    again = model_of(config_of(family_for(model), model, "float32"))[1]
    assert again.layers_with_experts == model.layers_with_experts and again.decoder_layers == model.decoder_layers


@pytest.mark.parametrize("name", ["switch-base", "switch-large", "switch-c"])
def test_recipes_are_exported_without_drops(name):
    recipe = load_recipe(name)
    with pytest.raises(UserError, match=r"moe.eval_capacity_factor=2\.0 .* --no-drops"):
        family_for(recipe.model)
    recipe = replace(recipe, model=recipe.model.with_values({"moe.eval_capacity_factor": None}))
    family = family_for(recipe.model)
    assert family.name == "switch_transformers"
    again = Recipe(model=model_of(config_of(family, recipe.model, "bfloat16"))[1])
    assert again.num_params() == recipe.num_params()


def test_keys_of_other_kinds():
    for values, message in (
        ({"output_scale": True}, "model.output_scale=true needs model.kind=t5"),
        ({"tied_output_bias": False}, "model.tied_output_bias=false needs model.kind=t5, not gpt"),
        ({"kind": "t5", "tied_output_bias": False, "tie_embeddings": False}, "needs model.tie_embeddings=true"),
    ):
        with pytest.raises(UserError, match=message):
            Recipe(model=ModelConfig().with_values(values)).check()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("models")
    for case in ("t5", "switch_transformers"):
        save_random(parent / case, case)
    return parent


CONFIGS = {
    "more distances": ("t5", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets=64 .* must be 32"),
    "farther": ("switch_transformers", {"relative_attention_max_distance": 64}, "relative_attention_max_distance=64"),
    "an encoder": ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder=false .* must be true"),
    "another block": ("t5", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj=gated-tanh is not supported"),
    "two blocks": ("t5", {"dense_act_fn": "silu"}, "dense_act_fn=silu contradicts feed_forward_proj=relu"),
    "a gate": (
        "t5",
        {"feed_forward_proj": "gated-relu", "is_gated_act": True, "dense_act_fn": "relu"},
        "has no tensor",
    ),
    "another activation": ("switch_transformers", {"dense_act_fn": "tanh"}, "dense_act_fn=tanh is not supported"),
    "biased router": (
        "switch_transformers",
        {"router_bias": True},
        "router_bias=true is not supported: it must be false",
    ),
    "16-bit router": ("switch_transformers", {"router_dtype": "bfloat16"}, "router_dtype=bfloat16"),
    "untied": ("switch_transformers", {"tie_word_embeddings": False}, "tie_word_embeddings=false"),
    "no experts": (
        "switch_transformers",
        {"encoder_sparse_step": 0, "decoder_sparse_step": 0},
        "encoder_sparse_step=0 and decoder_sparse_step=0",
    ),
    "no capacity": (
        "switch_transformers",
        {"expert_capacity": 0},
        "expert_capacity=0 must be an integer of at least 1",
    ),
    "fewer layers": ("t5", {"num_decoder_layers": 2}, "has the tensor decoder.block.2.*not part of this t5"),
    "more experts": (
        "switch_transformers",
        {"num_experts": 5},
        r"has shape \[4, 24\], but config.json implies \[5, 24\]",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_models_that_are_others(folders, tmp_path, case):
    model, values, message = CONFIGS[case]
    folder = shutil.copytree(folders / model, tmp_path / "theirs")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | values))
    refused(folder, message)


def refused(folder, message):
    with pytest.raises(UserError, match=message) as raised:
        import_folder(folder, folder.parent / "run")
    assert "\n" not in str(raised.value)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_copies_and_leftovers(folders, tmp_path):
    """Older folders have copies of the embedding, and a bias that no model uses: both may be there, equal to it."""
    folder = shutil.copytree(folders / "t5", tmp_path / "theirs")
    tensors = load_file(folder / WEIGHTS)
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    copies = {name: tensors["shared.weight"].clone() for name in FAMILIES["t5"].copies} | {unused: torch.ones(32, 2)}
    save_file(tensors | copies, folder / WEIGHTS, metadata={"format": "pt"})
    assert import_folder(folder, tmp_path / "run").recipe.model.tie_embeddings
    shutil.rmtree(tmp_path / "run")
    copies["encoder.embed_tokens.weight"] = copies["encoder.embed_tokens.weight"] + 1
    save_file(tensors | copies, folder / WEIGHTS, metadata={"format": "pt"})
    refused(folder, "encoder.embed_tokens.weight differs from shared.weight")


def test_queries_that_would_be_rounded(folders, tmp_path):
    """In float16, a quarter of a small query has no exact value: neither side is changed silently."""
    sizes = {"d": 16}
    small, large = torch.full((1,), 2.0**-14 + 2.0**-24).half(), torch.full((1,), 60000.0).half()
    with pytest.raises(UserError, match=r"without rounding in float16: use float32"):
        Query().split(small, sizes)
    with pytest.raises(UserError, match=r"without rounding in float16: use float32"):
        Query().join((large,), sizes)
    assert torch.equal(Query().join(Query().split(large, sizes), sizes), large)
    folder = shutil.copytree(folders / "t5", tmp_path / "theirs")
    tensors = {name: value.half() for name, value in load_file(folder / WEIGHTS).items()}
    name = "decoder.block.0.layer.1.EncDecAttention.q.weight"
    tensors[name][3, 5] = 60000.0
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    refused(folder, f"{name}: queries .* multiplied by 4.0, .* in float16")


def test_transforms_by_hand():
    """Rows of a fused matrix say (head, key or value), in this order."""
    sizes = {"Q": 2, "d": 3}
    ours = torch.arange(12).unsqueeze(1)
    key, value = KeyValue().split(ours, sizes)
    assert key.flatten().tolist() == [0, 1, 2, 6, 7, 8] and value.flatten().tolist() == [3, 4, 5, 9, 10, 11]
    assert torch.equal(KeyValue().join((key, value), sizes), ours)
