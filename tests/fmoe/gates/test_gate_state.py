"""State of gates between steps: under nn.DataParallel, whose replicas are discarded, and in a replayed CUDA graph."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fmoe
from fmoe.fastmoe.gates import GShardGate, NoisyGate
from fmoe.gates import TopKRouter, skip_step
from fmoe.gates.router import Choice

WIDTH, EXPERTS, TOKENS = 8, 4, 24


class Counting(TopKRouter):
    """A user's gate with state of each kind: a number, a tensor that is replaced, and a buffer."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.calls, self.replaced_E = 0, torch.zeros(EXPERTS)
        self.register_buffer("added_E", torch.zeros(EXPERTS))

    def choose(self, scores, groups):
        weight_TK, expert_TK = scores.probs_TE.topk(self.top_k)
        return Choice(expert_TK, weight_TK)

    def record(self, routing):
        self.calls += 1
        self.replaced_E = self.replaced_E + routing.stats.load_E
        self.added_E += routing.stats.load_E


def build(gate, cls=fmoe.MoE, **options):
    return cls.build(d_model=WIDTH, num_experts=EXPERTS, top_k=2, d_hidden=8, gate=gate, seed=0, **options)


def tokens(seed=0, count=TOKENS):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def replicate(monkeypatch):
    """`torch.nn.parallel.replicate` on one device: as on GPUs, the first replica shares the tensors."""

    def copies(tensors, devices, detach):
        return [[t if index == 0 else t.clone() for t in tensors] for index in range(len(devices))]

    module = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", copies)
    monkeypatch.setattr(module, "_get_device_index", lambda device, *_: device)
    return lambda model, count: module.replicate(model, range(count))


def data_parallel_step(replicate, model, x, replicas=3):
    parts = zip(replicate(model, replicas), x.chunk(replicas), strict=True)
    torch.cat([replica(part) for replica, part in parts]).square().sum().backward()


@pytest.mark.parametrize("cls", [fmoe.MoE, fmoe.FMoE])
def test_the_bias_of_data_parallel_replicas_is_that_of_one_device(replicate, cls):
    layers = [nn.Sequential(build("sigmoid", cls, loss_weights={"sequence_balance": 0})) for _ in range(2)]
    for step in range(3):
        x = tokens(step)
        data_parallel_step(replicate, layers[0], x)
        layers[1](x).square().sum().backward()
        for layer in layers:
            fmoe.end_step(layer)
        torch.testing.assert_close(layers[0][0].gate.weight.grad, layers[1][0].gate.weight.grad)
    biases = [layer[0].gate.expert_bias_E for layer in layers]
    assert torch.equal(*biases) and biases[0].abs().max() > 0
    assert fmoe.metrics(layers[0])["0"].tokens == 3 * TOKENS


def test_gates_of_users_record_for_their_replicas(replicate):
    layer = build(Counting)
    for step in range(2):
        data_parallel_step(replicate, layer, tokens(step))
    gate = layer.gate
    assert gate.calls == 2 * 3 and gate.replaced_E.sum() == gate.added_E.sum() == 2 * 2 * TOKENS
    layer(tokens()).sum().backward()  # replicas have left the layer as it was
    assert gate.calls == 7


@pytest.mark.parametrize("kind", [GShardGate, NoisyGate])
def test_losses_of_fastmoes_gates_are_the_mean_over_replicas(replicate, kind):
    layer = fmoe.FMoE(num_expert=EXPERTS, d_model=WIDTH, gate=kind, expert=lambda d: nn.Linear(d, d)).eval()
    for step in range(2):
        x = tokens(step)
        losses = []
        for part in x.chunk(3):
            layer(part)
            losses.append(layer.gate.get_loss())
        expected = torch.autograd.grad(sum(losses) / 3, list(layer.gate.parameters()), allow_unused=True)
        for replica, part in zip(replicate(layer, 3), x.chunk(3), strict=True):
            replica(part)
        loss = layer.gate.get_loss(clear=bool(step))
        torch.testing.assert_close(loss, sum(losses) / 3)
        found = torch.autograd.grad(loss, list(layer.gate.parameters()), allow_unused=True)
        torch.testing.assert_close(found, expected)
    assert not layer.gate.has_loss and copy.deepcopy(layer).gate.get_loss() is None


class Recorded(TorchDispatchMode):
    """The operations of a step, to repeat as a CUDA graph does: on the same memory, and without Python's code."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.detach().copy_(new)


def step(layer, x):
    layer(x).square().sum().backward()


@pytest.mark.parametrize("way", ["new", "moved", "stepped", "copied", "assigned"])
def test_replays_of_a_graph_count(way):
    layer, expected = build("sigmoid", backend="torch"), build("sigmoid", backend="torch")
    if way == "moved":
        layer.to("meta").to_empty(device="cpu").load_state_dict(expected.state_dict())
    elif way == "assigned":
        layer.to("meta").load_state_dict(copy.deepcopy(expected.state_dict()), assign=True)
    elif way == "copied":
        layer = copy.deepcopy(layer)
    x = tokens()
    if way in ("stepped", "assigned"):
        step(layer, x)
        fmoe.end_step(layer)
        expected.load_state_dict(layer.state_dict())
    with Recorded() as graph:
        step(layer, x)
    skip_step(layer)  # the capture of a CUDA graph counts nothing
    for number in range(3):
        for seed in (2 * number, 2 * number + 1):  # two micro batches
            x.copy_(tokens(seed))
            graph.replay()
            step(expected, tokens(seed))
        fmoe.end_step(layer)
        fmoe.end_step(expected)
        assert torch.equal(layer.gate.expert_bias_E, expected.gate.expert_bias_E)
    assert layer.gate.expert_bias_E.abs().max() > 0


def test_a_gate_of_fastmoe_pickled_by_an_earlier_version():
    state = GShardGate(8, 4, 1).__getstate__()
    del state["_losses"]
    loaded = GShardGate.__new__(GShardGate)
    loaded.__setstate__(state | {"loss": None})
    assert not loaded._losses
