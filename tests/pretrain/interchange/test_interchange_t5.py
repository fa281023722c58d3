"""T5 and the Switch Transformer both ways: our logits are transformers', the tensors come back bit for bit."""

import json

import pytest
import torch
from compare import assert_close
from forks import only, values
from huggingface_folders import LENGTH, VOCAB, our_engine, saved_at, weights

from pretrain.checkpoint import open_checkpoint
from pretrain.config import ParallelConfig, Recipe, load_recipe
from pretrain.interchange import export_checkpoint, import_folder
from pretrain.interchange.configs import config_of, model_of
from pretrain.interchange.folder import CONFIG

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
    "t5, heads of another width": ("t5", COMMON | {"d_kv": 8, "feed_forward_proj": "gated-silu"}, torch.float16),
    "switch_transformers, wide heads": ("switch_transformers", SWITCH | {"d_kv": 32}, torch.bfloat16),
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


@pytest.mark.by_default("t5", "t5, version 1.1", "switch_transformers", "switch_transformers, wide heads")
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


def test_differences_of_the_families_matter(forks, tmp_path):
    """Without the scale of the output, or of the scores, logits are others: the limit above means something."""
    save_random(tmp_path / "theirs", "t5")
    tokens = some_tokens()
    expected = logits(tmp_path / "theirs", *tokens)
    config = json.loads((tmp_path / "theirs" / CONFIG).read_text())
    (tmp_path / "theirs" / CONFIG).write_text(json.dumps(config | {"scale_decoder_outputs": False}))
    done = import_folder(tmp_path / "theirs", tmp_path / "run")
    assert not done.recipe.model.output_scale
    found = only(forks.run(1, our_logits, tmp_path / "run", *tokens))
    assert_close(found, expected * 24**0.5, LIMIT, "logits without a scale")


SPLITS = {
    "TP2": ("switch_transformers, bf16", "bf16", ParallelConfig(tensor=2)),
    "EP2": ("switch_transformers", "fp32", ParallelConfig(expert=2)),
    "TP2, heads of another width": ("t5, heads of another width", "fp16", ParallelConfig(tensor=2)),
    "TP2, dense": ("t5, version 1.1", "bf16", ParallelConfig(tensor=2)),
}


@pytest.mark.parametrize("split", [pytest.param(s, marks=() if s == "TP2" else pytest.mark.slow) for s in SPLITS])
def test_a_checkpoint_of_any_split_is_exported_alike(forks, tmp_path, split):
    case, precision, parallel = SPLITS[split]
    save_random(tmp_path / "theirs", case)
    import_folder(tmp_path / "theirs", tmp_path / "run")
    values(forks.run(parallel.world_size, saved_at, tmp_path / "run", tmp_path / "saved", parallel, precision))
    assert open_checkpoint(tmp_path / "saved").num_ranks == parallel.world_size
    export_checkpoint(tmp_path / "saved", tmp_path / "out")
    assert_same_weights(weights(tmp_path / "out"), weights(tmp_path / "theirs"))


# As on the hub.
T5_SMALL = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 512,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_heads": 8,
    "num_layers": 6,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "vocab_size": 32128,
}
T5_V1_1_BASE = T5_SMALL | {
    "d_model": 768,
    "feed_forward_proj": "gated-gelu",
    "num_decoder_layers": 12,
    "num_heads": 12,
    "num_layers": 12,
    "tie_word_embeddings": False,
}
T5_3B = T5_SMALL | {"d_ff": 16384, "d_kv": 128, "d_model": 1024, "num_heads": 32, "num_layers": 24}
T5_11B = T5_3B | {"d_ff": 65536, "num_heads": 128}
SWITCH_BASE_8 = T5_V1_1_BASE | {
    "architectures": ["SwitchTransformersForConditionalGeneration"],
    "d_ff": 3072,
    "decoder_sparse_step": 2,
    "dense_act_fn": "relu",
    "encoder_sparse_step": 2,
    "expert_capacity": 64,
    "feed_forward_proj": "relu",
    "is_gated_act": False,
    "model_type": "switch_transformers",
    "num_experts": 8,
    "num_sparse_decoder_layers": 6,
    "num_sparse_encoder_layers": 6,
    "relative_attention_max_distance": 128,
    "router_bias": False,
    "router_dtype": "float32",
    "router_ignore_padding_tokens": False,
    "router_jitter_noise": 0.01,
    "tie_word_embeddings": True,
}
# Configuration, parameters, tensors.
PUBLISHED = {
    "t5-small": (T5_SMALL, 60_506_624, 131),
    "t5-v1_1-base": (T5_V1_1_BASE, 247_577_856, 282),
    "t5-3b": (T5_3B, 2_851_598_336, 509),
    "t5-11b": (T5_11B, 11_307_321_344, 509),
    "switch-base-8": (SWITCH_BASE_8, 619_339_008, 437),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name):
    import transformers

    config, total, tensors = PUBLISHED[name]
    family, model = model_of(config)
    assert family.name == config["model_type"]
    names = [name for place in family.tensors(model) for name in place.theirs]

    assert len(names) == len(set(names)) == tensors
    assert Recipe(model=model).num_params() == total
    written = config_of(family, model, "bfloat16")
    assert model_of(json.loads(json.dumps(written)))[1] == model
    theirs = transformers.AutoConfig.for_model(**config)
    if name != "t5-v1_1-base":  # transformers 5 ties every T5, and imports look at its weights
        assert model_of(theirs.to_dict())[1] == model
    with torch.device("meta"):
        built = transformers.AutoModelForSeq2SeqLM.from_config(theirs)
    copies = {name for name in family.copies if name not in names}
    assert set(built.state_dict()) - copies == set(names)
    # An export of few tokens is not an import of another capacity.
    assert model.sequence_length == (64 if family.name == "switch_transformers" else 512)
