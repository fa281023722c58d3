"""Values that nobody means: of every number, text and name of a recipe."""

import contextlib
import json
import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from fmoe.errors import UserError
from pretrain.config import (
    AttentionConfig,
    DataConfig,
    ModelConfig,
    MoEConfig,
    Recipe,
    RunConfig,
    build_recipe,
    load_recipe,
    write_recipe,
)
from pretrain.config.load import recipe_text
from pretrain.config.sections import keys
from pretrain.start.process import timeout
from pretrain.start.resume import find_checkpoint


def keys_of(kind):
    """Full names of the keys whose values, or items of a list, are of that type."""
    return [(name, key.is_list) for name, key in keys().items() if key.kind is kind and not key.choices]


PATHS = ("run.folder", "data.tokenizer", "data.train", "data.validation", "train.init_from")


def with_value(name, value):
    """Return a recipe with a value that is not checked yet."""
    section, key = name.split(".")
    recipe = Recipe()
    changed = replace(recipe.section(section), **{key: value})
    if section in ("attention", "position", "moe"):
        return replace(recipe, model=replace(recipe.model, **{section: changed}))
    return replace(recipe, **{section: changed})


HUGE = [2**31, 2**63 - 1, 2**63, 2**64 - 1, 10**400]
NUMBERS = {
    int: [-1, -(2**63), 0, *HUGE],
    float: [math.inf, -math.inf, math.nan, -0.0, 0.0, -1.0, 5e-324, 1e308, -1e308],
}
VALUES = [(key, value, many) for kind, values in NUMBERS.items() for key, many in keys_of(kind) for value in values]


@pytest.mark.parametrize("key", sorted({key for key, _, _ in VALUES}))
def test_a_number_is_accepted_or_refused_by_its_key(key):
    section, name = key.split(".")
    for _, value, many in (case for case in VALUES if case[0] == key):
        try:
            recipe = build_recipe({section: {name: [value] if many else value}})
            recipe.check()
        except UserError as error:
            assert key in str(error), (value, error)
            assert "\n" not in str(error)
            continue
        # What a run begins with: nothing of it overflows.
        timeout(recipe.guard.hang_minutes)
        assert tomllib.loads(recipe_text(recipe))[section][name] in (value, [value])
        json.dumps(recipe.values())
        _ = recipe.num_params(), recipe.flops_per_token(), recipe.max_lr, recipe.batches.first(recipe.train.steps)


TEXTS = {
    "carriage return": "a\rb",
    "escape": "a\x1b[31mb",
    "zero": "a\0b",
    "delete": "a\x7fb",
    "C1": "a\x9bb",
    "not UTF-8": "a\udcffb",
    "line separator": "a\u2028b",
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("key", "many"), keys_of(str))
def test_text_that_files_cannot_show_is_refused_by_its_key(key, many, text):
    recipe = with_value(key, (TEXTS[text],) if many else TEXTS[text])
    with pytest.raises(UserError, match=re.escape(key)) as refused:
        recipe.check()
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("key", ["run.folder", "data.train", "train.init_from", "moe.gate"])
def test_an_empty_name_is_refused(key):
    with pytest.raises(UserError, match=f"{key}=''"):
        with_value(key, ("",) if key == "data.train" else "").check()


@pytest.mark.parametrize(
    "name", ["ü and 語", 'a "quoted" \\ name', "tab\tand\nline", "emoji \U0001f468\u200d\U0001f4bb", "a b"]
)
def test_any_other_name_survives_the_written_recipe(tmp_path, name):
    recipe = replace(Recipe(), run=RunConfig(folder=name))
    write_recipe(recipe, tmp_path / "config.toml")
    assert load_recipe(str(tmp_path / "config.toml")) == recipe


@pytest.mark.parametrize("layers", [(1, 1), (2, 1, 2), (0,), (-1,), (5,), (1, 10**30)])
def test_layers_with_experts_are_each_named_once(layers):
    with pytest.raises(UserError, match=r"moe\.layers"):
        replace(Recipe(), model=ModelConfig(num_layers=4, moe=MoEConfig(layers=layers))).check()


def test_spans_of_a_long_sequence_are_found_at_once():
    recipe = replace(
        Recipe(),
        model=ModelConfig(kind="t5", sequence_length=2**28, attention=AttentionConfig(num_heads=6)),
        data=replace(Recipe().data, noise_density=0.99, mean_span=1e308),
    )
    with contextlib.suppress(UserError):
        recipe.check()


@pytest.mark.parametrize("key", PATHS)
@pytest.mark.parametrize("name", ["a" * 256, "ü" * 200, "a/" * 3000 + "b"])
def test_a_name_that_no_file_system_takes_is_refused(key, name):
    with pytest.raises(UserError, match=f"{key}=") as refused:
        with_value(key, (name,) if key in ("data.train", "data.validation") else name).check()
    assert len(str(refused.value)) < 200
    for refuse in (lambda: load_recipe(name), lambda: find_checkpoint(Path("nowhere"), name)):
        with pytest.raises(UserError):
            refuse()


@pytest.mark.parametrize("name", [".", "/", "./", "//"])
def test_a_corpus_is_a_prefix(name):
    with pytest.raises(UserError, match=r"data\.train=.*prefix"):
        replace(Recipe(), data=DataConfig(train=(name,))).check()


@pytest.mark.parametrize("key", ["nope.x", "x.y.z", "trainsteps.of", "modle." + "x" * 200])
def test_an_unknown_key_is_one_short_line(key):
    with pytest.raises(UserError) as error:
        load_recipe("quickstart", [f"--{key}", "3"])
    assert key in str(error.value) and len(str(error.value)) < 200 + len(key)
