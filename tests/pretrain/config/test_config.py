"""Recipes: read, overridden, checked, written."""

import contextlib
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from fmoe.errors import UserError
from fmoe.gates import build_gate
from pretrain.config import (
    ModelConfig,
    MoEConfig,
    Recipe,
    load_recipe,
    write_recipe,
)
from pretrain.config.load import RECIPES, build_recipe, read_recipe, to_toml
from pretrain.config.renamed import RENAMED
from pretrain.config.sections import keys
from pretrain.config.validation import validated
from pretrain.start.job import parse

NUMBERS = (2, 3, 0.5, 0.25, -0.5)


def other_value(name, key):
    """Return a valid value of a key that is not its default."""
    values = {
        bool: [not key.default],
        str: ['"odd" \\ näme\t\n世界'],
        Mapping: [{"a": 2, "näme": [1.5, "\n", None, True]}, {"seconds": 1.5, "memory": 3}],
    }
    section, _, entry = name.partition(".")
    for value in key.choices or values.get(key.kind, NUMBERS):
        value = (value,) if key.is_list else value
        with contextlib.suppress(UserError):
            if validated({section: {entry: value}})[section][entry] != key.default:
                return key.kind(value) if key.kind is float and not key.is_list else value
    raise AssertionError(f"no other value of {name}")


def test_every_key_comes_back_from_the_file(tmp_path):
    values = {}
    for name, key in keys().items():
        section, _, entry = name.partition(".")
        values.setdefault(section, {})[entry] = other_value(name, key)
    recipe = build_recipe(values)
    assert recipe.values() == values
    write_recipe(recipe, tmp_path / "config.toml")
    assert read_recipe(str(tmp_path / "config.toml")) == recipe
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def recipe_with(values, base=None):
    """Return a recipe with some values, which are keyed by the full names of keys."""
    sections = (base or Recipe()).values()
    for name, value in values.items():
        section, _, key = name.partition(".")
        sections[section][key] = value
    return build_recipe(sections)


def test_a_runs_recipe_of_before_the_sections_loads_by_the_table_of_names(tmp_path):
    text = Path(__file__).with_name("config_before_sections.toml").read_text()
    (tmp_path / "config.toml").write_text(text)
    recipe = read_recipe(str(tmp_path / "config.toml"))
    assert build_recipe(tomllib.loads(text)) == recipe  # the recipe in the state of a checkpoint
    before = tomllib.loads(text)["model"]
    moved = {
        new: before[old.removeprefix("model.")] for old, new in RENAMED.items() if old.removeprefix("model.") in before
    }
    assert recipe.parallel.shard == "optimizer"  # was optimizer.distributed
    newer = {"attention.sliding_stride"}
    assert set(moved) == {n for n in keys() if n.startswith(("attention.", "position.", "moe."))} - newer
    for name, value in moved.items():
        was = recipe.value(name)
        assert to_toml(was) == to_toml(value)
        assert was != keys()[name].default, f"{name} is not tried"
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError, match=r"model\.num_heads is now attention\.num_heads"):
        read_recipe(str(tmp_path / "mine.toml"))
    with pytest.raises(UserError, match=r"optimizer\.distributed is now parallel\.shard"):
        load_recipe("quickstart", ["--optimizer.distributed"])


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_recipes_load_by_name(path, tmp_path):
    recipe = load_recipe(path.stem)
    write_recipe(recipe, tmp_path / "again.toml")
    assert load_recipe(str(tmp_path / "again.toml")) == recipe


def test_quickstart_is_what_the_readme_promises():
    recipe = load_recipe("quickstart")
    assert (recipe.parallel.expert, recipe.parallel.world_size, recipe.model.moe.num_experts) == (2, 2, 16)
    assert recipe.model.layers_with_experts == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        (["--moe.num-experts", "32"], "moe.num_experts", 32),
        (["--moe.num-experts=32"], "moe.num_experts", 32),
        (["--moe.capacity-factor", "1.5"], "moe.capacity_factor", 1.5),
        (["--moe.layers", "1", "3"], "moe.layers", (1, 3)),
        (["--moe.normalize", "False"], "moe.normalize", False),
        (["--attention.qk-norm"], "attention.qk_norm", True),
        (["--data.train", "a", "b"], "data.train", ("a", "b")),
        (["--tracking.no-wandb"], "tracking.wandb", False),
        (["--tracking.wandb=false"], "tracking.wandb", False),
        (["--tracking.wandb", "false"], "tracking.wandb", False),
        (["--attention.qkv-bias", "true"], "attention.qkv_bias", True),
        (["--parallel.shard", "optimizer"], "parallel.shard", "optimizer"),
        (["--moe.no-normalize"], "moe.normalize", False),
        (["--moe.normalize", "none", "--moe.normalize", "true"], "moe.normalize", True),
        (["--train.init-from=a=b --c"], "train.init_from", "a=b --c"),
        (["--data.tokenizer="], "data.tokenizer", ""),
        (["--moe.layers=3"], "moe.layers", (3,)),
        (["--data.weights", "0.5"], "data.weights", (0.5,)),
        (["--data.validation"], "data.validation", ()),
        (["--train.steps", "50", "--train.steps", "60"], "train.steps", 60),
        (["--optimizer.lr", "1e-4", "--optimizer.min-lr", "0"], "optimizer.lr", 1e-4),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_options_override_the_file(options, key, value):
    recipe = load_recipe("quickstart", options)
    assert recipe.value(key) == value
    base = load_recipe("quickstart")
    assert {name for name in keys() if recipe.value(name) != base.value(name)} - {"optimizer.min_lr"} == {key}


@pytest.mark.parametrize("word", ["none", "None"])
def test_none_is_an_option(word):
    assert load_recipe("t5").model.moe.capacity_factor is not None
    assert load_recipe("t5", ["--moe.capacity-factor", word]).model.moe.capacity_factor is None


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("model.num_layers", 4.0, ["model.num_layers=4.0", "int"]),
        ("model.num_layers", True, ["model.num_layers=True", "int"]),
        ("model.gated", 1, ["model.gated=1", "true or false"]),
        ("moe.layers", 3, ["moe.layers=3", "list"]),
        ("data.train", "prefix", ["data.train='prefix'", "list"]),
    ],
)
def test_a_value_of_another_type_is_named(key, value, parts):
    """In a file; `test_rules` has other invalid values."""
    with pytest.raises(UserError) as error:
        recipe_with({key: value}).check()
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_layers_of_multi_token_prediction_are_of_the_last_layers_kind():
    assert ModelConfig(mtp_layers=2).layers_with_experts == (1, 2, 3, 4, 5, 6)
    assert ModelConfig(mtp_layers=2, moe=MoEConfig(every=4)).layers_with_experts == (4, 5, 6)
    assert ModelConfig(mtp_layers=2, moe=MoEConfig(every=3)).layers_with_experts == (3,)
    assert ModelConfig(mtp_layers=2, moe=MoEConfig(layers=(1, 4))).layers_with_experts == (1, 4, 5, 6)


@pytest.mark.parametrize(
    ("gate", "key", "value", "of"),
    [
        ("switch", "routed_scale", 2.5, "naive, sigmoid"),
        ("gshard", "normalize", False, "naive, sigmoid"),
        ("naive", "bias_step", 0.01, "sigmoid"),
        ("hash", "score", "softmax", "naive, sigmoid"),
    ],
)
def test_an_option_that_a_gate_has_not_is_said(gate, key, value, of):
    from pretrain.engine.model import gate_options

    model = ModelConfig(moe=MoEConfig(gate=gate, **{key: value}))
    with pytest.raises(UserError) as error:
        gate_options(model)
    assert all(part in str(error.value) for part in (f"moe.{key}={value}", f"moe.gate={gate}", of))
    assert key not in gate_options(ModelConfig(moe=MoEConfig(gate=gate)))


def test_a_gate_gets_its_options():
    from pretrain.engine.model import gate_options

    model = ModelConfig(
        moe=MoEConfig(gate="sigmoid", bias_step=0.0, normalize=False, routed_scale=2.5, score="softmax")
    )
    gate = build_gate("sigmoid", 8, 4, 2, **gate_options(model))
    assert (gate.bias_step, gate.normalize, gate.routed_scale, gate.score) == (0.0, False, 2.5, "softmax")
    assert "jitter" in gate_options(ModelConfig(moe=MoEConfig(gate="switch"))) and "jitter" not in gate_options(model)


def test_a_recipe_that_cannot_be_read(tmp_path):
    for name, content, parts in (
        ("syntax", b"[model\nnum_layers = 1", ["cannot be read", "line 1"]),
        ("latin", b'[run]\nfolder = "\xe9"', ["cannot be read"]),
        ("digits", b"[train]\nsteps = " + b"9" * 5000, ["cannot be read"]),
        ("brackets", b"a = " + b"[" * 5000, ["cannot be read"]),
        ("table", b"model = 3", ["model=3", "section"]),
        ("typo", b"[modell]\nnum_layers = 3", ["unknown key modell", "did you mean model"]),
        ("no section", b"top_k = 3", ["unknown key top_k", "did you mean moe.top_k?"]),
        ("no such key", b"[model]\nxyzzy = 3", ["unknown key model.xyzzy", "the sections are run, model, attention"]),
    ):
        path = tmp_path / f"{name}.toml"
        path.write_bytes(content)
        with pytest.raises(UserError) as error:
            load_recipe(str(path))
        assert all(part in str(error.value) for part in parts), str(error.value)
    with pytest.raises(UserError, match=r"recipe 'quickstrat' is neither a file nor .*quickstart"):
        load_recipe("quickstrat")
    with pytest.raises(UserError, match=r"did you mean 'quickstart'"):
        load_recipe("quickstrat")


def test_a_misspelled_file_is_answered_with_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("tiny.toml", "sub/large.toml"):
        (tmp_path / name).touch()
    for name, near in (("tinyy.toml", "tiny.toml"), ("tiny", "tiny.toml"), ("sub/larg.toml", "sub/large.toml")):
        with pytest.raises(UserError) as error:
            load_recipe(name)
        assert f"did you mean '{near}'?" in str(error.value) and "mixtral" not in str(error.value)


@pytest.mark.parametrize("name", ["parallel.device", "model.backend", "run.gpus"])
def test_keys_of_other_programs_get_a_word_on_devices(name, tmp_path):
    section, key = name.split(".")
    (tmp_path / "a.toml").write_text(f'[{section}]\n{key} = "cpu"')
    for call in (
        lambda: load_recipe(str(tmp_path / "a.toml")),
        lambda: load_recipe("quickstart", [f"--{name}", "cpu"]),
        lambda: parse(["quickstart", f"--{key}", "cpu"], "fmoe train"),
    ):
        with pytest.raises(UserError, match=rf"{key}; .*CUDA_VISIBLE_DEVICES"):
            call()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--train.steps", "many"], ["train.steps='many'", "integer"]),
        (["--moe.top-k=1.5"], ["moe.top_k='1.5'", "integer"]),
        (["--tracking.wandb=maybe"], ["tracking.wandb='maybe'", "true or false"]),
        (["--moe.gate-options.bias", "inf"], ["moe.gate_options.bias=inf", "finite"]),
        (["--moe.normalize=maybe"], ["moe.normalize='maybe'", "true or false or none"]),
        (["--tracking.no-wandb=true"], ["--tracking.no-wandb=true", "no value"]),
        (["--train.no-steps"], ["--train.no-steps", "train.steps is not a bool"]),
        (["--train.steps", "--train.seed", "3"], ["--train.steps needs a value"]),
        (["--train.stepps", "3"], ["unknown key train.stepps", "train.steps", "train.seed"]),
        (["more"], ["'more'", "--section.key value"]),
        (["--model.num-experts", "4"], ["model.num_experts is now moe.num_experts"]),
        (["--model.no-qk-norm"], ["model.qk_norm is now attention.qk_norm"]),
    ],
)
def test_invalid_options_are_named(options, parts):
    with pytest.raises(UserError) as error:
        load_recipe("quickstart", options)
    assert all(part in str(error.value) for part in parts), str(error.value)
