"""The router as one operation against its plain path in float64: choices, weights, losses, statistics, gradients."""

import copy
import dataclasses

import pytest
import torch
from compare import assert_close

import fmoe
from fmoe.gates import GShardRouter, NaiveRouter, SwitchRouter
from fmoe.kernels.cuda import calls
from fmoe.kernels.cuda.calls import TokenTiles
from fmoe.kernels.gates import route
from fmoe.layout import LocalTokens
from fmoe.metrics import counting
from fmoe.routing import RoutingGroups

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
D = 24
E = 10
GATES = {
    "naive": lambda: NaiveRouter(D, E, 3),
    "all scores": lambda: NaiveRouter(D, E, 2, normalize=False, routed_scale=2.5, expert_groups=5, kept_groups=3),
    "capacity": lambda: NaiveRouter(D, E, 3, capacity_factor=0.6),
    "switch": lambda: SwitchRouter(D, E, jitter=0.2, capacity_factor=0.8),
    "switch of two": lambda: SwitchRouter(D, E, 2, jitter=0.0),
}
MASK = torch.rand(48, generator=torch.Generator().manual_seed(3)) < 0.7
GROUPS = {
    "sequences": lambda: RoutingGroups(3, 16, first_group=5, noise_key=lambda: 77),
    "interleaved": lambda: RoutingGroups(3, 16, sequence_first=True, noise_key=lambda: 77),
    "ragged": lambda: RoutingGroups(3, 16, size=13, noise_key=lambda: 77),
    "padding": lambda: RoutingGroups(3, 16, sequence_first=True, size=9, mask_T=MASK, noise_key=lambda: 77),
    "one": lambda: RoutingGroups(1, 48, size=100, noise_key=lambda: 77),
}


def by_kernel(gate, x, groups):
    """The routing of `fmoe.kernels.gates.route`, and the tokens for the experts."""
    tokens = LocalTokens([x], x, groups, x.shape[:-1])
    return route(gate, tokens), tokens.x_TD


def results(gate, x, groups, call):
    """Everything of a routing but its experts, and all gradients; the losses weighted differently."""
    routing, tokens = call(gate, x, groups)
    grad = torch.randn(routing.weight_TK.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss = (routing.weight_TK.double() * torch.where(routing.expert_TK < 0, 0, grad)).sum() + 3 * tokens.double().sum()
    loss = loss + sum(30 * n * value.double() for n, value in enumerate(routing.losses.values(), 1))
    loss.backward()
    stats = {f.name: getattr(routing.stats, f.name) for f in dataclasses.fields(routing.stats)[:4]}
    found = {"weights": routing.weight_TK.detach(), **routing.losses, **stats, "x": x.grad, "weight": gate.weight.grad}
    return routing, found


@pytest.mark.cover(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("gate", GATES)
def test_router(gate, groups, dtype, on):
    x = torch.randn(48, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.manual_seed(4)
    mine = GATES[gate]().to(dtype)
    plain = copy.deepcopy(mine).double()
    routing, found = results(mine, x.clone().requires_grad_(), GROUPS[groups](), by_kernel)
    kernels = {"route", "queue", "route_backward"} | ({"drop_over_capacity"} if mine.capacity_factor else set())
    assert on.names() == kernels | ({"jitter"} if getattr(mine, "jitter", 0) else set())
    plainly = lambda gate, x, groups: (gate(x, groups), x)  # noqa: E731
    expected_routing, expected = results(plain, x.double().requires_grad_(), GROUPS[groups](), plainly)
    assert torch.equal(routing.expert_TK, expected_routing.expert_TK)
    assert routing.max_load == expected_routing.max_load
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # The change by noise is rounded to 16 bits; at the default jitter of 0.01 the error is a twentieth of this.
        inner = 4e-4 if gate == "switch" and dtype.itemsize == 2 else 1e-5
        assert_close(found[name], value, LIMITS[dtype] if found[name].dtype == dtype else inner, name)


def test_evaluation(on):
    gate = GATES["switch"]().eval()
    x = torch.randn(48, D, generator=torch.Generator().manual_seed(0))
    routing, _ = by_kernel(gate, x, GROUPS["ragged"]())
    assert on.names() == {"route", "queue", "drop_over_capacity"}
    expected = gate.double()(x.double(), GROUPS["ragged"]())
    assert not routing.losses and not routing.stats.loss_names
    assert torch.equal(routing.expert_TK, expected.expert_TK)
    assert torch.equal(routing.stats.load_E, expected.stats.load_E)


class Changed(NaiveRouter):
    """Might compute something else."""


def hooked(gate):
    gate.register_forward_hook(lambda *_: None)
    return gate


def patched(gate):
    gate.forward = NaiveRouter.forward.__get__(gate)
    return gate


@pytest.mark.parametrize(
    ("gate", "kernels_of_gate"),
    [
        (Changed(D, E, 2), None),
        (hooked(NaiveRouter(D, E, 2)), None),
        (patched(NaiveRouter(D, E, 2)), None),
        (NaiveRouter(D, E, 2).double(), None),
        (NaiveRouter(D, E, 2, bias=True), {"route"}),
        (NaiveRouter(D, E, 2, score="sigmoid"), {"route"}),
        (GShardRouter(D, E, 2, capacity_factor=None), {"route"}),
    ],
    ids=["subclass", "hook", "own forward", "float64", "bias", "sigmoid", "gshard"],
)
def test_gates_that_compute_something_else(gate, kernels_of_gate, on):
    x = torch.randn(8, D, dtype=gate.weight.dtype)
    routing, tokens = by_kernel(gate, x, RoutingGroups(1, 8))
    assert tokens is x and (routing is None) == (kernels_of_gate is None)
    assert on.names() == (kernels_of_gate or set())


def test_more_groups_than_a_grid_is_high(monkeypatch):
    """A GPU takes up to 2^31 - 1 blocks in x, but 65535 in y and z."""
    grids = []
    monkeypatch.setattr(calls, "_start", lambda kernel, geometry, *rest: grids.append(geometry.grid))
    tiles = TokenTiles(70_000, 1)
    counted = calls.count_choices(torch.zeros(70_000, 2, dtype=torch.int64), None, 40, tiles)
    calls.queue(counted, 2, 0.5)
    assert grids == [(70_000, 2, 1), (70_000, 2, 1)]


def layers(**options):
    one = fmoe.FMoE(d_model=D, num_experts=E, d_hidden=16, seed=3, **options, backend="cuda")
    other = fmoe.FMoE(d_model=D, num_experts=E, d_hidden=16, seed=3, **options, backend="torch").double()
    other.load_state_dict({name: value.double() for name, value in one.state_dict().items()})
    return one, other


def step(layer, x, scale):
    x = x.clone().requires_grad_()
    fmoe.set_loss_scale(scale)
    try:
        (layer(x) * 0.01).double().square().sum().backward()
    finally:
        fmoe.set_loss_scale(1.0)
    return {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


@pytest.mark.parametrize("scale", [1.0, 7.5, torch.tensor(1024.0)], ids=str)
def test_scaled_losses_and_what_is_counted(scale, on):
    """Of the layer: weights of the losses, their scale as a number and as a tensor, statistics of several passes."""
    options = {"gate": "switch", "gate_options": {"jitter": 0.0}, "loss_weights": {"balance": 30.0, "z": 20.0}}
    one, other = layers(**options)
    x = torch.randn(3, 16, D, generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        found = step(one, x, scale)
        expected = step(other, x.double(), scale)
        for name, value in expected.items():
            assert_close(found[name], value, 1e-5, name)
    for _ in range(2):  # read, and again after more passes
        mine = one.metrics.report()
        plain = other.metrics.report()
        assert mine.load == pytest.approx(plain.load) and mine.losses == pytest.approx(plain.losses)
        assert (mine.drop_rate, mine.entropy, mine.tokens) == pytest.approx(
            (plain.drop_rate, plain.entropy, plain.tokens)
        )
        step(one, x, scale), step(other, x.double(), scale)
    assert one.metrics.take().tokens == 4 * 48 and one.metrics.report().tokens == 0


def test_training_and_evaluation_are_counted_together(on):
    """Statistics of evaluation have no losses; those of inference mode are added outside of it."""
    one, _ = layers()
    x = torch.randn(2, 4, D)
    with counting(one):
        for _ in range(2):
            one.train()(x).sum().backward()
            with torch.inference_mode():
                one.eval()(x)
        report = one.metrics.report()
    assert report.tokens == 4 * 8 and sum(report.load) == pytest.approx(1)


def test_frozen_parts(on):
    """Without gradients for tokens, router or experts the others are as they were."""
    x = torch.randn(2, 8, D, generator=torch.Generator().manual_seed(6))
    for frozen in ("x", "gate", "experts"):
        (one, other) = layers()
        gradients = []
        for layer in (one, other):
            if frozen != "x":
                getattr(layer, frozen).requires_grad_(False)
            given = x.to(next(layer.parameters()).dtype, copy=True).requires_grad_(frozen != "x")
            layer(given).sum().backward()
            gradients.append(given.grad)
        if frozen != "x":
            assert_close(*gradients, 1e-5, f"x, {frozen} frozen")
        for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                assert_close(p.grad, q.grad, 1e-5, name)
