"""YaRN (arXiv 2309.00071 section 3): its formulas in float64, transformers, every split, and its checks."""

import math
from dataclasses import replace
from unittest import mock

import latent_reference as latent
import mtp_reference as mtp
import pytest
import torch
from compare import assert_close
from engines import STEADY, assert_split_equals_one
from forks import only

from pretrain.config import AttentionConfig, ModelConfig, ParallelConfig, PositionConfig, Recipe
from pretrain.config.yarn import rotary_factor, rotary_frequencies, rotary_width, score_factor

# Of heads with few elements: the first pair keeps its frequency, the last ones do not.
YARN = {
    "position.rope_scaling": "yarn",
    "position.rope_factor": 4.0,
    "position.rope_original_length": 8,
    "position.rope_beta_fast": 2.0,
    "position.rope_beta_slow": 0.25,
    "position.rope_truncate": False,
    "position.rope_mscale": 2.0,
    "position.rope_mscale_all_dim": 0.7,
}


def frequency(model, pair):
    """Of a pair of elements, in Python's floats."""
    width = rotary_width(model)
    kept = model.position.rope_theta ** (-2 * pair / rotary_width(model))
    # A pair p turns length / (2 pi theta^(2 p / width)) times; these two turn beta_fast and beta_slow times.
    fast, slow = (
        width / 2 * math.log(model.position.rope_original_length / (2 * math.pi * turns), model.position.rope_theta)
        for turns in (model.position.rope_beta_fast, model.position.rope_beta_slow)
    )
    if model.position.rope_truncate:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, width - 1)
    share = float(pair > fast) if fast == slow else min(max((pair - fast) / (slow - fast), 0), 1)
    return share * kept / model.position.rope_factor + (1 - share) * kept


def factor(model, scale):
    return 1 + math.log(model.position.rope_factor) / 10 * scale


def published(width, **values):
    values = {f"position.{name.removeprefix('position.')}": value for name, value in values.items()}
    values["position.rope_scaling"] = "yarn"
    return ModelConfig().with_values({"hidden_size": width, "attention.num_heads": 1, **values})


# Of models that are published with YaRN.
MODELS = {
    "DeepSeek-V3": published(
        64, rope_factor=40.0, rope_original_length=4096, rope_mscale_all_dim=1.0, rope_truncate=True
    ),
    "DeepSeek-V2-Lite": published(
        64, rope_factor=40.0, rope_original_length=4096, rope_mscale=0.707, rope_mscale_all_dim=0.707
    ),
    "Qwen3": published(128, rope_theta=1e6, rope_factor=4.0, rope_original_length=32768),
    "GPT-OSS": published(64, rope_theta=150000.0, rope_factor=32.0, rope_original_length=4096, rope_truncate=False),
    "Kimi K2": published(64, rope_theta=5e4, rope_factor=32.0, rope_original_length=4096, rope_beta_fast=1.0),
    "half of a head": published(24, rope_theta=1e4, rotary_fraction=0.5, **YARN),
}


@pytest.mark.parametrize("name", MODELS)
def test_frequencies_and_factor_are_those_of_the_paper_and_of_transformers(name):
    model = MODELS[name]
    Recipe(model=model).check()
    found = rotary_frequencies(model)
    expected = torch.tensor([frequency(model, pair) for pair in range(rotary_width(model) // 2)], dtype=torch.float64)
    assert_close(found.double(), expected, 1e-6, "frequencies")
    assert found[-1] < 0.5 * model.position.rope_theta ** (2 / rotary_width(model) - 1), "nothing is scaled"
    assert rotary_factor(model) == pytest.approx(
        factor(model, model.position.rope_mscale) / factor(model, model.position.rope_mscale_all_dim)
    )

    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "rope_theta": model.position.rope_theta, "factor": model.position.rope_factor}
    rope |= {
        "beta_fast": model.position.rope_beta_fast,
        "beta_slow": model.position.rope_beta_slow,
        "truncate": model.position.rope_truncate,
    }
    rope |= {"original_max_position_embeddings": model.position.rope_original_length}
    rope |= {"partial_rotary_factor": model.position.rotary_fraction}
    if model.position.rope_mscale_all_dim:
        rope |= {"mscale": model.position.rope_mscale, "mscale_all_dim": model.position.rope_mscale_all_dim}
    config = LlamaConfig(hidden_size=model.hidden_size, num_attention_heads=1, rope_parameters=rope)
    theirs, their_factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    assert torch.equal(found, theirs)
    assert rotary_factor(model) == their_factor


def test_without_scaling_nothing_changes():
    model = ModelConfig(attention=AttentionConfig(head_dim=8), position=PositionConfig(rope_theta=100.0))
    assert_close(rotary_frequencies(model).double(), 100.0 ** (-torch.arange(4).double() / 4), 1e-6, "frequencies")
    assert torch.equal(
        rotary_frequencies(model.with_values(YARN | {"position.rope_factor": 1.0})), rotary_frequencies(model)
    )
    assert rotary_factor(model) == score_factor(model) == score_factor(model.with_values(YARN)) == 1.0


LATENT = latent.MODEL.with_values(YARN)


def rotated(x, position):
    """As `test_latent_attention.rotated`, by YaRN."""
    angles = [position * frequency(LATENT, pair) for pair in range(len(x) // 2)]
    size = factor(LATENT, LATENT.position.rope_mscale) / factor(LATENT, LATENT.position.rope_mscale_all_dim)
    turned = torch.view_as_complex(x.reshape(-1, 2)) * torch.tensor(
        [size * complex(math.cos(angle), math.sin(angle)) for angle in angles]
    )
    return torch.view_as_real(turned).flatten()


def both():
    scale = latent.SCALE * factor(LATENT, LATENT.position.rope_mscale_all_dim) ** 2
    with mock.patch.multiple(latent, MODEL=LATENT, rotated=rotated, SCALE=scale):
        return latent.both(12)


def test_latent_attention_is_that_of_the_papers(forks):
    """Output and all gradients."""
    ours, expected = only(forks.run(1, both))
    for name, value in expected.items():
        assert_close(ours[name].double(), value, 1e-5, name)


MTP = replace(mtp.PLAIN, model=mtp.PLAIN.model.with_values(YARN))


def rotate(x):
    """As `mtp_reference.rotate`, by YaRN."""
    half = x.shape[-1] // 2
    size = factor(MTP.model, 2.0) / factor(MTP.model, 0.7)
    turns = torch.tensor([frequency(MTP.model, pair) for pair in range(half)], dtype=x.dtype)
    angles = torch.arange(x.shape[-2], dtype=x.dtype).unsqueeze(1) * turns
    a = x[..., :half]
    b = x[..., half:]
    cos = angles.cos() * size
    sin = angles.sin() * size
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def test_standard_attention_and_further_tokens_are_those_of_the_papers(forks, monkeypatch):
    """Losses and gradients of a GPT with multi-token prediction."""
    monkeypatch.setattr(mtp, "rotate", rotate)
    mtp.assert_losses_and_gradients(forks, MTP)


STANDARD = replace(
    STEADY, model=STEADY.model.with_values({"norm": "rms", "position.rotary_fraction": 0.5, "dropout": 0.1, **YARN})
)
LATENT_ENGINE = replace(latent.ENGINE, model=latent.ENGINE.model.with_values(YARN))
SPLITS = {
    "CP2": (STANDARD, {"context": 2}),
    "PP2": (STANDARD, {"pipeline": 2}),
    "latent attention, TP2 SP": (LATENT_ENGINE, {"tensor": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SPLITS)
def test_splits_equal_one_process(forks, case):
    """Losses, gradient norms, weights and moments."""
    recipe, parallel = SPLITS[case]
    assert_split_equals_one(forks, replace(recipe, parallel=ParallelConfig(**parallel)), recipe)
