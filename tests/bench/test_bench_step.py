"""The benchmark of a step: regions get the time that is theirs, forward and backward; Amdahl's bound; a tiny run."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forks import only

from bench.step import main
from bench.step.goals import bound
from bench.step.regions import BLOCK, LAYER, OTHER, REGIONS, Regions
from fmoe.kernels.native import loader as native


class Work(torch.autograd.Function):
    """Takes some seconds of a clock forward, and others backward."""

    now = 0.0

    @staticmethod
    def forward(ctx, x, weight, forward, backward):
        Work.now += forward
        ctx.backward_seconds = backward
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        Work.now += ctx.backward_seconds
        return grad, grad.sum(), None, None


class Model:
    """other 1 + 10; the layer 2 + 20, within which the router takes 4 + 40; an optimizer 7."""

    def __init__(self):
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.weight.register_post_accumulate_grad_hook(lambda _: self.accumulate())

    def accumulate(self):
        Work.now += 100  # once for each use below, or once for all: autograd adds up before

    def router(self, x):
        return Work.apply(x, torch.ones(()), 4.0, 40.0)

    def layer(self, x):
        x = Work.apply(x, torch.ones(()), 1.5, 15.0)
        x = x + self.router(x)
        return Work.apply(x, torch.ones(()), 0.5, 5.0)

    def forward(self, x):
        x = Work.apply(x, torch.ones(()), 0.25, 2.5)
        x = self.layer(x)
        x = self.layer(Work.apply(x, torch.ones(()), 0.5, 5.0))
        return Work.apply(x, self.weight, 0.25, 2.5)

    def optimizer(self):
        Work.now += 7.0


def test_regions_get_what_is_theirs():
    model = Model()
    marks = [(model, "layer", LAYER), (model, "router", "router"), (model, "optimizer", "optimizer")]
    for _ in range(2):  # the second time as the first
        with Regions(marks, (model, "forward"), lambda: Work.now) as regions:
            for _ in range(3):  # micro batches
                model.forward(torch.ones(2, requires_grad=True)).sum().backward()
            model.optimizer()
        assert dict(regions.seconds) == {
            OTHER: 3 * (1 + 10 + 100),
            LAYER: 3 * 2 * (2 + 20),
            "router": 3 * 2 * (4 + 40),
            "optimizer": 7,
        }
    assert not {"layer", "router", "forward", "optimizer"} & vars(model).keys(), "marks are taken away"


@pytest.mark.parametrize(
    ("share", "speedup", "expected"), [(0.5, 2.0, 4 / 3), (0.0, 9.0, 1.0), (1.0, 9.0, 9.0), (0.8, 0.5, 1 / 1.8)]
)
def test_amdahl(share, speedup, expected):
    assert bound(share, speedup) == pytest.approx(expected)


def test_the_recipe_of_64_experts_is_shape_a():
    from bench.layer.problem import SHAPES

    recipe, shape = main._recipe("gpt-64", "1"), SHAPES["A"]
    model = recipe.model
    assert (model.moe.num_experts, model.moe.top_k) == (shape.num_experts, shape.top_k)
    assert (model.hidden_size, model.ffn_hidden_size) == (shape.d_model, shape.d_hidden)
    assert recipe.train.micro_batch * model.sequence_length == shape.tokens
    assert main._recipe("gpt-64", "1", layers=3).model.num_layers == 3


TINY = """
[model]
num_layers = 2
hidden_size = 32
ffn_hidden_size = 16
sequence_length = 32
vocab_size = 64
[attention]
num_heads = 2
[moe]
num_experts = 4
top_k = 2
gate = "naive"
capacity_factor = "none"
[train]
global_batch = 4
micro_batch = 2
"""


def measured(folder):
    from bench.step.contenders import MEGATRON, NATIVE, TORCH, Contenders
    from bench.step.marks import marks_of

    torch.distributed.destroy_process_group()  # the benchmark makes its own
    path = Path(folder) / "tiny.toml"
    path.write_text(TINY)
    argv = ["--recipe", str(path), "--precision", "bf16", "--rounds", "2", "--warmup", "1", "--looks", "1"]
    main.main([*argv, "--out", folder])
    values = json.loads((Path(folder) / "step.json").read_text())

    # What is marked computes the same: the same engine's loss of the same step, with marks and without.
    from pretrain.engine import init_parallel
    from pretrain.start import process

    processes = process.start()
    recipe = main._recipe(str(path), "1")
    init_parallel(recipe)
    losses = {}
    for name in (NATIVE, TORCH, MEGATRON):
        contenders = Contenders(recipe, processes)
        if name not in contenders.names:
            continue
        engine = contenders.engine(name)
        plain = float(engine.backward(0, contenders.samples))
        with Regions(marks_of(engine), (engine.model[0], "forward")) as regions:
            looked = float(engine.backward(0, contenders.samples))
        losses[name] = (plain, looked, dict(regions.seconds))
    process.stop()
    return values, losses


@pytest.mark.slow
def test_a_tiny_run(forks, tmp_path):
    values, losses = only(forks.run(1, measured, str(tmp_path)))
    steps, alone = (SimpleNamespace(**row) for row in values["measurements"])
    assert alone.label == f"{steps.label}, blocks alone"
    contenders = {"fmoe torch", "megatron-core MoELayer"} | ({"fmoe native"} if native.load() else set())
    for row in (steps, alone):
        assert not row.failures and row.seconds.keys() == contenders
    for name, columns in steps.facts.items():
        assert columns.keys() == {*REGIONS, "block"}
        assert (columns["dispatch"] == "in experts") == (name == "fmoe native")
    assert steps.facts["fmoe torch"].keys() == steps.facts["megatron-core MoELayer"].keys()
    if native.load():
        goals = [note for note in values["notes"] if "which allows" in note]
        assert len(goals) == 2 and "as with fmoe torch" in goals[0] and "as with megatron-core MoELayer" in goals[1]
    for name, (plain, looked, seconds) in losses.items():
        assert plain == looked, f"{name}: looking at it changes the step"
        used = set(BLOCK) - ({"dispatch", "combine"} if name == "fmoe native" else set())
        assert all(seconds.get(region, 0) > 0 for region in used | {"attention", OTHER}), f"{name}: {seconds}"
        if name == "fmoe native":
            assert not {"dispatch", "combine"} & seconds.keys(), "the layer left the native operation"
