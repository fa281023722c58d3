"""`fmoe compare` on runs written by hand, with numbers worked out by hand."""

import json
import math
import sys
from dataclasses import replace

import pytest
from runs import with_sections

from fmoe.cli import run
from fmoe.errors import UserError
from pretrain.compare.cli import main
from pretrain.compare.groups import Point, group_runs, reach
from pretrain.compare.runs import check_comparable, read_run
from pretrain.config import AttentionConfig, ModelConfig, Recipe, TrainConfig, write_recipe
from pretrain.tracking import JsonlTracker

# 4 steps of 2 sequences of 8 tokens; 16 tokens a step.
RECIPE = Recipe(
    model=ModelConfig(
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=16,
        sequence_length=8,
        vocab_size=32,
        attention=AttentionConfig(num_heads=1),
    ),
    train=TrainConfig(steps=40, global_batch=2, micro_batch=1, validation_every=10, validation_sequences=2),
)
DENSE = replace(RECIPE, model=RECIPE.model.with_values({"moe.num_experts": 0}))
DATA = {"tokenizer": "t", "train": ["a"], "validation": ["v"]}


@pytest.fixture
def make(tmp_path):
    """``make(name, {step: loss}, seed, recipe, section={"key": value})`` writes the folder of a run."""

    def write(name, losses, seed=1, recipe=RECIPE, data=DATA, **sections):
        folder = tmp_path / name
        folder.mkdir()
        recipe = with_sections(recipe, **sections)
        recipe = replace(recipe, run=replace(recipe.run, folder=str(folder)), train=replace(recipe.train, seed=seed))
        write_recipe(recipe, folder / "config.toml")
        log(folder, losses)
        told = {"params": 1000, "active_params": 500, "flops_per_token": 3000.0}
        (folder / "run.json").write_text(json.dumps(told | ({"data": data} if data else {})))
        return folder

    return write


def log(folder, losses, resume_step=None):
    tracker = JsonlTracker(folder / "metrics.jsonl", resume_step)
    for step, loss in losses.items():
        tracker.log(step, ({"loss": 1.0, "tokens": 16 * step} if step else {}) | {"val/loss": loss})
    tracker.close()


def compare(*folders, json=False):
    return run("fmoe compare", lambda: main([str(f) for f in folders] + ["--json"] * json))


def compared(capsys, *folders):
    assert compare(*folders, json=True) == 0
    return json.loads(capsys.readouterr().out)


def points(losses):
    return [Point(step, 16 * step, (loss,)) for step, loss in losses.items()]


CROSSINGS = {
    "between two validations": ({0: 8, 10: 6, 20: 4}, 5.5, (12.5, 200)),
    "a quarter of an uneven interval": ({0: 8, 10: 6, 40: 2}, 5, (17.5, 280)),
    "exactly at a validation": ({0: 8, 10: 6, 20: 4}, 6, (10, 160)),
    "at the last": ({0: 8, 10: 6, 20: 4}, 4, (20, 320)),
    "at the first": ({10: 6, 20: 4}, 7, (10, 160)),
    "the first of several": ({0: 8, 10: 4, 20: 6, 30: 4}, 5, (7.5, 120)),
    "a plateau at the loss": ({0: 8, 10: 6, 20: 6, 30: 5}, 6, (10, 160)),
    "never": ({0: 8, 10: 6, 20: 4}, 3.999, None),
    "NaN is no loss": ({0: 8, 10: math.nan, 20: math.nan}, 5, None),
    "after a NaN nothing is interpolated": ({0: 8, 10: math.nan, 20: 4}, 5, (20, 320)),
    "nor after an infinity": ({0: 8, 10: math.inf, 20: 4}, 5, (20, 320)),
    "a loss that is NaN": ({0: 8, 10: 6}, math.nan, None),
    "a loss that is infinite": ({0: 8, 10: 6}, math.inf, None),
}


@pytest.mark.parametrize("case", CROSSINGS)
def test_where_a_curve_reaches_a_loss(case):
    losses, loss, expected = CROSSINGS[case]
    found = reach(points(losses), loss)
    assert (found and (found.step, found.tokens)) == (expected and pytest.approx(expected))


def test_seeds_are_one_row(make, capsys):
    """Means 6, 5, 4.2 and 4 against 6, 4, 3.5 and 3; the moe reaches 4.0 at step 20, the dense never 3.0."""
    dense = [
        make("dense-seed1", {0: 8, 10: 5.9, 20: 4.9, 30: 4.1, 40: 3.8}, 1, DENSE),
        make("dense-seed2", {0: 8, 10: 6.1, 20: 5.1, 30: 4.3, 40: 4.2}, 2, DENSE),
    ]
    moe = [
        make("moe-seed1", {0: 8, 10: 6, 20: 4.5, 30: 3.5, 40: 2.9}, 1),
        make("moe-seed2", {0: 8, 10: 6, 20: 4.1, 30: 3.5, 40: 3.1}, 2),
        make("moe-seed3", {0: 8, 10: 6, 20: 4.0, 30: 3.5, 40: 3.0}, 3),
    ]
    found = compared(capsys, moe[2], dense[1], *moe[:2], dense[0])
    first, second = found["groups"]
    assert [(group["name"], group["seeds"]) for group in found["groups"]] == [("moe", [1, 2, 3]), ("dense", [1, 2])]
    assert second["loss"] == pytest.approx({"mean": 4.0, "std": 0.2 * math.sqrt(2), "min": 3.8, "max": 4.2})
    assert first["loss"] == pytest.approx({"mean": 3.0, "std": 0.1, "min": 2.9, "max": 3.1})
    assert [point["mean"] for point in second["curve"]] == pytest.approx([8, 6, 5, 4.2, 4])
    counts = {"params": 1000, "active_params": 500, "flops_per_token": 3000, "step": 40, "tokens": 640}
    assert second.items() >= (counts | {"flops": 640 * 3000, "recipe": {"moe.num_experts": 0}}).items()
    assert found["notes"] == []
    there, back = found["reaches"]
    # 4.2 at step 20, 3.5 at step 30: two sevenths of the way.
    assert (there["group"], there["of"], there["loss"]) == ("moe", "dense", pytest.approx(4))
    assert there["step"] == pytest.approx(20 + 20 / 7) and there["tokens"] == pytest.approx(16 * (20 + 20 / 7))
    assert there["steps_ratio"] == pytest.approx(4 / 7) == there["tokens_ratio"] == there["flops_ratio"]
    assert (back["group"], back["of"]) == ("dense", "moe")
    assert {back[key] for key in back if key not in ("group", "of", "loss")} == {None}

    assert compare(*dense, *moe) == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("| ")]
    assert " ".join(rows[1]) == "dense 2 40 640 1.00 k 500 3.00 k 1.92 M 4.0000 0.2828 3.8000-4.2000"
    assert rows[4:] == [["dense", "-", "not reached"], ["moe", "22.9 (366 tokens, x0.571)", "-"]]
    assert "moe: moe.num_experts=8" in out.splitlines()


def test_ratio_of_flops_is_not_that_of_steps(make, capsys):
    """Twice the work a token, half the steps."""
    small, large = make("small", {0: 8, 40: 4}, recipe=DENSE), make("large", {0: 8, 40: 0})
    told = json.loads((large / "run.json").read_text())
    (large / "run.json").write_text(json.dumps(told | {"flops_per_token": 6000.0}))
    _, row = compared(capsys, small, large)["reaches"]
    assert row["group"] == "large"
    assert (row["step"], row["tokens"], row["flops"]) == (20, 320, 320 * 6000)
    assert (row["steps_ratio"], row["tokens_ratio"], row["flops_ratio"]) == (0.5, 0.5, 1)


def test_one_seed_has_no_spread(make, capsys):
    folder = make("alone", {0: 8, 10: 6, 40: 4})
    (group,) = compared(capsys, folder)["groups"]
    assert group["loss"] == {"mean": 4.0, "std": None, "min": 4.0, "max": 4.0}
    assert compare(folder) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 3 and "| 4.0000   | -   | -" in out


def test_nan_at_the_end(make, capsys):
    bad = make("bad", {0: 8, 10: 3, 40: math.nan})
    good = make("good", {0: 8, 10: 6, 40: 4}, recipe=DENSE)
    found = compared(capsys, bad, good)
    assert found["groups"][0]["loss"] == {"mean": None, "std": None, "min": None, "max": None}
    assert found["reaches"][0]["step"] == pytest.approx(8)  # 8 to 3 over ten steps, 4 at the eighth
    assert found["reaches"][1]["step"] is None
    assert "the last validation loss of bad is not finite" in found["notes"]
    assert compare(bad, good) == 0
    assert "nan" in capsys.readouterr().out


def test_one_seed_that_is_nan_spoils_its_group(make, capsys):
    found = compared(capsys, make("a-1", {0: 8, 40: math.nan}, 1), make("a-2", {0: 8, 40: 4}, 2))
    assert found["groups"][0]["loss"] == {"mean": None, "std": None, "min": None, "max": None}


def test_a_record_that_goes_back(make):
    """Stopped after 30, gone on from 10, both records in one: what came after 10 counts as it came the second time."""
    folder = make("run", {0: 8, 10: 6, 20: 5, 30: 4.5})
    text = (folder / "metrics.jsonl").read_text()
    log(folder, {11: 5.9, 20: 5.5, 40: 4})
    (folder / "metrics.jsonl").write_text(text + (folder / "metrics.jsonl").read_text())
    found = read_run(folder)
    assert [(v.step, v.loss) for v in found.validations] == [(0, 8), (10, 6), (11, 5.9), (20, 5.5), (40, 4)]
    assert found.is_finished


def test_a_run_that_goes_on(make, capsys):
    """A torn line at the end, steps without validation after the last one, no run.json yet."""
    going = make("going", {0: 8, 10: 6})
    with (going / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "loss": 5.5, "tokens": 176}\n{"step": 12, "val/lo')
    (going / "run.json").unlink()
    done = make("done", {0: 8, 10: 5, 40: 4}, data=None, recipe=DENSE)
    found = compared(capsys, going, done)
    group = found["groups"][0]
    assert (group["step"], group["is_finished"], group["runs"][0]["step"]) == (10, False, 11)
    assert group["params"] == RECIPE.num_params() and group["flops_per_token"] == RECIPE.flops_per_token()
    assert found["notes"] == [f"{going} is not finished: step 11 of 40"]
    assert compare(going, done) == 0
    assert "| 10 of 40 |" in capsys.readouterr().out


def test_seeds_at_different_steps_are_compared_where_all_are(make, capsys):
    runs = [make("a1", {0: 8, 10: 6, 20: 5, 40: 4}, 1), make("a2", {0: 8, 10: 7, 20: 6}, 2)]
    (group,) = compared(capsys, *runs)["groups"]
    assert (group["step"], group["loss"]["mean"]) == (20, 5.5)


def test_groups(make):
    """Split, folder and tracking make no other recipe, a learning rate and a plugin do; a seed's second run is another
    group."""
    runs = [
        make("x-1", {0: 8}, 1),
        make("x-12", {0: 8}, 12, parallel={"expert": 2}, tracking={"wandb": False}, checkpoint={"every": 7}),
        make("y", {0: 8}, 1),
        make("z", {0: 8}, 12, optimizer={"lr": 1e-2}),
        make("plugin", {0: 8}, 13, run={"imports": ["my_callback.py"], "callbacks": ["mine"]}),
    ]
    groups = group_runs([read_run(folder) for folder in runs])
    assert [(group.name, len(group.runs)) for group in groups] == [("x", 2), ("y", 1), ("z", 1), ("plugin", 1)]


def test_names_that_say_nothing_are_paths(make, tmp_path):
    folders = ["a/seed1", "a/seed2", "a/x", "b/x"]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    runs = [read_run(make(folder, {0: 8}, seed)) for folder, seed in zip(folders, (1, 2, 1, 1), strict=True)]
    assert [group.name for group in group_runs(runs)] == [str(tmp_path / f) for f in ("a/seed1", "a/x", "b/x")]


def test_bad_input_is_one_line(make, tmp_path, capsys):
    good = make("good", {0: 8, 40: 4})
    empty, half = tmp_path / "empty", make("half", {0: 8})
    empty.mkdir()
    (half / "metrics.jsonl").unlink()
    damaged, odd, torn = (make(name, {0: 8}) for name in ("damaged", "odd", "torn"))
    (damaged / "metrics.jsonl").write_text("no json\n")
    (odd / "config.toml").write_text("[model]\nlayers = 3\n")
    (torn / "run.json").write_text("{")
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    for argv, said in [
        ([tmp_path / "none"], "none is not the folder of a run"),
        ([good / "config.toml"], "config.toml is not the folder of a run"),
        ([good, empty], "empty is not the folder of a run: it has no config.toml"),
        ([half], "half is not the folder of a run: it has no metrics.jsonl"),
        ([damaged], "damaged/metrics.jsonl, line 1: not a JSON object"),
        ([odd], "odd/config.toml: unknown key model.layers"),
        ([torn], "torn/run.json cannot be read"),
        ([make("new", {})], "new has no validation to compare: metrics.jsonl has none yet"),
        (
            [make("blind", {}, recipe=replace(RECIPE, data=replace(RECIPE.data, validation=())))],
            "blind has no validation to compare: its data.validation is empty",
        ),
        ([good, good.parent / "." / "good"], "good is given twice"),
        ([make("a1", {0: 8, 10: 6}, 1), make("a2", {30: 6, 40: 5}, 2)], "no validated step in common"),
        ([loop], "loop is not the folder of a run"),
        ([good, "--out", tmp_path / "curves.pdf"], "curves.pdf must end in .svg or .png"),
    ]:
        assert compare(*argv) == 2, said
        error = capsys.readouterr().err
        assert error.startswith("fmoe compare: error: ") and error.count("\n") == 1
        assert said in error


TOLD = {
    "NaN": '{"params": NaN}',
    "infinity": '{"flops_per_token": 1e999}',
    "a text": '{"active_params": "many"}',
    "nothing": '{"params": null}',
    "data of another kind": '{"data": [1]}',
    "a corpus of another kind": '{"data": {"train": [1]}}',
    "too deep": "[" * 100_000,
    "not UTF-8": b'{"params": "\xff"}',
}


@pytest.mark.parametrize("name", TOLD)
def test_what_no_run_writes_into_run_json_is_one_line(make, capsys, name):
    folder, content = make("run", {0: 8, 40: 4}), TOLD[name]
    (folder / "run.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert compare(folder) == 2
    error = capsys.readouterr().err
    assert f"{folder}/run.json" in error and error.count("\n") == 1


@pytest.mark.parametrize("loss", ['"text"', "NaN", "[1]", "{}", "true", "1e999"])
def test_a_loss_that_no_run_writes_is_no_traceback(make, capsys, loss):
    folder = make("run", {0: 8, 40: 4})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 40, "tokens": "many", "val/loss": {loss}}}\n')
    assert compare(folder) in (0, 2)
    assert compare(folder, json=True) in (0, 2)


OTHERS = {
    "another corpus": ({"data": {**DATA, "validation": ["w"]}}, "their validation texts differ"),
    "more corpora": (
        {"data": {**DATA, "validation": ["v", "w"]}, "recipe_data": {"validation": ("x", "y")}},
        "their validation texts differ",
    ),
    "another tokenizer": ({"data": {**DATA, "tokenizer": "u"}}, "their tokenizers differ"),
    "document masks": (
        {"recipe_data": {"document_mask": True}},
        "data.document_mask is false in the first and true in the second",
    ),
    "kinds": ({"model": {"kind": "bert"}}, "model.kind is gpt in the first and bert in the second"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_losses_that_mean_different_things(make, capsys, case):
    options, said = OTHERS[case]
    recipe = replace(RECIPE, model=RECIPE.model.with_values(options.get("model", {})))
    recipe = replace(recipe, data=replace(RECIPE.data, **options.get("recipe_data", {})))
    one, other = make("one", {0: 8, 40: 4}), make("other", {0: 8, 40: 4}, 2, recipe, options.get("data", DATA))
    assert compare(one, other) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fmoe compare: error: losses of {one} and {other} are not comparable: ")
    assert error.count("\n") == 1 and said in error


def test_the_same_data_in_another_place(make):
    """By content where both runs tell it, by path where one is too old to."""
    moved = replace(RECIPE, data=replace(RECIPE.data, validation=("elsewhere",), tokenizer="elsewhere.model"))
    old, new, elsewhere = make("old", {0: 8}, data=None), make("new", {0: 8}), make("moved", {0: 8}, recipe=moved)
    check_comparable([read_run(old), read_run(new)])
    check_comparable([read_run(new), read_run(elsewhere)])
    with pytest.raises(UserError, match="tokenizers differ"):
        check_comparable([read_run(old), read_run(elsewhere)])


def test_other_training_data_and_other_amounts(make, capsys):
    runs = make("a", {0: 8, 40: 4}), make("b", {0: 8, 40: 5}, data={**DATA, "train": ["b"]})
    assert compared(capsys, *runs)["notes"] == []
    more = replace(RECIPE, train=replace(RECIPE.train, validation_sequences=4))
    (note,) = compared(capsys, runs[0], make("c", {0: 8, 40: 5}, recipe=more))["notes"]
    assert note.startswith("validated on different amounts of the same text: 2 sequences of 8 tokens in ")


def test_a_warm_start_is_told(make, capsys):
    warm = make("warm", {0: 5, 40: 4}, train={"init_from": "runs/first"})
    (note,) = compared(capsys, warm)["notes"]
    assert note == f"{warm} started from the weights of runs/first, whose training is not counted"


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_figure(make, capsys, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    runs = [
        make("moe-1", {0: 8, 10: 6, 20: 5, 40: 4}, 1),
        make("moe-2", {0: 8, 10: 6.5, 20: 5.5, 40: math.nan}, 2),
        make("dense", {0: 8, 10: 7, 20: 6, 40: 5}, 1, DENSE),
    ]
    paths = [tmp_path / f"one.{suffix}", tmp_path / "new" / f"two.{suffix}"]
    for path in paths:
        assert compare(*runs, "--out", path) == 0
        assert str(path) in capsys.readouterr().err
    one, two = (path.read_bytes() for path in paths)
    assert one == two, "the same curves are other bytes"
    if suffix == "png":
        assert one.startswith(b"\x89PNG")
    else:
        assert b"<svg" in one and b"moe (2 seeds)" in one and b"validation loss" in one
        assert len(one) < 100_000
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("losses", [{0: 8}, {0: math.nan, 40: math.nan}, {40: 4}], ids=str)
def test_figure_of_next_to_nothing(make, tmp_path, losses):
    pytest.importorskip("matplotlib")
    assert compare(make("run", losses), "--out", tmp_path / "curves.svg") == 0


def _imported(folder):
    import pretrain.start.run  # noqa: F401

    main([folder])
    return [name for name in sys.modules if name.split(".")[0] == "matplotlib"]


def test_matplotlib_is_imported_for_a_figure_alone(make, forks):
    folder = make("run", {0: 8, 40: 4})
    (found,) = forks.run(1, _imported, str(folder))
    assert found == []


def test_without_matplotlib(make, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert compare(make("run", {0: 8}), "--out", tmp_path / "curves.svg") == 2
    error = capsys.readouterr().err
    assert "fmoe compare --out needs the package matplotlib" in error and "fmoe[pretrain]" in error
