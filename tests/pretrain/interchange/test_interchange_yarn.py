"""YaRN in config.json: what is read, what is refused in one line, and a longer context for a model that is imported."""

from dataclasses import replace

import pytest
import torch
from compare import assert_close
from forks import only
from huggingface_folders import engine_logits, save_random
from published import DEEPSEEK_V2_LITE, DEEPSEEK_V3, QWEN3_30B_A3B
from tiny_families import VOCAB

from fmoe.errors import UserError
from pretrain.config import ModelConfig, Recipe, TrainConfig, load_recipe
from pretrain.interchange import import_folder
from pretrain.interchange.configs import config_of, model_of
from pretrain.interchange.llama_cpp import SCRIPT, check_convertible

PLAIN = ModelConfig()


def yarn_of(config):
    """The values of our keys that are not the default's."""
    model = model_of(config)[1]
    Recipe(model=model).check()
    return {
        name: value
        for name, value in model.values().items()
        if name.startswith("position.rope_") and name != "position.rope_theta" and value != PLAIN.value(name)
    }


V3 = {
    "position.rope_scaling": "yarn",
    "position.rope_factor": 40.0,
    "position.rope_original_length": 4096,
    "position.rope_mscale_all_dim": 1.0,
}
ROPE = DEEPSEEK_V3["rope_scaling"]
QWEN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
QWEN_YARN = {"position.rope_scaling": "yarn", "position.rope_factor": 4.0, "position.rope_original_length": 32768}
READ = {
    "DeepSeek-V3": (DEEPSEEK_V3, {}, V3),
    "DeepSeek-V2-Lite": (
        DEEPSEEK_V2_LITE,
        {},
        V3 | {"position.rope_mscale": 0.707, "position.rope_mscale_all_dim": 0.707},
    ),
    "as transformers 5 writes it": (
        DEEPSEEK_V3,
        {"rope_scaling": None, "rope_parameters": ROPE | {"rope_type": "yarn", "rope_theta": 1e4}},
        V3,
    ),
    "twice": (QWEN3_30B_A3B, {"rope_scaling": QWEN, "rope_parameters": QWEN}, QWEN_YARN),
    "Qwen3": (QWEN3_30B_A3B, {"rope_scaling": QWEN}, QWEN_YARN),
    "without a length": (
        QWEN3_30B_A3B,
        {"rope_scaling": {"type": "yarn", "factor": 4}},
        QWEN_YARN | {"position.rope_original_length": 40960},
    ),
    "a length of the model": (
        QWEN3_30B_A3B,
        {"rope_scaling": QWEN, "original_max_position_embeddings": 8192},
        QWEN_YARN | {"position.rope_original_length": 8192},
    ),
    "the usual factor": (
        QWEN3_30B_A3B,
        {"rope_scaling": QWEN | {"attention_factor": 1.138629436111989, "beta_fast": None}},
        QWEN_YARN,
    ),
    "not truncated": (
        QWEN3_30B_A3B,
        {"rope_scaling": QWEN | {"truncate": False, "beta_fast": 64, "beta_slow": 2}},
        QWEN_YARN | {"position.rope_truncate": False, "position.rope_beta_fast": 64.0, "position.rope_beta_slow": 2.0},
    ),
    "null, which is false": (
        QWEN3_30B_A3B,
        {"rope_scaling": QWEN | {"truncate": None}},
        QWEN_YARN | {"position.rope_truncate": False},
    ),
    "no object": (QWEN3_30B_A3B, {"rope_scaling": {}}, {}),
}


@pytest.mark.parametrize("case", READ)
def test_what_is_read_is_written_again(case):
    config, values, expected = READ[case]
    config = config | values
    assert yarn_of(config) == expected
    family, model = model_of(config)
    assert model_of(config_of(family, model, "float32")) == (family, model)


REFUSED = {
    "another kind": ({"rope_type": "longrope"}, "rope_type must be default or yarn"),
    "no kind": ({"rope_type": None}, "rope_type must be default or yarn"),
    "a factor in words": ({"factor": "4"}, "factor=4 must be a finite number"),
    "a true factor": ({"factor": True}, "factor=true must be a finite number"),
    "not a number": ({"beta_fast": float("nan")}, "beta_fast=nan must be a finite number"),
    "negative": ({"mscale": -1.0}, "mscale=-1.0 must be a finite number"),
    "turns": ({"beta_slow": 64}, "position.rope_beta_slow=64.0"),
    "no factor": ({"factor": None}, "factor is missing"),
    "less than one": ({"factor": 0.5}, "factor=0.5 must be a finite number of at least 1"),
    "a huge number": ({"factor": 10**400}, "factor=1"),
    "no length": ({"original_max_position_embeddings": 0}, "original_max_position_embeddings=0"),
    "truth": ({"truncate": 1}, "truncate=1 must be true or false"),
    "another factor": ({"attention_factor": 1.0}, "attention_factor=1.0 is not supported"),
    "one scale": ({"mscale": 0.7}, "position.rope_mscale=0.7"),
    "the other scale": ({"mscale_all_dim": 0.7}, "mscale_all_dim=0.7 is not supported without mscale"),
    "a key of another kind": ({"short_factor": [1.0]}, "short_factor"),
    "an object of one": (["yarn"], "rope_scaling=['yarn'] must be an object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_objects(case):
    values, part = REFUSED[case]
    rope = values if isinstance(values, list) else QWEN | values
    with pytest.raises(UserError) as error:
        yarn_of(QWEN3_30B_A3B | {"rope_scaling": rope})
    assert part in str(error.value) and "\n" not in str(error.value), str(error.value)


def test_llama_cpp_is_refused(tmp_path):
    (tmp_path / SCRIPT).write_text("")
    family, model = model_of(QWEN3_30B_A3B | {"rope_scaling": QWEN})
    with pytest.raises(UserError, match=r"position\.rope_scaling=yarn is not supported with --llama-cpp"):
        check_convertible(tmp_path, family, model, None, {})


def longer(path, factor):
    """Logits of 64 tokens by a model that is imported for 32, and the losses of 8 steps on sequences of as many; for a
    process of `forks`."""
    from engines import engine_of

    from pretrain.checkpoint import open_checkpoint
    from pretrain.engine import state

    recipe = load_recipe(str(path / "config.toml"))
    yarn = {"position.rope_scaling": "yarn", "position.rope_factor": factor, "position.rope_original_length": 32}
    recipe = replace(recipe, model=recipe.model.with_values({"sequence_length": 64, **yarn}))
    recipe = replace(recipe, train=TrainConfig(steps=8, global_batch=2, micro_batch=2))
    engine = engine_of(recipe)
    state.load_weights(engine, open_checkpoint(path))
    logits = engine_logits(engine, {"tokens": tokens_of(64)})
    return logits, [engine.train_step(step, Repeated()).loss for step in range(8)]


class Repeated:
    def __getitem__(self, n):
        return tokens_of(65)[0].numpy()


def tokens_of(length):
    return torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("case", ["mixtral", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_an_imported_model_trains_on_longer_sequences(forks, tmp_path, case):
    """Its logits are those of transformers with the same scaling, before training, and the loss falls."""
    import transformers

    theirs = tmp_path / "theirs"
    save_random(theirs, case)
    import_folder(theirs, tmp_path / "run")
    logits, losses = only(forks.run(1, longer, tmp_path / "run", 2.0))
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    config = transformers.AutoConfig.from_pretrained(theirs)
    config.rope_parameters = config.rope_parameters | rope
    config.max_position_embeddings = 64
    model = transformers.AutoModelForCausalLM.from_pretrained(theirs, config=config, dtype=torch.float32)
    with torch.no_grad():
        expected = model(tokens_of(64)).logits
    assert_close(logits, expected, 1e-5, "logits")
    assert losses[-1] < losses[0]
