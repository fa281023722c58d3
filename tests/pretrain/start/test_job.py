"""Command lines: which job they mean, which are refused, and the job's file."""

from dataclasses import replace

import pytest

from fmoe.errors import UserError
from pretrain.config import Recipe, RunConfig
from pretrain.start.job import Job, load, parse

STEPS = {"train.steps": 50, "tracking.wandb": True}
ARGUMENTS = {
    "options first": (["--train.steps", "50", "--tracking.wandb", "quickstart"], None, STEPS),
    "between": (["--resume", "auto", "quickstart", "--train.steps=50", "--tracking.wandb", "true"], "auto", STEPS),
    "a flag in front": (["--tracking.wandb", "--resume", "auto", "--train.steps", "50", "quickstart"], "auto", STEPS),
    "a list in front of an option": (
        ["--moe.layers", "1", "2", "--resume=auto", "quickstart"],
        "auto",
        {"moe.layers": (1, 2)},
    ),
    "resume in front of the recipe's name": (["--run.folder", ".", "--resume", "quickstart"], "run", {}),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_options_stand_before_and_behind_the_recipes_name(case):
    argv, resume, expected = ARGUMENTS[case]
    job = parse(argv, "fmoe train")
    assert (job.name, job.resume, job.processes_per_node) == ("quickstart", resume, 2)
    for key, value in expected.items():
        assert job.recipe.value(key) == value


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["quickstart", "--resum", "auto"], "unknown option --resum; did you mean --resume?"),
        (["quickstart", "--steps=4"], "unknown option --steps; did you mean --train.steps?"),
        (["quickstart", "--zzzz"], "unknown option --zzzz; fmoe train RECIPE --help lists all"),
        (["quickstart", "t5"], "got 2 recipes, 'quickstart' and 't5': pass one"),
        (["--data.train", "a", "quickstart"], "put RECIPE before --data.train, which takes all words"),
        (["--resume", "a" * 300], "no recipe"),
        (["quickstart", "--resume", "--run.folder", "no/where"], "run.folder=no/where does not exist"),
        (["quickstart", "--fallback"], "--fallback needs --resume"),
        (["quickstart", "--json"], "--json needs --dry-run"),
        (["quickstart", "--nodes", "2"], "--nodes=2 needs --node-rank"),
        (["quickstart", "--nodes", "2", "--node-rank", "0"], "--nodes=2 needs --rendezvous"),
        (
            ["quickstart", "--nodes", "2", "--node-rank", "2", "--rendezvous", "a:1"],
            "--node-rank=2 must be less than --nodes=2",
        ),
        (["quickstart", "--nodes", "0"], "--nodes: 0 must be an integer of at least 1"),
        (["quickstart", "--nodes"], "--nodes: expected one argument"),
        (["quickstart", "--rendezvous", "host"], "--rendezvous: host must be HOST:PORT"),
        (["quickstart", "--node-rank", "1"], "--node-rank=1 needs --nodes of at least 2"),
        (
            ["quickstart", "--processes-per-node", "3"],
            "--processes-per-node=3 is 3 processes, but the recipe needs 2 (parallel.expert=2",
        ),
        (["quickstart", "--max-restarts", "1"], "--max-restarts=1 needs --resume auto"),
    ],
)
def test_wrong_arguments_name_what_was_meant(argv, says):
    with pytest.raises(UserError) as error:
        parse(argv, "fmoe train")
    assert says in str(error.value) and "\n" not in str(error.value)


def test_help_of_a_recipe_lists_every_key_with_its_value(capsys):
    with pytest.raises(SystemExit) as end:
        parse(["--train.steps", "77", "quickstart", "--help"], "fmoe train")
    text = capsys.readouterr().out
    assert not end.value.code and "(default: 77)" in text
    for section, values in Recipe().values().items():
        for key in values:
            assert f"--{section}.{key.replace('_', '-')} " in text


def test_ranks_read_the_job_that_the_launcher_wrote(tmp_path):
    recipe = replace(Recipe(), run=RunConfig(folder='a "b"', imports=("c.py",), callback_options={"c": {"d": [1.5]}}))
    job = Job("quickstart", recipe, ("quickstart", "--resume"), resume="auto", nodes=2, refusal="it is in use")
    job.save(tmp_path / "job.json")
    assert load(tmp_path / "job.json") == job
