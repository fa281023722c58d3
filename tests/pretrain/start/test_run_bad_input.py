"""Invalid input ends with one line that names value, limit and key, with exit code 2, and writes nothing."""

import shutil
import sys
from dataclasses import dataclass
from importlib.abc import MetaPathFinder

import pytest

from pretrain.data.indexed import IndexedWriter, corpus_paths


def tree(folder):
    """Every file below a folder with its content, and whether it holds a run."""
    files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return files | {"run": (folder / "run").exists()}


@pytest.fixture
def refused(forks, tmp_path):
    """``refused(PROGRAM, *argv, says=[...])`` asserts all of the above for ``python -m PROGRAM``; gives the line."""

    def check(program, *argv, says, size=1, before=None, environment=None):
        name = f"fmoe {argv[0]}" if program == "fmoe" else program
        files = tree(tmp_path)
        ends = forks.command(program, *argv, size=size, before=before, environment=environment, folder=tmp_path)
        line = "".join(end.err for end in ends)
        assert [end.code for end in ends] == [2] * size, line
        assert line.startswith(f"{name}: error: "), line
        assert line.count("\n") == 1 and line.endswith("\n"), f"not one line: {line}"
        missing = [part for part in says if str(part) not in line]
        assert not missing, f"{missing} not in: {line}"
        assert tree(tmp_path) == files, "something was written"
        # Before the imports that take long, a run prints its recipe, processes and folder.
        lines = "".join(end.out for end in ends).splitlines()
        assert len(lines) <= 1 and all(", run folder " in line for line in lines), ends

    return check


def text_with(recipe, old, new):
    text = recipe.read_text()
    assert old in text
    recipe.write_text(text.replace(old, new))


# In the recipe's text, or on the command line.
RECIPES = {
    "unknown key": ("num_experts = 4", "num_exprts = 4", [], ["moe.num_exprts", "did you mean moe.num_experts?"]),
    "vocabulary": ("", "", ["--model.vocab-size", "383"], ["384", "data.tokenizer=", "model.vocab_size=383"]),
    "no tokenizer": ("", "", ["--data.tokenizer", "none.model"], ["data.tokenizer", "none.model"]),
    "another file": ("", "", ["--data.tokenizer", "recipe.toml"], ["recipe.toml is not a sentencepiece model"]),
    "too few sentinels": ("", "", ["--model.kind", "t5", "--model.sequence-length", "512"], ["need a sentinel each"]),
    "no corpus": ("", "", ["--data.train", "nowhere"], ["data.train", "nowhere"]),
    "short corpus": ("", "", ["--model.sequence-length", "99999"], ["data.train", "model.sequence_length", "100000"]),
    "no checkpoint": ("", "", ["--resume", "."], [". is not a checkpoint"]),
    "no run to resume": ("", "", ["--resume"], ["run.folder=", "run does not exist"]),
    "unknown gate": ("", "", ["--moe.gate", "swich"], ["moe.gate='swich'", "switch"]),
    "unknown option of an exchange": (
        "",
        "",
        ["--parallel.exchange", "all_gather", "--parallel.chunks", "2"],
        ["parallel.chunks=2", "parallel.exchange=all_gather", "use it with all_to_all"],
    ),
    "resume from nowhere": ("", "", ["--resume", "nowhere"], ["nowhere is not a checkpoint"]),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("program", ["pretrain", "fmoe train of two"])
@pytest.mark.parametrize("case", RECIPES)
def test_a_wrong_recipe(refused, recipe_file, case, program):
    old, new, argv, says = RECIPES[case]
    recipe = recipe_file(run={"folder": "run"}, parallel={"expert": 2} if program.endswith("two") else {})
    text_with(recipe, old, new)
    refused(*(["fmoe", "train"] if program != "pretrain" else ["pretrain"]), recipe, *argv, says=says)


@pytest.mark.parametrize("case", ["vocabulary", "unknown gate"])
def test_a_wrong_recipe_of_two_processes_is_told_once(refused, recipe_file, case):
    old, new, argv, says = RECIPES[case]
    recipe = recipe_file(run={"folder": "run"}, parallel={"expert": 2})
    text_with(recipe, old, new)
    refused("pretrain", recipe, *argv, says=says, size=2)


def test_no_recipe(refused):
    refused("pretrain", says=["no recipe", "python -m pretrain RECIPE"])
    refused("fmoe", "train", says=["no recipe", "fmoe train RECIPE"])


@pytest.mark.parametrize("size", [1, 2])
def test_world_size(refused, recipe_file, size):
    recipe = recipe_file(run={"folder": "run"}, train={"global_batch": 16, "validation_sequences": 16})
    says = [f"world size {size} is not 4", "parallel.expert=2 x parallel.data=2", "start 4 ranks"]
    refused("pretrain", recipe, "--parallel.expert", "2", "--parallel.data", "2", says=says, size=size)


def test_an_empty_corpus(refused, recipe_file, tmp_path):
    with IndexedWriter(tmp_path / "empty", "u2"):
        pass
    recipe = recipe_file(run={"folder": "run"})
    for key in ("train", "validation"):
        refused("pretrain", recipe, f"--data.{key}", "empty", says=[f"data.{key}", "empty", " 0 ", " 17 "])


def test_an_index_that_does_not_fit(refused, recipe_file, tiny_corpus, tmp_path):
    for path in corpus_paths(tiny_corpus.train):
        shutil.copy(path, tmp_path / path.name)
    cut = tmp_path / "train.bin"
    size = cut.stat().st_size
    with cut.open("r+b") as file:
        file.truncate(size - 2)
    recipe = recipe_file(run={"folder": "run"})
    for program in (["pretrain"], ["fmoe", "train"]):
        refused(
            *program, recipe, "--data.train", "train", says=["data.train", "train.bin", size - 2, size, "train.idx"]
        )
    (tmp_path / "train.bin").unlink()
    refused("pretrain", recipe, "--data.train", "train", says=["data.train", "train.bin does not exist"])


def test_a_corpus_of_another_tokenizer(refused, recipe_file, tiny_corpus, tmp_path):
    from pretrain.data.tokenizers import train_tokenizer

    train_tokenizer([tiny_corpus.train.with_suffix(".jsonl")], tmp_path / "other.model", 370, sentinels=0)
    recipe = recipe_file(run={"folder": "run"})
    refused("pretrain", recipe, "--data.tokenizer", "other.model", says=[tiny_corpus.train, "other.model"])


@dataclass(frozen=True)
class Without(MetaPathFinder):
    """Makes a package look as if it were not installed, to those who import it from now on."""

    package: str

    def __call__(self):
        for name in list(sys.modules):
            if name.split(".")[0] in (self.package, "pretrain", "megatron_patch", "bench"):
                del sys.modules[name]
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


EXTRA = {"tensorboard": "tensorboard", "trackio": "trackio"}


@pytest.mark.cover(1)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("package", ["megatron", "wandb", "trackio"])
def test_training_without_a_package_names_the_extra(refused, recipe_file, package, size):
    recipe = recipe_file(
        run={"folder": "run"},
        tracking={"wandb": True, "tensorboard": True, "trackio": True},
        parallel={"expert": size},
    )
    says = [f" {package}", f"pip install 'fmoe[{EXTRA.get(package, 'pretrain')}]'"]
    refused("pretrain", recipe, says=says, before=Without(package), size=size, environment={"WANDB_MODE": "offline"})


@pytest.mark.by_default("numpy-data show")
@pytest.mark.parametrize(
    ("package", "argv"),
    [
        ("megatron", ["train", "quickstart"]),
        ("sentencepiece", ["data", "prepare", "a.txt", "--tokenizer", "b.model", "--out", "c"]),
        ("numpy", ["data", "show", "a"]),
        ("safetensors", ["checkpoint", "ls", "a"]),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x[:2]),
)
def test_fmoe_without_a_package_names_the_extra(refused, package, argv):
    refused("fmoe", *argv, says=[f" {package}", "pip install 'fmoe[pretrain]'"], before=Without(package))


@pytest.fixture
def finished(forks, recipe_file, tmp_path):
    """A recipe that was run to its end, in the folder "run"."""
    recipe = recipe_file(run={"folder": "run"}, train={"steps": 3}, checkpoint={"every": 2})
    (end,) = forks.command("pretrain", recipe, folder=tmp_path)
    assert end.code == 0, end.err
    return recipe


def test_a_run_is_neither_overwritten_nor_changed(refused, finished, tmp_path):
    two = ["--parallel.expert", "2"]
    refused("pretrain", finished, says=["run.folder=run", "--resume"])
    refused("pretrain", finished, *two, says=["run.folder=run", "--resume"], size=2)
    refused("fmoe", "train", finished, *two, says=["run.folder=run", "--resume"])
    argv = ["--resume", "--model.num-layers", "3"]
    for program in (["pretrain"], ["fmoe", "train"]):
        refused(*program, finished, *argv, says=["model.num_layers=3", "2", "step-00000003"])
