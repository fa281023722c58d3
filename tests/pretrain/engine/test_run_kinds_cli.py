"""Commands that train a T5 and a BERT: resumed bit for bit, at another split, from a blend; what a kind cannot be."""

import json

import pytest
from runs import KillAtStep, steps, tensor_hash, train

from pretrain.checkpoint import open_checkpoint

MODELS = {
    "t5": {"kind": "t5", "sequence_length": 32, "num_decoder_layers": 1, "moe.every": 2, "dropout": 0.1},
    "bert": {"kind": "bert", "sequence_length": 32, "dropout": 0.1},
    "documents": {"sequence_length": 32, "position.encoding": "learned_absolute"},
}
DATA = {"documents": {"document_mask": True}}


@pytest.fixture
def kind_recipe(recipe_file):
    def write(kind, data=None, **sections):
        sections |= {"train": {"steps": 6}, "optimizer": {"decay_steps": 6}}
        return recipe_file(model=MODELS[kind], data=DATA.get(kind, {}) | (data or {}), **sections)

    return write


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_killed_and_resumed_at_two_splits(forks, kind_recipe, tmp_path, kind):
    """Bit for bit where the split is the same, within rounding in one process; checkpoints of both are alike."""
    recipe = kind_recipe(kind, checkpoint={"every": 2}, parallel={"expert": 2})
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    other = tmp_path / "other"
    train(forks, recipe, "--run.folder", whole, size=2)
    forks.command("pretrain", recipe, "--run.folder", killed, size=2, before=KillAtStep(5))
    train(forks, recipe, "--run.folder", killed, "--resume", size=2)
    assert steps(killed) == steps(whole)
    assert tensor_hash(killed) == tensor_hash(whole)
    train(forks, recipe, "--run.folder", other, "--parallel.expert", "1", "--train.steps", "3")
    train(forks, recipe, "--run.folder", other, "--resume", "--parallel.data", "2", "--parallel.expert", "1", size=2)
    for step, row in steps(whole).items():
        if "loss" in row and kind == "documents":  # dropout is drawn for a process's own tensors
            assert steps(other)[step]["loss"] == pytest.approx(row["loss"], rel=1e-5), step
    assert open_checkpoint(other).names() == open_checkpoint(whole).names()
    rows = steps(whole)
    assert rows[6]["val/loss"] < rows[0]["val/loss"]
    layers = {name.split("/")[1] for name in rows[6] if name.startswith("moe/layer_")}
    assert layers == {"t5": {"layer_2"}, "bert": {"layer_1", "layer_2"}}.get(kind, {"layer_1", "layer_2"})
    told = json.loads((whole / "run.json").read_text())
    shapes = [
        open_checkpoint(whole).shape(name) for name in open_checkpoint(whole).names() if name.startswith("model/")
    ]
    assert told["params"] == sum(_size(shape) for shape in shapes)


def _size(shape):
    size = 1
    for number in shape:
        size *= number
    return size


@pytest.mark.by_default("t5")
@pytest.mark.parametrize("kind", MODELS)
def test_a_blend_goes_on_where_it_was(forks, kind_recipe, tiny_corpus, tmp_path, kind):
    data = {"train": (str(tiny_corpus.train), str(tiny_corpus.validation)), "weights": (0.7, 0.3)}
    recipe = kind_recipe(kind, data, checkpoint={"every": 3})
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    train(forks, recipe, "--run.folder", whole)
    train(forks, recipe, "--run.folder", cut, "--train.steps", "3")
    train(forks, recipe, "--run.folder", cut, "--resume")
    assert [row.get("loss") for row in steps(cut).values()] == [row.get("loss") for row in steps(whole).values()]
    assert tensor_hash(cut) == tensor_hash(whole)
    options = ["--data.weights", "1", "1", "--train.steps", "8"]
    (end,) = forks.command("pretrain", recipe, "--run.folder", cut, "--resume", *options)
    assert end.code == 2 and "data.weights=(1.0, 1.0) differs from" in end.err, end
