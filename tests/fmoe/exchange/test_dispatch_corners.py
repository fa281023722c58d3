"""Exchanges in corners: recomputation, second derivatives, experts that are frozen, constant or of several dtypes,
inputs without gradients. Nothing hangs, and everything equals one worker."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from compare import relative_error
from forks import values
from torch import nn
from torch.utils.checkpoint import checkpoint

import fmoe
from fmoe.exchange import Cost, collectives
from fmoe.kernels import memory

WIDTH, EXPERTS = 16, 4


class AlwaysShadow(Cost):
    """The hottest experts are always lent."""

    def seconds(self, loads_WE, num_local, shadows):
        return -len(shadows)


ALWAYS = AlwaysShadow(row_seconds=0.0, row_bytes=0.0, expert_bytes=0.0, bandwidth=1.0)
WAYS = {
    "all_to_all": ("all_to_all", {}),
    "chunks": ("all_to_all", {"chunks": 3}),
    "bound": ("all_to_all", {"max_rows": 2 * EXPERTS}),
    "shadow": ("all_to_all", {"shadow": 2, "cost": ALWAYS}),
    "padded": ("padded", {}),
    "padded chunks": ("padded", {"chunks": 2}),
    "all_gather": ("all_gather", {}),
    "hierarchical": ("hierarchical", {"node_size": 1, "chunks": 2, "shadow": 1, "cost": ALWAYS}),
}
all_ways = pytest.mark.parametrize("way", WAYS)


class Square(nn.Module):
    """An expert with second derivatives, of plain autograd."""

    def __init__(self, d_model):
        super().__init__()
        self.map = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.map(x).square()


def pair(way, **options):
    """The same layer spread over two workers and on one."""
    exchange, exchange_options = WAYS[way]
    options = {"d_model": WIDTH, "num_experts": EXPERTS, "d_hidden": 12, "seed": 5, **options}
    spread = fmoe.FMoE(moe_group=dist.group.WORLD, exchange=exchange, exchange_options=exchange_options, **options)
    return spread, fmoe.FMoE(**options)


def summed(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def gradients_differ(spread, alone):
    """The largest relative error of this worker's experts' gradients; of those of one process, both workers' summed."""
    local = slice(spread.first_expert, spread.first_expert + spread.num_local_experts)
    if isinstance(spread.experts, nn.ModuleList):
        ours = [p for expert in spread.experts for p in expert.parameters()]
        expected = [[p.grad for p in expert.parameters()] for expert in alone.experts]
        expected = [None if g is None else summed(g) for part in expected for g in part]
        per = len(expected) // EXPERTS
        expected = expected[local.start * per : local.stop * per]
    else:
        ours = list(spread.experts.parameters())
        expected = [None if p.grad is None else summed(p.grad)[local] for p in alone.experts.parameters()]
    assert [p.grad is None for p in ours] == [g is None for g in expected]
    return max((relative_error(p.grad, g) for p, g in zip(ours, expected, strict=True) if g is not None), default=0.0)


def recomputed(way, use_reentrant):
    told = []
    collectives.GroupMonitor.post_failure = lambda self, error: told.append(repr(error))
    torch.manual_seed(dist.get_rank())
    spread, alone = pair(way)
    x = torch.randn(3, 7, WIDTH)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = checkpoint(spread, a, use_reentrant=use_reentrant), alone(b)
    upstream = torch.randn_like(y)
    (y * upstream).sum().backward()
    (z * upstream).sum().backward()
    return told, max(relative_error(y, z), relative_error(a.grad, b.grad), gradients_differ(spread, alone))


@pytest.mark.cover(1)
@pytest.mark.parametrize("use_reentrant", [False, True])
@all_ways
def test_recomputation_is_no_failure(forks, way, use_reentrant):
    for told, error in values(forks.run(2, recomputed, way, use_reentrant)):
        assert told == [] and error < 1e-5


def labelled(use_checkpoint):
    """Losses collected by hand in three steps, and what is left over."""
    layer = fmoe.FMoE(d_model=WIDTH, num_experts=EXPERTS, d_hidden=12, aux_loss="manual", seed=5)
    found = []
    for step in range(3):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
        y = checkpoint(layer, x, use_reentrant=False) if use_checkpoint else layer(x)
        layer.zero_grad()
        loss = fmoe.collect_losses(layer)
        (y.sum() + loss).backward()
        found.append((loss.item(), layer.gate.weight.grad.clone()))
    return found, layer.aux.pending


def test_recomputation_leaves_no_losses_behind_and_says_nothing(caplog):
    (plain, _), (again, left) = labelled(False), labelled(True)
    assert left == [] and not caplog.records
    for (loss, grad), (other, other_grad) in zip(plain, again, strict=True):
        assert loss == other and torch.equal(grad, other_grad)


def test_a_reentrant_checkpoint_hides_losses_and_says_so(caplog):
    layer = fmoe.FMoE(d_model=WIDTH, num_experts=EXPERTS, d_hidden=12, aux_loss="manual", seed=5)
    for _ in range(2):
        checkpoint(layer, torch.randn(6, WIDTH, requires_grad=True), use_reentrant=True).sum().backward()
        assert layer.aux.pending == []
    assert [record.message.count("use_reentrant=False") for record in caplog.records] == [1]


def second_derivatives(way):
    torch.manual_seed(dist.get_rank())
    spread, alone = (layer.double() for layer in pair(way, expert=Square))
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    upstream = torch.randn_like(x)
    found = []
    for layer in (spread, alone):
        a = x.clone().requires_grad_()
        y = layer(a)
        (first,) = torch.autograd.grad((y * upstream).sum(), a, create_graph=True)
        found += torch.autograd.grad(first.square().sum(), a)
    return relative_error(*found)


@pytest.mark.by_default("all_to_all", "padded", "padded chunks", "all_gather")
@all_ways
def test_second_derivatives_are_those_of_one_process(forks, way):
    assert max(values(forks.run(2, second_derivatives, way))) < 1e-10


def second_derivatives_of_lent_experts():
    spread, _ = pair("shadow", expert=Square)
    try:
        spread(torch.randn(5, WIDTH)).sum().backward(create_graph=True)
    except fmoe.UserError as error:
        return str(error)


def test_lent_experts_have_no_second_derivatives_and_say_so(forks):
    for message in values(forks.run(2, second_derivatives_of_lent_experts)):
        assert "no second derivatives (create_graph=True)" in message


class Mixed(nn.Module):
    """An expert whose norm is float64 where its map is float32."""

    def __init__(self, d_model):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(d_model, dtype=torch.float64))
        self.map = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.map((x.double() * self.scale).to(self.map.weight.dtype))


def lent_of_several_dtypes():
    torch.manual_seed(dist.get_rank())
    spread, alone = pair("shadow", expert=Mixed)
    x = torch.randn(20, WIDTH)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = spread(a), alone(b)
    y.square().sum().backward()
    z.square().sum().backward()
    return max(relative_error(y, z), relative_error(a.grad, b.grad), gradients_differ(spread, alone))


def test_experts_of_several_dtypes_are_lent_as_they_are(forks):
    assert max(values(forks.run(2, lent_of_several_dtypes))) < 1e-5


class Ignores(nn.Module):
    """A constant expert (MoE++, arXiv 2410.07348): what comes out does not depend on what goes in."""

    def __init__(self, d_model):
        super().__init__()
        self.value = nn.Parameter(torch.ones(d_model))

    def forward(self, x):
        return self.value.expand(len(x), -1)


class Copies(nn.Module):
    """A copy expert of the same paper: there is nothing in it, and it keeps nothing for the backward pass."""

    def __init__(self, d_model):
        super().__init__()

    def forward(self, x):
        return x


def uneven(way, kind):
    """Workers whose backward passes would go differently far."""
    torch.manual_seed(0)
    mine = dist.get_rank() == 1
    options = {"num_experts": EXPERTS}
    if kind == "constant":
        options["expert"] = [nn.Linear, nn.Linear, Ignores, Ignores]
    if kind == "copy":
        options |= {"num_experts": 2, "expert": [nn.Linear, Copies]}
    if "expert" in options:
        made = [cls(WIDTH, WIDTH) if cls is nn.Linear else cls(WIDTH) for cls in options["expert"]]
        options["expert"] = made
    exchange, exchange_options = WAYS[way]
    options = {"d_model": WIDTH, "d_hidden": 12, "seed": 5, **options}
    alone = fmoe.FMoE(**copy.deepcopy(options))
    spread = fmoe.FMoE(moe_group=dist.group.WORLD, exchange=exchange, exchange_options=exchange_options, **options)
    local = slice(spread.first_expert, spread.first_expert + spread.num_local_experts)
    if "expert" in options:
        spread.experts.load_state_dict(nn.ModuleList(list(alone.experts)[local]).state_dict())
    needs_input = {"no input": False, "input of one": mine}.get(kind, True)
    if kind in ("frozen of one", "no input"):
        for parameter in spread.experts.parameters():
            parameter.requires_grad_(mine)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(3, 7, WIDTH)
    a, b = x.clone().requires_grad_(needs_input), x.clone().requires_grad_()
    for _ in range(2):  # twice, so that what is left over from the first would be seen
        a.grad = b.grad = None
        spread.zero_grad()
        alone.zero_grad()
        y, z = spread(a), alone(b)
        y.square().sum().backward()
        z.square().sum().backward()
    errors = [relative_error(y, z)]
    if needs_input:
        errors.append(relative_error(a.grad, b.grad))
    for parameter, expected in zip(spread.gate.parameters(), alone.gate.parameters(), strict=True):
        errors.append(relative_error(parameter.grad, expected.grad))
    if isinstance(spread.experts, nn.ModuleList):
        ours = list(spread.experts.parameters())
        theirs = [[summed(p.grad) for p in expert.parameters()] for expert in alone.experts]
        theirs = [g for part in theirs[local] for g in part]
    else:
        ours = list(spread.experts.parameters())
        theirs = [summed(p.grad)[local] for p in alone.experts.parameters()]
    for parameter, expected in zip(ours, theirs, strict=True):
        if parameter.requires_grad:
            errors.append(relative_error(parameter.grad, expected))
        else:
            assert parameter.grad is None
    return max(errors)


@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", ["frozen of one", "no input", "input of one", "constant", "copy"])
@all_ways
def test_workers_whose_backward_passes_go_differently_far(forks, way, kind):
    if kind in ("constant", "copy") and ("shadow" in WAYS[way][1]):
        pytest.skip("modules of several kinds are not lent")
    if kind in ("no input", "input of one") and way.startswith("padded"):
        pytest.skip("exchanges nothing beforehand")
    assert max(values(forks.run(2, uneven, way, kind))) < 1e-5


def frozen(way):
    torch.manual_seed(dist.get_rank())
    spread, alone = pair(way)
    for layer in (spread, alone):
        layer.experts.requires_grad_(False)
    x = torch.randn(3, 7, WIDTH)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = spread(a), alone(b)
    y.square().sum().backward()
    z.square().sum().backward()
    assert all(p.grad is None for p in spread.experts.parameters())
    return max(relative_error(y, z), relative_error(a.grad, b.grad))


@pytest.mark.by_default("all_to_all", "padded", "padded chunks", "all_gather")
@all_ways
def test_experts_may_be_frozen(forks, way):
    assert max(values(forks.run(2, frozen, way))) < 1e-5


def test_memory_of_inference_serves_training(monkeypatch):
    monkeypatch.setattr(memory, "_SMALLEST", 1)
    monkeypatch.setattr(memory, "_blocks", {})
    layer = fmoe.FMoE(d_model=WIDTH, num_experts=EXPERTS, d_hidden=12, seed=5)
    x = torch.randn(3, 7, WIDTH)
    for _ in range(2):
        with torch.inference_mode():
            expected = layer(x)
        y = layer(x.clone().requires_grad_())
        assert torch.equal(y, expected)
        y.sum().backward()
    with torch.device("meta"):
        assert memory.empty((1000, 1000), x).device.type == "cpu"


def warned():
    layer, _ = pair("all_to_all")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            layer(torch.randn(4, WIDTH))
            warnings.warn("once a place", UserWarning, stacklevel=1)
    return len(seen)


def test_waiting_leaves_the_users_warnings_alone(forks):
    assert values(forks.run(2, warned)) == [1, 1]


def backward_fails():
    """Two layers; the first one's backward pass stops on rank 1."""
    first, second = (
        fmoe.FMoE(
            d_model=WIDTH, num_experts=EXPERTS, d_hidden=12, moe_group=dist.group.WORLD, seed=s, name=f"block {s}"
        )
        for s in (1, 2)
    )
    x = torch.randn(6, WIDTH, requires_grad=True)
    for _ in range(2):
        second(first(x)).sum().backward()
    y = first(x)
    z = second(y)
    if dist.get_rank() == 1:
        torch.autograd.grad(z.sum(), y)
        return ""
    try:
        z.sum().backward()
    except fmoe.exchange.PeerError as error:
        return str(error)


def test_an_error_in_the_backward_pass_names_its_layer(forks):
    told, _ = values(forks.run(2, backward_fails))
    assert told.startswith("block 1, forward pass 3, exchange of rows: rank 1 did not answer")
