"""A recipe of DeepSeekMoE's shape in transformers' Qwen2-MoE: the same logits there, the same bits on return."""

import json

import pytest
import torch
from compare import assert_close
from forks import only
from huggingface_folders import logits, saved_random, some_tokens, weights
from safetensors.torch import save_file
from test_interchange_round_trip import LIMIT

from fmoe.errors import UserError
from pretrain.checkpoint import open_checkpoint
from pretrain.config import Recipe, load_recipe
from pretrain.interchange import export_checkpoint, import_folder
from pretrain.interchange.configs import config_of, model_of
from pretrain.interchange.families import family_for

RECIPE = load_recipe("deepseek-moe-16b").model
SMALL = RECIPE.with_values(
    {
        "num_layers": 2,
        "hidden_size": 32,
        "attention.num_heads": 4,
        "ffn_hidden_size": 24,
        "dense_ffn_hidden_size": 40,
        "sequence_length": 32,
        "vocab_size": 96,
        "moe.num_experts": 8,
        "moe.layers": (2,),
        "moe.top_k": 3,
        "init_std": 0.2,
    }
)
GATE = "model.layers.1.mlp.shared_expert_gate.weight"
DOWN = "model.layers.1.mlp.shared_expert.down_proj.weight"


def test_there_and_back(forks, tmp_path):
    tokens = some_tokens()
    ours = only(forks.run(1, saved_random, tmp_path / "made", SMALL, tokens))
    exported = export_checkpoint(tmp_path / "made", tmp_path / "out")
    assert exported.family.name == "deepseek_moe" and exported.num_params == Recipe(model=SMALL).num_params()
    assert_close(logits(tmp_path / "out", tokens), ours, LIMIT, "logits")
    found = weights(tmp_path / "out")
    assert not found[GATE].any() and found[GATE].shape == (1, 32)
    biases = [tensor for name, tensor in found.items() if name.endswith("_proj.bias")]
    assert len(biases) == 3 * SMALL.num_layers and not any(tensor.any() for tensor in biases)
    import transformers

    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")).__name__ == "Qwen2MoeForCausalLM"

    done = import_folder(tmp_path / "out", tmp_path / "run")
    assert done.recipe.model.moe.num_shared_experts == 2 and done.recipe.model.moe.normalize is False
    before, after = open_checkpoint(tmp_path / "made"), open_checkpoint(tmp_path / "run")
    assert {name for name in before.names() if name.startswith("model/")} == set(after.names())
    for name in after.names():
        assert torch.equal(before.read(name), after.read(name)), name
    shared = before.read("model/decoder.layers.1.mlp.shared.expert.weight_out")[0]
    assert torch.equal(found[DOWN], 2 * shared)

    found[GATE][0, 3] = 1e-6
    (file,) = (tmp_path / "out").glob("*.safetensors")
    save_file(found, file)
    with pytest.raises(UserError, match=f"{GATE} must be zero"):
        import_folder(tmp_path / "out", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_the_published_size():
    """16.4 billion parameters, 2.8 billion active (arXiv 2401.06066 section 5.1.2)."""
    family = family_for(RECIPE)
    assert family.name == "deepseek_moe"
    assert Recipe(model=RECIPE).num_params() == pytest.approx(16.4e9, rel=0.005)
    config = json.loads(json.dumps(config_of(family, RECIPE, "bfloat16")))
    again, model = model_of(config)
    assert again is family and model.layers_with_experts == RECIPE.layers_with_experts
