"""Megatron's BERT both ways: our logits are transformers', the tensors come back bit for bit."""

import json
import shutil

import pytest
import torch
from compare import assert_close
from forks import only, values
from huggingface_folders import LENGTH, VOCAB, our_engine, saved_at, some_tokens, weights
from safetensors.torch import load_file, save_file

from fmoe.errors import UserError
from pretrain.config import ModelConfig, ParallelConfig, Recipe, load_recipe
from pretrain.interchange import FAMILIES, export_checkpoint, import_folder
from pretrain.interchange.configs import config_of, model_of
from pretrain.interchange.families import family_for
from pretrain.interchange.folder import CONFIG, WEIGHTS

LIMIT = 1e-5  # of logits in float32, norm-wise
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": LENGTH,
}


def save_random(folder, dtype=torch.float32, **values):
    import transformers

    torch.manual_seed(3)
    model = transformers.MegatronBertForMaskedLM(transformers.MegatronBertConfig(**(TINY | values)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.2)
    model.to(dtype).save_pretrained(folder)


def logits(folder, tokens):
    """Of transformers' model, in float32."""
    import transformers

    model = transformers.AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(tokens).logits


def our_logits(path, tokens):
    """Of our model with a checkpoint's weights, in float32; for a process of `forks`."""
    (model,) = our_engine(path).chunks
    model.eval()
    with torch.no_grad():
        return model(tokens, None)[0]


def assert_same_weights(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def test_there_and_back(forks, tmp_path):
    theirs, run, out = tmp_path / "theirs", tmp_path / "run", tmp_path / "out"
    save_random(theirs)
    done = import_folder(theirs, run)
    assert load_recipe(str(run / "config.toml")) == done.recipe and done.recipe.model.segment_types == 2
    tokens = some_tokens()
    expected = logits(theirs, tokens)
    assert_close(only(forks.run(1, our_logits, run, tokens)), expected, LIMIT, "our logits")
    exported = export_checkpoint(run, out)
    assert exported.family is done.family and exported.num_params == done.recipe.num_params()
    assert_same_weights(weights(out), weights(theirs))
    assert_close(logits(out, tokens), expected, 1e-6, "their logits")
    assert import_folder(out, tmp_path / "again").recipe.model == done.recipe.model


SPLITS = {
    "TP2": ("bf16", ParallelConfig(tensor=2)),
    "PP2": ("fp32", ParallelConfig(pipeline=2)),
}


@pytest.mark.parametrize("split", [pytest.param(s, marks=() if s == "TP2" else pytest.mark.slow) for s in SPLITS])
def test_a_checkpoint_of_any_split_is_exported_alike(forks, tmp_path, split):
    precision, parallel = SPLITS[split]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    save_random(tmp_path / "theirs", dtype, type_vocab_size=1)
    import_folder(tmp_path / "theirs", tmp_path / "run")
    values(forks.run(parallel.world_size, saved_at, tmp_path / "run", tmp_path / "saved", parallel, precision))
    export_checkpoint(tmp_path / "saved", tmp_path / "out")
    assert_same_weights(weights(tmp_path / "out"), weights(tmp_path / "theirs"))


def test_a_published_model():
    """nvidia/megatron-bert-uncased-345m, as transformers' script converts it."""
    import transformers

    config = {
        "attention_probs_dropout_prob": 0.1,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "model_type": "megatron-bert",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
        "vocab_size": 29056,
    }
    family, model = model_of(config)
    names = [name for place in family.tensors(model) for name in place.theirs]
    theirs = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        built = transformers.MegatronBertForMaskedLM(theirs)
    assert set(built.state_dict()) - family.copies.keys() == set(names) and len(names) == 24 * 16 + 10
    assert Recipe(model=model).num_params() == sum(p.numel() for p in built.parameters()) == 333_671_808
    assert model_of(theirs.to_dict())[1] == model
    assert model_of(json.loads(json.dumps(config_of(family, model, "float16"))))[1] == model


GOOD = {"kind": "bert", "num_experts": 0, "position": "learned_absolute", "linear_bias": True, "segment_types": 2}
REFUSED = {
    "experts": (
        {"num_experts": 8, "linear_bias": False},
        "model.num_experts=8 is not supported by megatron-bert, the nearest family: use 0: .* no BERT with experts",
    ),
    "no biases": ({"linear_bias": False}, "model.linear_bias=false is not supported by megatron-bert, .* use .*=true"),
    "rotary positions": ({"position": "rope"}, "model.position=rope .* use .*=learned_absolute"),
    "no segments": ({"segment_types": 0}, "model.segment_types=0 .* at least 1"),
    "rms": ({"norm": "rms"}, "model.norm=rms .* use model.norm=layer"),
    "another activation": ({"activation": "gelu_tanh"}, "model.activation=gelu_tanh .* use .*=gelu"),
    "untied": ({"tie_embeddings": False}, "model.tie_embeddings=false .* use .*=true"),
    "wide heads": ({"head_dim": 64}, "model.head_dim=64 .* hidden_size / num_heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_family_does_not_hold(case):
    values, message = REFUSED[case]
    assert family_for(ModelConfig(**GOOD)).name == "megatron-bert"
    with pytest.raises(UserError, match=message) as raised:
        family_for(ModelConfig(**(GOOD | values)))
    assert "\n" not in str(raised.value)


def test_keys_of_other_kinds():
    for keys, message in (
        ({"linear_bias": True}, "model.linear_bias=true needs model.kind=bert, not gpt"),
        ({"segment_types": 2, "kind": "t5"}, "model.segment_types=2 needs model.kind=bert, not t5"),
        ({"linear_bias": True, "kind": "bert"}, "model.linear_bias=true is not supported with model.num_experts=8"),
    ):
        with pytest.raises(UserError, match=message):
            ModelConfig(**keys).check()


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
    save_random(path)
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
