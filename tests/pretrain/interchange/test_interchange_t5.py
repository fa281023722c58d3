"""T5 and the Switch Transformer both ways: our logits are transformers', the tensors come back bit for bit."""

import json
import shutil

import pytest
import torch
from compare import assert_close
from forks import only, values
from huggingface_folders import LENGTH, VOCAB, our_engine, saved_at, weights

from fmoe.errors import UserError
from pretrain.checkpoint import open_checkpoint
from pretrain.config import ModelConfig, ParallelConfig, Recipe, load_recipe
from pretrain.interchange import export_checkpoint, import_folder
from pretrain.interchange.configs import config_of, model_of
from pretrain.interchange.families import family_for
from pretrain.interchange.folder import CONFIG
from pretrain.interchange.tensors import places

LIMIT = 1e-5  # of logits in float32, norm-wise
COMMON = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "d_kv": 16,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 2,
    "n_positions": LENGTH,
}
SWITCH = COMMON | {"num_experts": 4, "expert_capacity": 2 * LENGTH, "num_layers": 4}
# Name of a case: model_type, values of its configuration, dtype.
CASES = {
    "t5": ("t5", COMMON, torch.float32),
    "t5, version 1.1": ("t5", COMMON | {"feed_forward_proj": "gated-gelu", "untied": True}, torch.bfloat16),
    "t5, tied without a scale": (
        "t5",
        COMMON | {"feed_forward_proj": "gated-gelu_python", "tie_word_embeddings": False, "d_kv": 4},
        torch.float32,
    ),
    "switch_transformers": (
        "switch_transformers",
        SWITCH | {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 3},
        torch.float32,
    ),
    "switch_transformers, bf16": (
        "switch_transformers",
        SWITCH | {"num_decoder_layers": 4, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
        torch.bfloat16,
    ),
    "switch_transformers, experts in the encoder alone": (
        "switch_transformers",
        SWITCH | {"encoder_sparse_step": 3, "decoder_sparse_step": 0, "dense_act_fn": "gelu_new"},
        torch.float32,
    ),
}


def save_random(folder, case):
    import transformers

    kind, config, dtype = CASES[case]
    config = dict(config)
    untied = config.pop("untied", False)
    torch.manual_seed(len(case))
    model = transformers.AutoModelForSeq2SeqLM.from_config(transformers.AutoConfig.for_model(kind, **config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            if "relative" in name:
                parameter.normal_()
    if untied:
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 24) / 5)
        model.config.scale_decoder_outputs = False
    model.to(dtype).save_pretrained(folder)


def some_tokens():
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, VOCAB, (3, LENGTH), generator=generator), torch.randint(
        0, VOCAB, (3, 11), generator=generator
    )


def logits(folder, tokens, decoder_tokens):
    """Of transformers' model, in float32."""
    import transformers

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=tokens, decoder_input_ids=decoder_tokens).logits


def our_logits(path, tokens, decoder_tokens):
    """Of our model with a checkpoint's weights, in float32; for a process of `forks`."""
    (model,) = our_engine(path).chunks
    model.eval()
    with torch.no_grad():
        return model(tokens, decoder_tokens, None, None, None)


def assert_same_weights(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(forks, tmp_path, case):
    theirs, run, out = tmp_path / "theirs", tmp_path / "run", tmp_path / "out"
    save_random(theirs, case)
    done = import_folder(theirs, run)
    assert load_recipe(str(run / "config.toml")) == done.recipe
    tokens = some_tokens()
    expected = logits(theirs, *tokens)
    assert_close(only(forks.run(1, our_logits, run, *tokens)), expected, LIMIT, "our logits")
    exported = export_checkpoint(run, out)
    assert exported.family is done.family and exported.num_params == done.recipe.num_params()
    assert_same_weights(weights(out), weights(theirs))
    assert_close(logits(out, *tokens), expected, 1e-6, "their logits")  # offsets in a file may change sums
    assert import_folder(out, tmp_path / "again").recipe.model == done.recipe.model
