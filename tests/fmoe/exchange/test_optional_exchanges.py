"""Exchanges `deepep` and `symmetric` over stand-ins for their libraries (`exchange_libraries`), as `all_to_all`."""

import sys

import exchange_libraries
import pytest
import test_dispatch_corners as corners
import torch
import torch.distributed as dist
from compare import relative_error
from exchange_libraries import with_libraries
from forks import values
from torch.utils.checkpoint import checkpoint

import fmoe
from fmoe.exchange import PeerError, build_exchange, deepep, symmetric

WIDTH, EXPERTS = 16, 4
NEAR = {"deepep": 1e-6, "symmetric": 1e-12}  # in float64; DeepEP sends combine weights in float32
CASES = {
    "plain": {},
    "drops": {"gate": "switch", "gate_options": {"capacity_factor": 0.5, "jitter": 0.0}},
    "three of eight": {"num_experts": 8, "top_k": 3, "expert": "swiglu"},
    "modules": {"expert": corners.Square},
    "choice per expert": {"gate": "expert_choice", "group_size": 4},
}


def steps(exchange, options, layer_options, dtype, recompute=False):
    """Relative error of two steps, with uneven and then no tokens on rank 1, against one process and `all_to_all`."""
    torch.manual_seed(dist.get_rank())
    layer_options = {"d_model": WIDTH, "num_experts": EXPERTS, "d_hidden": 24, "seed": 5, **layer_options}
    group = {"moe_group": dist.group.WORLD}
    spread = fmoe.FMoE(exchange=exchange, exchange_options=options, **group, **layer_options).to(dtype)
    other, alone = fmoe.FMoE(**group, **layer_options).to(dtype), fmoe.FMoE(**layer_options).to(dtype)
    found = []
    for sequences in (3, 3 - 3 * dist.get_rank()):
        x = torch.randn(sequences, 8 - 4 * dist.get_rank(), WIDTH, dtype=dtype)
        upstream = torch.randn_like(x)
        results = []
        for layer in (spread, other, alone):
            layer.zero_grad()
            leaf = x.clone().requires_grad_()
            y = checkpoint(layer, leaf, use_reentrant=False) if recompute else layer(leaf)
            (y * upstream).sum().backward()
            results.append([y, leaf.grad, *(p.grad for p in layer.gate.parameters())])
        errors = [[relative_error(a, b) for a, b in zip(results[0], r, strict=True)] for r in results[1:]]
        pairs = zip(spread.experts.parameters(), other.experts.parameters(), strict=True)
        found.append(max(*errors[0], *errors[1], *(relative_error(p.grad, q.grad) for p, q in pairs)))
    return max(found)


@pytest.mark.by_default("deepep-drops", "deepep-choice per expert", "symmetric-drops", "symmetric-three of eight")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("exchange", ["deepep", "symmetric"])
def test_values_and_gradients(two_ranks, exchange, case):
    results = two_ranks.run(with_libraries, torch.float64, steps, exchange, {}, CASES[case], torch.float64)
    assert max(values(results)) < NEAR[exchange]


@pytest.mark.by_default("symmetric")
@pytest.mark.parametrize("exchange", ["deepep", "symmetric"])
def test_recomputation(two_ranks, exchange):
    results = two_ranks.run(with_libraries, torch.float64, steps, exchange, {}, {}, torch.float64, True)
    assert max(values(results)) < NEAR[exchange]


@pytest.mark.by_default("40")
@pytest.mark.parametrize("max_rows", [2 * EXPERTS, 40])
def test_bounded_rows(two_ranks, max_rows):
    options = {"max_rows": max_rows}
    results = two_ranks.run(with_libraries, torch.float64, steps, "symmetric", options, {}, torch.float64)
    assert max(values(results)) < 1e-12


@pytest.mark.parametrize(
    ("exchange", "dtype", "options"),
    [
        ("deepep", torch.bfloat16, {}),
        ("deepep", torch.float32, {"wire_dtype": torch.bfloat16}),
        ("deepep", torch.float16, {"wire_dtype": torch.bfloat16, "num_sms": 24}),
        ("symmetric", torch.bfloat16, {}),
        ("symmetric", torch.float32, {"wire_dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_sixteen_bits_round_once(two_ranks, exchange, dtype, options):
    """With DeepEP's own dtype, as the real one insists. Rows that are sent as they are get no other rounding."""
    is_exact = exchange == "symmetric" and not options
    for error in values(two_ranks.run(with_libraries, torch.bfloat16, steps, exchange, options, {}, dtype)):
        assert error == 0 if is_exact else 1e-4 < error < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["deepep", "symmetric"])
def test_four_ranks(four_ranks, exchange):
    layer_options = {"num_experts": 8, "top_k": 3, "gate": "naive"}
    results = four_ranks.run(with_libraries, torch.float64, steps_of_four, exchange, layer_options)
    assert max(values(results)) < NEAR[exchange]


def steps_of_four(exchange, layer_options):
    layer_options = {"d_model": WIDTH, "d_hidden": 24, "seed": 5, **layer_options}
    spread = fmoe.FMoE(exchange=exchange, moe_group=dist.group.WORLD, **layer_options).double()
    alone = fmoe.FMoE(**layer_options).double()
    x = torch.randn(5 * dist.get_rank(), WIDTH, dtype=torch.float64)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = spread(a), alone(b)
    y.square().sum().backward()
    z.square().sum().backward()
    return max(relative_error(y, z), relative_error(a.grad, b.grad))


WAYS = {"deepep": ("deepep", {}), "symmetric": ("symmetric", {}), "bound": ("symmetric", {"max_rows": 2 * EXPERTS})}


def in_corner(function, *args):
    corners.WAYS.update(WAYS)
    return function(*args)


@pytest.mark.by_default("frozen of one-deepep", "no input-symmetric", "constant-deepep")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["frozen of one", "no input", "input of one", "constant", "copy"])
def test_workers_whose_backward_passes_go_differently_far(two_ranks, way, kind):
    results = two_ranks.run(with_libraries, torch.float32, in_corner, corners.uneven, way, kind)
    assert max(values(results)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_frozen_experts(two_ranks, way):
    assert max(values(two_ranks.run(with_libraries, torch.float32, in_corner, corners.frozen, way))) < 1e-5


def test_second_derivatives(two_ranks):
    found = two_ranks.run(with_libraries, torch.float64, in_corner, corners.second_derivatives, "symmetric")
    assert max(values(found)) < 1e-10
    for result in two_ranks.run(with_libraries, torch.float64, in_corner, corners.second_derivatives, "deepep"):
        assert result.kind is fmoe.UserError and "no second derivatives" in result.message


def dropout(exchange):
    layer = fmoe.FMoE(
        d_model=WIDTH,
        num_experts=EXPERTS,
        exchange=exchange,
        moe_group=dist.group.WORLD,
        expert_options={"dropout": 0.5},
        seed=1,
    )
    try:
        return layer(torch.randn(5, WIDTH)).isfinite().all().item()
    except fmoe.UserError as error:
        return str(error)


def test_dropout_of_experts(two_ranks):
    """Its keys are integers, which DeepEP does not send."""
    assert values(two_ranks.run(with_libraries, torch.float32, dropout, "symmetric")) == [True] * 2
    for message in values(two_ranks.run(with_libraries, torch.float32, dropout, "deepep")):
        assert "exchange='deepep' sends one matrix of tokens" in message


def refused(exchange, options, **layer_options):
    layer_options = {"d_model": WIDTH, "num_experts": EXPERTS, "seed": 1, **layer_options}
    try:
        layer = fmoe.FMoE(
            exchange=exchange, exchange_options=options, moe_group=dist.group.WORLD, **layer_options
        ).bfloat16()
        layer(torch.randn(5, layer_options["d_model"], dtype=layer_options.pop("dtype", torch.bfloat16)))
    except fmoe.UserError as error:
        return str(error)


def refused_ones():
    return [
        refused("deepep", {"wire_dtype": torch.float16}),
        refused("deepep", {"num_sms": 3}),
        refused("deepep", {}, d_model=24),
        refused("deepep", {}, num_experts=34, top_k=33),
        refused("symmetric", {"max_rows": 3}),
    ]


def test_what_cannot_be(two_ranks):
    for messages in values(two_ranks.run(with_libraries, torch.bfloat16, refused_ones)):
        for message, words in zip(
            messages,
            ["wire_dtype=torch.float16", "num_sms=3", "d_model=24", "top_k=33 exceeds 32", "max_rows=3"],
            strict=True,
        ):
            assert words in message
    for is_first in (True, False):
        for results in values(two_ranks.run(with_libraries, torch.bfloat16, of_another_dtype, is_first)):
            assert "the input is torch.float32: use exchange_options={'wire_dtype': torch.bfloat16}" in results


def of_another_dtype(is_first):
    layer = fmoe.FMoE(d_model=WIDTH, num_experts=EXPERTS, exchange="deepep", moe_group=dist.group.WORLD)
    if not is_first:
        layer.bfloat16()(torch.randn(5, WIDTH, dtype=torch.bfloat16))
    try:
        layer.float()(torch.randn(5, WIDTH))
    except fmoe.UserError as error:
        return str(error)


def missing():
    sys.modules["deep_ep"] = None
    found = []
    for exchange in ("deepep", "symmetric"):
        try:
            build_exchange(dist.group.WORLD, EXPERTS, exchange)
        except fmoe.UserError as error:
            found.append(str(error))
    return found


def test_missing_libraries_are_named(two_ranks):
    for of_deepep, of_symmetric in values(two_ranks.run(missing)):
        assert of_deepep.startswith("exchange='deepep' needs the package deep_ep (")
        assert of_symmetric.startswith("exchange='symmetric' is unavailable: ")


def test_one_rank_needs_no_library():
    for exchange in ("deepep", "symmetric"):
        layer = fmoe.FMoE(d_model=8, num_experts=2, exchange=exchange)
        assert layer(torch.randn(3, 8)).shape == (3, 8)


def traffic(exchange):
    """Bytes that the layer reports, but for counts and fences, and bytes that the stand-in sent."""
    layer = fmoe.FMoE(
        d_model=WIDTH, num_experts=EXPERTS, top_k=2, exchange=exchange, moe_group=dist.group.WORLD, seed=3
    )
    x = torch.randn(24 + 6 * dist.get_rank(), WIDTH, requires_grad=True)
    layer(x).sum().backward()
    before, exchange_libraries.sent["bytes"] = layer.exchange.traffic.sent, 0
    layer(x).sum().backward()
    return layer.exchange.traffic.sent - before, exchange_libraries.sent["bytes"]


@pytest.mark.parametrize(("exchange", "fences", "head"), [("deepep", 3, 5), ("symmetric", 6, 5)])
def test_traffic(two_ranks, exchange, fences, head):
    """Counts are one gathering of `head` numbers; a fence is a reduction of 4 bytes."""
    for said, seen in values(two_ranks.run(with_libraries, torch.float32, traffic, exchange)):
        assert said == seen + 8 * head + 4 * fences and seen > 0


def buffers():
    """Sizes of the symmetric buffers after layers of several sizes; and how many times DeepEP's was made."""
    made, sizes = [], []
    group = {"moe_group": dist.group.WORLD, "num_experts": EXPERTS, "seed": 1}
    package = sys.modules["deep_ep"]

    class Counted(package.Buffer):
        def __init__(self, *args):
            made.append(args[1:])
            super().__init__(*args)

    package.Buffer = Counted
    for width, tokens in ((16, 6), (16, 3), (32, 6), (16, 50)):
        x = torch.randn(tokens, width)
        fmoe.FMoE(d_model=width, exchange="deepep", **group)(x)
        fmoe.FMoE(d_model=width, exchange="symmetric", **group)(x)
        sizes.append(symmetric._workspaces[dist.group.WORLD][x.device]._buffers[0].numel())
    return made, sizes


def test_buffers_grow_and_are_shared(two_ranks):
    for made, sizes in values(two_ranks.run(with_libraries, torch.float32, buffers)):
        rows = [2 * deepep.torch.float32.itemsize * width for width in (16, 32)]
        assert made == [(n, 0) for n in rows]
        assert sizes == sorted(sizes) and sizes[0] == sizes[1] < sizes[2] < sizes[3]
        assert all(size & (size - 1) == 0 for size in sizes)


def inference_first(exchange):
    layer = fmoe.FMoE(d_model=WIDTH, num_experts=EXPERTS, exchange=exchange, moe_group=dist.group.WORLD, seed=1)
    x = torch.randn(6, WIDTH)
    with torch.inference_mode():
        expected = layer(x).clone()
    y = layer(x.clone().requires_grad_())
    y.sum().backward()
    with torch.inference_mode():
        return torch.equal(y, expected) and torch.equal(layer(x), expected)


@pytest.mark.parametrize("exchange", ["deepep", "symmetric"])
def test_inference_before_training(two_ranks, exchange):
    assert values(two_ranks.run(with_libraries, torch.float32, inference_first, exchange)) == [True, True]


def late(what):
    """Rank 1 fails; DeepEP's host call times out where it waits for it."""
    layer = fmoe.FMoE(
        d_model=WIDTH, num_experts=EXPERTS, exchange="deepep", moe_group=dist.group.WORLD, seed=1, name="the layer"
    )
    x = torch.randn(6, WIDTH)
    layer(x)

    def dispatch(self, *_, **__):
        if dist.get_rank() == 1:
            raise ValueError("rank 1 is broken")
        raise RuntimeError(what)

    sys.modules["deep_ep"].Buffer.dispatch = dispatch
    try:
        layer(x)
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)


@pytest.mark.slow
def test_a_timeout_of_the_library_names_the_rank(forks):
    (kind, text), _ = values(forks.run(2, with_libraries, torch.float32, late, "DeepEP error: timeout (dispatch CPU)"))
    assert kind == PeerError.__name__ and "rank 1 failed in the layer, forward pass 2: ValueError" in text
    (kind, text), _ = values(forks.run(2, with_libraries, torch.float32, late, "CUDA error: something else"))
    assert (kind, text) == ("RuntimeError", "CUDA error: something else")


def fails_before_the_counts(exchange):
    """Rank 1 fails between its gate and the exchange of counts, for which rank 0 waits."""
    layer = fmoe.FMoE(
        d_model=WIDTH, num_experts=EXPERTS, d_hidden=8, moe_group=dist.group.WORLD, exchange=exchange, seed=0
    )
    x = torch.randn(6, WIDTH)
    layer(x)
    whole = layer.exchange.plan
    if dist.get_rank() == 1:

        def fail(*_):
            raise MemoryError("no room for the plan")

        layer.exchange.plan = fail
    try:
        layer(x)
    except (MemoryError, PeerError) as error:
        layer.exchange.plan = whole
        return f"{type(error).__name__}: {error}", layer(x).isfinite().all().item()  # and go on


@pytest.mark.parametrize("exchange", ["deepep", "symmetric"])
def test_an_error_before_the_counts_reaches_the_others(two_ranks, exchange):
    results = values(two_ranks.run(with_libraries, torch.float32, fails_before_the_counts, exchange))
    (first, _), (second, _) = results
    assert second == "MemoryError: no room for the plan" and all(usable for _, usable in results)
    assert first.startswith("PeerError: rank 1 failed in FMoE") and first.endswith(second)


def one_without_gradients(exchange):
    layer = fmoe.FMoE(d_model=WIDTH, num_experts=4, moe_group=dist.group.WORLD, exchange=exchange, seed=0)
    with torch.set_grad_enabled(dist.get_rank() == 0):
        try:
            layer(torch.randn(6, WIDTH))
        except (fmoe.UserError, PeerError) as error:
            return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["deepep", "symmetric"])
def test_one_rank_without_gradients_is_refused(forks, exchange):
    results = forks.run(2, with_libraries, torch.float32, one_without_gradients, exchange)
    first, second = values(results)
    assert "this rank trains while another one of moe_group runs under torch.no_grad()" in first
    assert "trains while" in second and "torch.no_grad()" in second
