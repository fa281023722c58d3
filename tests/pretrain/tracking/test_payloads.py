"""A pickle in the place of every file that a run reads: nothing of it runs, and what is wrong is one line."""

import shutil

import pytest

from fmoe.errors import UserError
from pretrain.checkpoint import open_checkpoint
from pretrain.data.indexed import IndexedCorpus, corpus_paths
from pretrain.data.tokenizers import load_tokenizer
from pretrain.start.resume import agree_on_intact
from pretrain.tracking import read_metrics


def payload(sentinel):
    """Makes the folder ``sentinel`` when it is unpickled."""
    return b"cos\nmkdir\n(V" + str(sentinel).encode() + b"\ntR."


@pytest.fixture(scope="module")
def finished(forks, write_tiny_recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    recipe = write_tiny_recipe(folder / "recipe.toml", checkpoint={"every": 2})
    (end,) = forks.command("pretrain", recipe, "--run.folder", folder / "run")
    assert end.code == 0, end
    return recipe, folder / "run"


def test_in_every_file_of_a_checkpoint(finished, tmp_path):
    _, run = finished
    names = sorted(path.name for path in open_checkpoint(run).path.iterdir())
    assert len(names) == 4
    for name in names:
        for keeps_size in (False, True):
            folder = shutil.copytree(run, tmp_path / f"{name}{keeps_size}")
            path = open_checkpoint(folder).path / name
            data = payload(tmp_path / "ran")
            path.write_bytes(data.ljust(path.stat().st_size, b"\0") if keeps_size else data)
            with pytest.raises(UserError, match=name.replace(".", r"\.")):
                agree_on_intact(folder, "run")
            with pytest.raises(UserError, match=name.replace(".", r"\.")):
                checkpoint = open_checkpoint(folder)
                checkpoint.rank_state(0)
                for tensor in checkpoint.names():
                    checkpoint.read(tensor)
    assert not (tmp_path / "ran").exists()


def test_in_every_other_file_of_a_run(forks, finished, tmp_path):
    recipe, run = finished
    for name in sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file()):
        if "checkpoints" in name.parts:
            continue
        folder = shutil.copytree(run, tmp_path / str(name))
        (folder / name).write_bytes(payload(tmp_path / "ran"))
        (end,) = forks.command("pretrain", recipe, "--run.folder", folder, "--resume", "--train.steps", "5")
        assert end.code in (0, 2), end
    with pytest.raises(UserError):
        read_metrics(write(tmp_path / "record.jsonl", payload(tmp_path / "ran") + b"\n"))
    (end,) = forks.command("pretrain", write(tmp_path / "other.toml", payload(tmp_path / "ran")))
    assert end.code == 2 and "other.toml" in end.err
    assert not (tmp_path / "ran").exists()


def test_in_every_file_of_a_corpus(tiny_corpus, tmp_path):
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        for path in corpus_paths(tiny_corpus.train):
            shutil.copy(path, folder / path.name)
        write(corpus_paths(folder / "train")[number], payload(tmp_path / "ran"))
        with pytest.raises(UserError):
            IndexedCorpus(folder / "train")
    with pytest.raises(UserError):
        load_tokenizer(write(tmp_path / "tokenizer.model", payload(tmp_path / "ran")))
    assert not (tmp_path / "ran").exists()


def write(path, data):
    path.write_bytes(data)
    return path
