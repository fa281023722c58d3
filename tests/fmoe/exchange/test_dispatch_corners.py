"""Exchanges in corners: recomputation, second derivatives, experts that are frozen, constant or of several dtypes,
inputs without gradients. Nothing hangs, and everything equals one process."""

import warnings

import pytest
import torch
import torch.distributed as dist
from forks import values
from one_process import ALWAYS, EXPERTS, KINDS, WAYS, WIDTH, Kind, compared
from torch.utils.checkpoint import checkpoint

import fmoe
from fmoe.kernels import memory


@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_every_exchange_equals_one_process(forks, way, kind):
    """Values and gradients. Ranks run the same collectives even if their own backward passes end earlier."""
    if KINDS[kind].experts is not None and "shadow" in WAYS[way][1]:
        pytest.skip("modules of several kinds are not shadowed")
    if kind in ("no input", "input on one") and way.startswith("padded"):
        pytest.skip("exchanges no flags")
    results = forks.run(2, compared, way, kind)
    if KINDS[kind].is_second and way == "deepep":
        assert all(result.kind is fmoe.UserError and "create_graph" in result.message for result in results)
        return
    limit = 1e-6 if way == "deepep" else 1e-10  # DeepEP sends combine weights in float32
    assert max(values(results)) < (limit if KINDS[kind].dtype == torch.float64 else 1e-5)


def twice_through_shadowed_experts():
    options = {"shadow": 2, "cost": ALWAYS}
    layer = fmoe.FMoE(d_model=WIDTH, num_experts=EXPERTS, moe_group=dist.group.WORLD, exchange_options=options, seed=5)
    layer(torch.randn(5, WIDTH)).sum().backward(create_graph=True)


def test_shadowed_experts_have_no_second_derivatives(forks):
    for result in forks.run(2, twice_through_shadowed_experts):
        assert result.kind is fmoe.UserError and "exchange_options.shadow" in result.message


@pytest.mark.by_default("all_to_all-torch.float32", "symmetric-torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", sorted({WAYS[way][0] for way in WAYS}))
def test_rows_are_rounded_once_on_the_wire(forks, way, dtype):
    """With DeepEP's own dtype, as the real one insists. Rows that are sent as they are get no other rounding."""
    for error in values(forks.run(2, compared, way, Kind(dtype=dtype), {"wire_dtype": torch.bfloat16})):
        assert 1e-4 < error < 2e-2


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
    (plain, _) = labelled(False)
    (again, left) = labelled(True)
    assert left == [] and not caplog.records
    for (loss, grad), (other, other_grad) in zip(plain, again, strict=True):
        assert loss == other and torch.equal(grad, other_grad)


def test_a_reentrant_checkpoint_hides_losses_and_says_so(caplog):
    layer = fmoe.FMoE(d_model=WIDTH, num_experts=EXPERTS, d_hidden=12, aux_loss="manual", seed=5)
    for _ in range(2):
        checkpoint(layer, torch.randn(6, WIDTH, requires_grad=True), use_reentrant=True).sum().backward()
        assert layer.aux.pending == []
    assert [record.message.count("use_reentrant=False") for record in caplog.records] == [1]


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
    layer = fmoe.FMoE(d_model=WIDTH, num_experts=EXPERTS, d_hidden=12, moe_group=dist.group.WORLD)
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
