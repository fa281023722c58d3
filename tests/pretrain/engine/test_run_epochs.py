"""Epochs of a run, and warnings about data that are probably a mistake."""

import shutil

import pytest
from runs import train

from pretrain.config import load_recipe
from pretrain.data.indexed import IndexedCorpus, corpus_paths
from pretrain.data.inputs import open_inputs
from pretrain.tracking import read_metrics
from pretrain.tracking.events import read_events

LENGTH = 16
BATCH = 4


def warnings_of(folder):
    return [event["text"] for event in read_events(folder / "events.jsonl") if event["kind"] == "warning"]


def test_epochs_are_in_metrics_and_on_the_console(forks, recipe_file, tiny_corpus, tmp_path):
    out = train(forks, recipe_file(), "--run.folder", tmp_path)
    per_epoch = (IndexedCorpus(tiny_corpus.train).num_tokens - 1) // LENGTH
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row.get("epochs") for row in rows] == [None, *(step * BATCH / per_epoch for step in range(1, 5))]
    assert not any("epochs/source_1" in row for row in rows)
    assert f"epochs {4 * BATCH / per_epoch:.3g}" in out
    assert warnings_of(tmp_path) == []


def test_a_blend_tells_the_epochs_of_each_source_and_what_is_doubtful(forks, recipe_file, tiny_corpus, tmp_path):
    copied = tmp_path / "copied"
    for path in corpus_paths(tiny_corpus.train):
        shutil.copy2(path, tmp_path / f"copied{path.suffix}")
    recipe = recipe_file(
        data={"train": (str(tiny_corpus.train), str(tiny_corpus.validation), str(copied)), "weights": (3, 1, 1)},
        train={"steps": 4, "global_batch": 16 * BATCH, "micro_batch": 8 * BATCH, "validation_sequences": 1 << 12},
    )
    ends = forks.command("pretrain", recipe, "--run.folder", tmp_path / "run", "--parallel.data", "2", size=2)
    assert [end.code for end in ends] == [0, 0], ends
    said = warnings_of(tmp_path / "run")
    sequences = (IndexedCorpus(tiny_corpus.validation).num_tokens - 1) // LENGTH
    assert len(said) == 3
    assert said[0] == f"data.train: {copied} and {tiny_corpus.train} hold the same tokens"
    assert (
        f"data.validation: {tiny_corpus.validation} holds the tokens of data.train={tiny_corpus.validation}" in said[1]
    )
    assert f"train.validation_sequences=4096 exceeds the {sequences} sequences" in said[2]
    for line in said:
        assert "".join(end.err for end in ends).count(line) == 1
    row = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    for number, (prefix, share) in enumerate([(tiny_corpus.train, 3), (tiny_corpus.validation, 1), (copied, 1)], 1):
        per_epoch = (IndexedCorpus(prefix).num_tokens - 1) // LENGTH
        assert row[f"epochs/source_{number}"] == pytest.approx(4 * 16 * BATCH * share / 5 / per_epoch)


@pytest.mark.parametrize(("kind", "length"), [("gpt", 16), ("bert", 14), ("t5", None)], ids=["gpt", "bert", "t5"])
def test_epochs_of_a_source_are_those_of_its_samples(kind, length, recipe_file, tiny_corpus):
    both = (str(tiny_corpus.train), str(tiny_corpus.validation))
    recipe = load_recipe(str(recipe_file(model={"kind": kind}, data={"train": both, "weights": (0.5, 0.5)})), [])
    inputs = open_inputs(recipe)
    length = length or recipe.spans.block
    per_epoch = [(IndexedCorpus(prefix).num_tokens - 1) // length for prefix in both]
    assert inputs.epochs_per_sample == pytest.approx([0.5 / each for each in per_epoch])
    assert inputs.train.samples_per_epoch == sum(per_epoch)


def test_the_same_file_by_another_path(recipe_file, tiny_corpus, tmp_path):
    """Without a checksum, as Megatron's tools write corpora."""
    paths = [path for path in corpus_paths(tiny_corpus.train) if path.suffix != ".json"]
    for path in paths:
        shutil.copy(path, tmp_path / f"first{path.suffix}")
        (tmp_path / f"second{path.suffix}").symlink_to(tmp_path / f"first{path.suffix}")
    data = {"train": (str(tmp_path / "first"),), "validation": (str(tmp_path / "second"),)}
    inputs = open_inputs(load_recipe(str(recipe_file(data=data)), []))
    assert len(inputs.warnings) == 1
    assert f"{tmp_path}/second holds the tokens of data.train={tmp_path}/first" in inputs.warnings[0]
