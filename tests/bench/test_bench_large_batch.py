"""The study of large batches: which runs it asks for, what it makes of them, and a small slice of it for real."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.studies import large_batch, sweep
from bench.studies.large_batch import CONTENDERS, Figure, Size, Study
from fmoe.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("losses", "best", "is_inside"),
    [
        ({1.0: 3.0, 2.0: 2.5, 4.0: 2.7}, 2.0, True),
        ({1.0: 2.4, 2.0: 2.5, 4.0: 2.7}, 1.0, False),
        ({1.0: 3.0, 2.0: 2.5}, 2.0, False),
        ({1.0: 3.0, 2.0: 2.5, 4.0: None}, 2.0, True),
        ({1.0: 2.5, 2.0: 2.5, 4.0: float("nan")}, 1.0, False),
        ({1.0: None, 2.0: None}, None, False),
        ({}, None, False),
    ],
    ids=["inside", "low end", "high end", "diverged neighbour", "equal losses", "all diverged", "none"],
)
def test_the_best_rate(losses, best, is_inside):
    assert sweep.best(losses) == best
    assert sweep.is_inside(losses) is is_inside


@pytest.mark.parametrize(
    ("losses", "missing"),
    [
        ({}, [1.0, 2.0, 4.0]),
        ({2.0: 2.5}, [1.0, 4.0]),
        ({1.0: 3.0, 2.0: 2.5, 4.0: 2.7}, []),
        ({1.0: 2.4, 2.0: 2.5, 4.0: 2.7}, [0.5]),
        ({1.0: 3.0, 2.0: 2.5, 4.0: 2.4}, [8.0]),
        ({1.0: None, 2.0: None, 4.0: None}, [0.5]),
        ({0.5: 2.3, 1.0: 2.4, 2.0: 2.5, 4.0: 2.7}, [0.25]),
        ({0.25: 2.2, 0.5: 2.3, 1.0: 2.4, 2.0: 2.5, 4.0: 2.7}, []),
    ],
    ids=["nothing", "one", "inside", "low end", "high end", "all diverged", "further", "enough"],
)
def test_the_rates_to_run_next(losses, missing):
    assert sweep.missing((1.0, 2.0, 4.0), losses, most=2) == missing


def test_means_and_gaps():
    mean, spread = sweep.mean_and_spread([2.0, 3.0, 4.0])
    assert (mean, spread) == (3.0, 1.0)
    assert sweep.mean_and_spread([2.5]) == (2.5, 0.0)
    assert sweep.mean_and_spread([2.0, None]) is None
    assert sweep.mean_and_spread([]) is None
    # Seeds 1 and 2 are in both: 0.5 and 0.25.
    assert sweep.gap({1: 3.0, 2: 3.0, 3: 9.0}, {1: 2.5, 2: 2.75}) == pytest.approx((0.375, 0.125 * 2**0.5))
    assert sweep.gap({1: 3.0}, {2: 2.5}) is None
    assert sweep.gap({1: None}, {1: 2.5}) is None


def loss_of(contender, rate, seed):
    """Lowest at 16 times LAMB's first rate, at the middle one of others; the small batch at 2, others above."""
    best = contender.rates[0] * 16 if contender.name == "lamb" else contender.rates[1]
    steps_away = abs(large_batch.math.log2(rate / best))
    return 2.0 + 0.1 * steps_away + 0.01 * seed + (0 if contender.name == large_batch.SMALL else 0.25)


@pytest.fixture
def study(tmp_path):
    """A whole study whose runs are `loss_of`."""
    study = Study(tmp_path, Size(beyond=4), threads=1)
    for contender, rate, seed in study._missing():
        study.figures.append(Figure(contender.name, rate, seed, loss_of(contender, rate, seed), 60.0))
    return study


def test_every_contender_is_swept_and_has_all_seeds(study):
    rates = {contender.name: contender.rates for contender in CONTENDERS}
    assert {len(of_one) for of_one in rates.values()} == {3}, "as many for each"
    assert rates["adamw"] == rates["adamw-linear"] == rates["adamw-sqrt"], "of the base batch, the same for each rule"
    for contender in CONTENDERS:
        first = contender.rates[0]
        beyond = [first * 2**n for n in (3, 4, 5)] if contender.name == "lamb" else []
        assert list(study.sweep_of(contender)) == [*contender.rates, *beyond]
        assert list(study.of_seeds(contender)) == [1, 2, 3]
    assert len(study.figures) == len(CONTENDERS) * (3 + 2) + 3


def test_tables_of_a_study(study):
    lines = large_batch.tables(study).splitlines()

    swept = lines[-len(CONTENDERS) :]
    base = next(line for line in lines if line.startswith("| AdamW, base batch"))
    assert [cell.strip() for cell in base.split("|")[2:-1]] == [
        "6,400", "0.004", "2.020 ± 0.010", "", "2.010, 2.020, 2.030", "60 s"
    ]  # fmt: skip
    lamb = next(line for line in lines if line.startswith("| LAMB"))
    assert [cell.strip() for cell in lamb.split("|")[2:6]] == ["200", "0.16", "2.270 ± 0.010", "+0.250 ± 0.000"]
    assert "**0.16: 2.260**, 0.32: 2.360" in swept[-1] and swept[-1].startswith("| LAMB")


@pytest.mark.parametrize(("most", "is_met"), [(0.26, True), (0.24, False)])
def test_the_gap_is_checked(study, most, is_met):
    text, found = large_batch.verdicts(study, ["lamb", "adamw-linear"], most)
    assert found is is_met
    assert text.count("+0.250 ± 0.000") == 2
    assert text.count("missed") == 2 * (not is_met)


@pytest.mark.parametrize("options", ["--gap nan", "--threads 0"])
def test_wrong_values_are_named(tmp_path, options):
    with pytest.raises(UserError, match=options.replace(" ", "=")):
        large_batch.main([*options.split(), "--report", "--out", str(tmp_path)])


def test_a_gap_without_all_seeds_is_missed(study):
    study.figures = [f for f in study.figures if (f.contender, f.seed) != ("lamb", 3)]
    text, is_met = large_batch.verdicts(study, ["lamb", "lars"], 9.0)
    assert not is_met
    assert [line.split(": ")[1] for line in text.splitlines()] == ["seeds are missing, missed", "+0.250 ± 0.000, met"]


def test_a_table_says_what_diverged_and_what_lies_at_an_end(tmp_path):
    study = Study(tmp_path, Size(rates=2, beyond=0, seeds=(1,)), threads=1)
    for contender, rate, seed in study._missing():
        loss = None if contender.name == "lars" else rate if contender.name == "lamb" else 2.0
        study.figures.append(Figure(contender.name, rate, seed, loss, 60.0))
    text = large_batch.tables(study)
    assert "0.01 (end of the sweep)" in text
    assert "| LARS" in text and "4: diverged, 8: diverged" in text


@pytest.mark.slow  # a run of each contender
def test_a_small_slice_for_real(tmp_path, capsys):
    """Runs of `fmoe train`; called again, it makes the run that is missing, with the same loss."""
    command = [sys.executable, "-m", "bench", "large_batch", "--quick", "--out", str(tmp_path)]

    def run():
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)

    shown = ["--quick", "--report", "--out", str(tmp_path)]
    with pytest.raises(UserError, match="no run has finished"):
        large_batch.main(shown)
    first = run()
    assert first.returncode == 0, first.stderr
    runs = 2 * len(large_batch.CONTENDERS)
    assert first.stdout.count("validation loss") == runs + 1, "two seeds of each contender, and the table"
    figures = sorted((tmp_path / "large_batch" / "figures").glob("*.json"))
    assert len(figures) == runs
    lost = next(path for path in figures if path.name.startswith("lamb_") and path.stem.endswith("_2"))
    before = json.loads(lost.read_text())["figure"]
    lost.unlink()
    second = run()
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("validation loss") == 1 + 1
    after = json.loads(lost.read_text())["figure"]
    assert after | {"cpu_seconds": 0} == before | {"cpu_seconds": 0}
    table = (tmp_path / "large_batch.md").read_text()
    large_batch.main(shown)
    assert capsys.readouterr().out == table + "\n"

    values = json.loads(lost.read_text())
    values["recipe"]["optimizer"]["beta2"] = 0.5
    lost.write_text(json.dumps(values))
    with pytest.raises(UserError, match="another recipe or size of study"):
        large_batch.main(shown)


def test_the_size_of_a_study_is_what_the_figures_are_of(tmp_path):
    study = Study(tmp_path, Size(), threads=1)
    contender = CONTENDERS[0]
    folder = tmp_path / "figures"
    folder.mkdir()
    recipe = large_batch._comparable(study._recipe(contender, 0.01, 1))
    figure = {"contender": contender.name, "rate": 0.01, "seed": 1, "loss": 3.0, "cpu_seconds": 1.0}
    (folder / "lamb_0.01_1.json").write_text(json.dumps({"figure": figure, "recipe": recipe}))
    study.read()
    assert study.figures == [Figure(**figure)]
    with pytest.raises(UserError, match="another recipe or size"):
        Study(tmp_path, large_batch.QUICK, threads=1).read()


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_all_contenders_see_the_same_tokens(tmp_path, contender):
    recipe = Study(tmp_path, Size(), threads=1)._recipe(contender, 4e-3, 1)
    assert recipe.train.steps * recipe.train.global_batch == 6400 * 4
    assert recipe.warmup_steps * recipe.train.global_batch == 640 * 4
    factor = {"adamw-linear": 32, "adamw-sqrt": 32**0.5}.get(contender.name, 1)
    assert recipe.max_lr == pytest.approx(4e-3 * factor)
    assert recipe.min_lr == 0
