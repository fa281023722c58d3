"""The quickstart trains to the same losses on the native operations as on torch's (fp32), on the bytes of real text.

Sums in another order differ in the last bits. Sooner or later a token's two best experts are nearly alike, the runs
choose differently, and from there on they are two runs, as on one thread and on two: a difference grows tenfold in some
steps of the highest rate. So two things are compared: at every step of a native run, loss and gradient that torch's
operations have at the same weights; and the losses of a run on torch's that is told the native one's choices.
"""

import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forks import only

from fmoe.kernels.native import loader as native

pytestmark = pytest.mark.skipif(not native.load(), reason="the native extension cannot be built here")


class Bytes:
    """Sample n: a window of a text's bytes, elsewhere for every n."""

    def __init__(self, length):
        sources = sorted((Path(sysconfig.get_path("stdlib")) / "json").glob("*.py"))
        text = b"".join(path.read_bytes() for path in sources)
        self._tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        self._length = length

    def __getitem__(self, n):
        begin = np.random.default_rng(n).integers(len(self._tokens) - self._length)
        return self._tokens[begin : begin + self._length + 1]


def follow(leader, follower):
    """The follower's gate chooses what the leader's has chosen; returns what counts its own other choices."""
    from fmoe.gates.router import Choice

    chosen = []
    lead = leader.choose
    own = follower.choose
    differing = []

    def choose(scores, groups):
        choice = lead(scores, groups)
        chosen.append(choice.expert_TK)
        return choice

    def choose_the_same(scores, groups):
        expert_TK = chosen.pop(0)
        differing.append(int((own(scores, groups).expert_TK != expert_TK).sum()))
        return Choice(expert_TK, scores.logits_TE.gather(-1, expert_TK).softmax(-1))  # the weights of gate=naive

    leader.choose = choose
    follower.choose = choose_the_same
    return differing


def runs(steps, together, global_batch, tell=None):
    """Train ``steps`` steps (None: the recipe's) with the native backend, next to a run with torch.

    Returns:
        For each step: the native loss, torch's loss at the same weights, the native gradient norm, torch's norm at the
        same weights, and the loss of the torch run, which uses the native run's choices and makes the first
        ``together`` steps (None afterwards). And the share of its choices that the torch run would have made
        differently.
    """
    from megatron_patch import cpu
    from pretrain.config import load_recipe
    from pretrain.engine import Engine, init_parallel
    from pretrain.start.process import Processes

    cpu.install()
    recipe = load_recipe("quickstart")
    batch = recipe.train.global_batch if global_batch is None else global_batch
    recipe = replace(
        recipe,
        parallel=replace(recipe.parallel, expert=1, data=1),
        train=replace(recipe.train, global_batch=batch, micro_batch=min(batch, recipe.train.micro_batch)),
    )
    processes = Processes(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    init_parallel(recipe, processes)
    engine = Engine(recipe, processes)
    told = Engine(recipe, processes)
    choose = [layer.gate.choose for layer in engine.moe_layers]
    counts = [follow(a.gate, b.gate) for a, b in zip(engine.moe_layers, told.moe_layers, strict=True)]
    leading = [layer.gate.choose for layer in engine.moe_layers]
    set_backend(told, "torch")
    samples = Bytes(recipe.model.sequence_length)
    found = []
    for step in range(steps or recipe.train.steps):
        for layer, own in zip(engine.moe_layers, choose, strict=True):
            layer.gate.choose = own
        set_backend(engine, "torch")
        at_its_weights = float(engine.backward(step, samples))
        engine.optimizer.prepare_grads()
        norm = engine.optimizer.get_grad_norm()
        if step < together:
            for layer, lead in zip(engine.moe_layers, leading, strict=True):
                layer.gate.choose = lead
        set_backend(engine, "native")
        result = engine.train_step(step, samples)
        other = told.train_step(step, samples).loss if step < together else None
        found.append((result.loss, at_its_weights, result.grad_norm, norm, other))
        if tell is not None:
            tell(step, found[-1], sum(map(sum, counts)))
    choices = min(together, len(found)) * batch * recipe.model.sequence_length * recipe.model.moe.top_k * len(counts)
    return found, sum(map(sum, counts)) / choices


def set_backend(engine, backend):
    for layer in engine.moe_layers:
        layer.experts.backend = backend


def check(found, others):
    def relative(pairs):
        return [abs(a - b) / abs(b) for a, b in pairs]

    losses = relative([row[:2] for row in found])
    norms = relative([row[2:4] for row in found])
    told = relative([(row[0], row[4]) for row in found if row[4] is not None])
    print(f"losses {found[0][0]:.4f} ... {found[-1][0]:.4f}; torch at the same weights, relative: {max(losses):.1e} of")
    print(
        f"the loss, {max(norms):.1e} of the gradient's norm; told the choices, {len(told)} steps: {max(told):.1e}, at"
    )
    print(f"the last one {told[-1]:.1e}; {others:.1e} of its choices would have been other ones")
    assert max(losses) <= 1e-4 and max(norms) <= 1e-3
    assert told[-1] <= 1e-4
    assert others < 1e-3


@pytest.mark.slow
def test_a_quickstart_on_either_backend_begins_alike(forks):
    found, others = only(forks.run(1, runs, 6, 6, 2))
    check(found, others)
    assert found[-1][0] < found[0][0] - 0.1


@pytest.mark.slow
def test_a_quickstart_on_either_backend_trains_to_the_same_losses(forks):
    found, others = only(forks.run(1, runs, None, 50, 2))
    check(found, others)
    assert found[-1][0] < 3.0
