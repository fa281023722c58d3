"""What Megatron's BERT does not have is one line that names the key, and nothing is written."""

import json
import shutil

import pytest
import torch
from huggingface_folders import save_random
from safetensors.torch import load_file, save_file

from fmoe.errors import UserError
from pretrain.config import ModelConfig
from pretrain.interchange import FAMILIES, import_folder
from pretrain.interchange.families import family_for
from pretrain.interchange.folder import CONFIG, WEIGHTS

GOOD = {
    "kind": "bert",
    "moe.num_experts": 0,
    "position.encoding": "learned_absolute",
    "linear_bias": True,
    "segment_types": 2,
}
REFUSED = {
    "experts": (
        {"moe.num_experts": 8, "linear_bias": False},
        "moe.num_experts=8 is not supported by megatron-bert, the nearest family: use 0: .* no BERT with experts",
    ),
    "no biases": ({"linear_bias": False}, "model.linear_bias=false is not supported by megatron-bert, .* use .*=true"),
    "rotary positions": ({"position.encoding": "rope"}, "position.encoding=rope .* use .*=learned_absolute"),
    "no segments": ({"segment_types": 0}, "model.segment_types=0 .* at least 1"),
    "rms": ({"norm": "rms"}, "model.norm=rms .* use model.norm=layer"),
    "another activation": ({"activation": "gelu_tanh"}, "model.activation=gelu_tanh .* use .*=gelu"),
    "untied": ({"tie_embeddings": False}, "model.tie_embeddings=false .* use .*=true"),
    "wide heads": ({"attention.head_dim": 64}, "attention.head_dim=64 .* hidden_size / num_heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_family_does_not_hold(case):
    values, message = REFUSED[case]
    assert family_for(ModelConfig().with_values(GOOD)).name == "megatron-bert"
    with pytest.raises(UserError, match=message) as raised:
        family_for(ModelConfig().with_values(GOOD | values))
    assert "\n" not in str(raised.value)


def test_keys_of_other_kinds():
    for keys, message in (
        ({"linear_bias": True}, "model.linear_bias=true needs model.kind=bert, not gpt"),
        ({"segment_types": 2, "kind": "t5"}, "model.segment_types=2 needs model.kind=bert, not t5"),
        ({"linear_bias": True, "kind": "bert"}, "model.linear_bias=true is not supported with moe.num_experts=8"),
    ):
        with pytest.raises(UserError, match=message):
            ModelConfig().with_values(keys).check()


CONFIGS = {
    "another activation": ({"hidden_act": "gelu_new"}, "hidden_act=gelu_new is not supported: it must be gelu"),
    "untied": ({"tie_word_embeddings": False}, "tie_word_embeddings=false is not supported: it must be true"),
    "feed-forward in chunks": ({"chunk_size_feed_forward": 5}, "chunk_size_feed_forward=5 .*: it must be 0"),
    "a decoder": ({"is_decoder": True}, "is_decoder=true"),
    "relative positions": ({"position_embedding_type": "relative_key"}, "position_embedding_type=relative_key"),
    "plain BERT": ({"model_type": "bert"}, "model_type=bert is not supported: .*megatron-bert"),
    "fewer layers": ({"num_hidden_layers": 1}, "has the tensor bert.encoder.layer.1.*not part of this megatron-bert"),
    "shorter": ({"max_position_embeddings": 30}, r"has shape \[32, 32\], but config.json implies \[30, 32\]"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "theirs"
    save_random(path, "megatron-bert")
    return path


def refused(folder, message):
    with pytest.raises(UserError, match=message) as raised:
        import_folder(folder, folder.parent / "run")
    assert "\n" not in str(raised.value)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("case", CONFIGS)
def test_models_that_are_others(folder, tmp_path, case):
    values, message = CONFIGS[case]
    theirs = shutil.copytree(folder, tmp_path / "theirs")
    config = json.loads((theirs / CONFIG).read_text())
    (theirs / CONFIG).write_text(json.dumps(config | values))
    refused(theirs, message)


def test_heads_of_other_tasks_are_left_out(folder, tmp_path):
    theirs = shutil.copytree(folder, tmp_path / "theirs")
    tensors = load_file(theirs / WEIGHTS)
    more = {"bert.pooler.dense.weight": torch.ones(32, 32), "cls.seq_relationship.bias": torch.ones(2)}
    more |= {name: tensors[source].clone() for name, source in FAMILIES["megatron-bert"].copies.items()}
    save_file(tensors | more, theirs / WEIGHTS, metadata={"format": "pt"})
    import_folder(theirs, tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    more["cls.predictions.decoder.bias"] += 1
    save_file(tensors | more, theirs / WEIGHTS, metadata={"format": "pt"})
    refused(theirs, "cls.predictions.decoder.bias differs from cls.predictions.bias")
