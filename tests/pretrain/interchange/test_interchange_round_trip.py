"""From Hugging Face to a checkpoint and back: our logits are transformers', the tensors are the same bit for bit."""

import json

import pytest
import torch
from compare import assert_close
from forks import only, values
from huggingface_folders import assert_same_weights, inputs_of, logits, our_logits, save_random, saved_at, weights
from tiny_families import CASES

from pretrain.checkpoint import open_checkpoint
from pretrain.config import ParallelConfig, load_recipe
from pretrain.interchange import export_checkpoint, import_folder
from pretrain.interchange.outgoing import recipe_of

LIMIT = 1e-5  # of logits in float32, norm-wise
QUICK = ("mixtral", "qwen3_moe, dense layers, weights as they are", "EP2", "PP2")
QUICK += ("qwen2_moe, dense layers", "olmoe", "granitemoe")
QUICK += ("deepseek_v2", "TP2, latent attention", "glm4_moe", "ernie4_5_moe", "phimoe", "gpt_oss", "deepseek_v3, yarn")
QUICK += ("t5", "t5, version 1.1", "switch_transformers", "switch_transformers, wide heads", "TP2, switch")
QUICK += ("megatron-bert",)


def quick(names):
    """A case of each family and each kind of split by default."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("case", quick(CASES))
def test_there_and_back(forks, tmp_path, case):
    theirs, run, out = tmp_path / "theirs", tmp_path / "run", tmp_path / "out"
    save_random(theirs, case)
    done = import_folder(theirs, run)
    assert load_recipe(str(run / "config.toml")) == done.recipe == recipe_of(open_checkpoint(run))
    tokens = inputs_of(case)
    expected = logits(theirs, *tokens)
    assert_close(only(forks.run(1, our_logits, run, *tokens)), expected, LIMIT, "our logits")

    exported = export_checkpoint(run, out, shard_bytes=30_000)
    assert exported.family is done.family and exported.num_params == done.recipe.num_params()
    assert (out / "model.safetensors.index.json").exists() and len(list(out.glob("*.safetensors"))) > 1
    if "in one tensor" not in case and "other names" not in case:
        assert_same_weights(weights(out), weights(theirs))
    assert_close(logits(out, *tokens), expected, 1e-6, "their logits")  # offsets in a file may change sums
    assert import_folder(out, tmp_path / "again").recipe.model == done.recipe.model
    if done.recipe.model.kind == "gpt":
        check_configuration_and_text(theirs, out, done, tokens[0])


def check_configuration_and_text(theirs, out, done, tokens):
    import transformers

    before, after = (transformers.AutoConfig.from_pretrained(folder).to_dict() for folder in (theirs, out))
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    reference = transformers.AutoModelForCausalLM.from_pretrained(theirs)
    assert_same_weights(model.state_dict(), reference.state_dict())
    # A width of heads may be left open; special tokens are the tokenizer's; this is the width of dense layers alone.
    told = {"head_dim", "bos_token_id", "eos_token_id", "_name_or_path"}
    has_dense = len(done.recipe.model.layers_with_experts) < done.recipe.model.num_layers
    told |= {"intermediate_size"} if done.family.name != "mixtral" and not has_dense else set()
    compared = before.keys() - told  # an export may also have keys that transformers does not read
    assert {key: after[key] for key in compared} == {key: before[key] for key in compared}
    generated = model.generate(tokens[:1, :8], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, 14)
    assert torch.equal(generated, reference.generate(tokens[:1, :8], max_new_tokens=6, do_sample=False, pad_token_id=0))


SPLITS = {
    "EP2": ("mixtral tied, bf16", "bf16", ParallelConfig(expert=2)),
    "TP2": ("qwen3_moe, dense layers, weights as they are", "bf16", ParallelConfig(tensor=2)),
    "qwen2_moe, TP2": ("qwen2_moe, dense layers", "fp32", ParallelConfig(tensor=2)),
    "phimoe, TP2": ("phimoe", "fp32", ParallelConfig(tensor=2)),
    "TP2, ERNIE": ("ernie4_5_moe", "fp32", ParallelConfig(tensor=2)),
    "TP2, GPT-OSS": ("gpt_oss", "fp32", ParallelConfig(tensor=2)),
    "EP2, GPT-OSS": ("gpt_oss, other layers, bf16", "bf16", ParallelConfig(expert=2)),
    "TP2, T5": ("t5, version 1.1", "bf16", ParallelConfig(tensor=2)),
    "PP2, BERT": ("megatron-bert", "fp32", ParallelConfig(pipeline=2)),
    "PP2": ("qwen3_moe", "fp32", ParallelConfig(pipeline=2)),
    "olmoe, PP2": ("olmoe tied, experts in one tensor", "bf16", ParallelConfig(pipeline=2)),
    "TP2, experts cut": ("mixtral", "fp32", ParallelConfig(tensor=2, expert_tensor=2)),
    "EP2, one key/value head for all": (
        "mixtral, one expert a token, experts in one tensor",
        "fp32",
        ParallelConfig(expert=2),
    ),
    "TP2, latent attention": ("deepseek_v3", "bf16", ParallelConfig(tensor=2)),
    "CP2, GPT-OSS": ("gpt_oss", "fp32", ParallelConfig(context=2)),
    "TP2, switch": ("switch_transformers, bf16", "bf16", ParallelConfig(tensor=2)),
    "TP2, BERT": ("megatron-bert, one segment, bf16", "bf16", ParallelConfig(tensor=2)),
    "TP2 x EP2": ("qwen3_moe, every second layer, experts in one tensor", "fp32", ParallelConfig(tensor=2, expert=2)),
}


@pytest.mark.parametrize("split", quick(SPLITS))
def test_a_checkpoint_of_any_split_is_exported_alike(forks, tmp_path, split):
    """Imported, loaded at a split, saved by its ranks, exported: the same bits."""
    case, precision, parallel = SPLITS[split]
    save_random(tmp_path / "theirs", case)
    import_folder(tmp_path / "theirs", tmp_path / "run")
    values(forks.run(parallel.world_size, saved_at, tmp_path / "run", tmp_path / "saved", parallel, precision))
    assert open_checkpoint(tmp_path / "saved").num_ranks == parallel.world_size
    export_checkpoint(tmp_path / "run", tmp_path / "before")
    export_checkpoint(tmp_path / "saved", tmp_path / "after")
    assert_same_weights(weights(tmp_path / "after"), weights(tmp_path / "before"))
    assert json.loads((tmp_path / "after/config.json").read_text()) == json.loads(
        (tmp_path / "before/config.json").read_text()
    )
