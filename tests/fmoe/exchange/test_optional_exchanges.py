"""Exchanges `deepep` and `symmetric` over stand-ins for their libraries: what differs from `all_to_all`.

`test_dispatch_corners` compares their values and gradients with one process.
"""

import sys

import exchange_libraries
import pytest
import torch
import torch.distributed as dist
from exchange_libraries import with_libraries
from forks import values
from one_process import EXPERTS, WIDTH

import fmoe
from fmoe.exchange import PeerError, build_exchange, symmetric


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


def refused(dtypes, layer_options):
    """The error of the last of several passes of a layer in these dtypes."""
    layer = fmoe.FMoE(**{"d_model": WIDTH, "num_experts": EXPERTS, **layer_options}, moe_group=dist.group.WORLD)
    try:
        for dtype in dtypes:
            layer.to(dtype)(torch.randn(5, layer.d_model, dtype=dtype))
    except fmoe.UserError as error:
        return str(error)


@pytest.mark.parametrize(
    ("dtypes", "options", "words"),
    [
        ([torch.bfloat16], {"d_model": 24}, "d_model=24"),
        ([torch.bfloat16], {"num_experts": 34, "top_k": 33}, "top_k=33 exceeds 32"),
        ([torch.float32], {}, "'wire_dtype': torch.bfloat16"),
        ([torch.bfloat16, torch.float32], {}, "'wire_dtype': torch.bfloat16"),
    ],
    ids=str,
)
def test_layers_that_deepep_does_not_support(two_ranks, dtypes, options, words):
    options = {"exchange": "deepep", **options}
    for message in values(two_ranks.run(with_libraries, torch.bfloat16, refused, dtypes, options)):
        assert words in message


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
    before = layer.exchange.traffic.sent
    exchange_libraries.sent["bytes"] = 0
    layer(x).sum().backward()
    return layer.exchange.traffic.sent - before, exchange_libraries.sent["bytes"]


@pytest.mark.parametrize(("exchange", "fences", "head"), [("deepep", 3, 5), ("symmetric", 6, 5)])
def test_traffic(two_ranks, exchange, fences, head):
    """Counts are one gathering of `head` numbers; a fence is a reduction of 4 bytes."""
    for said, seen in values(two_ranks.run(with_libraries, torch.float32, traffic, exchange)):
        assert said == seen + 8 * head + 4 * fences and seen > 0


def buffers():
    """Sizes of the symmetric buffers after layers of several sizes; and how many times DeepEP's was made."""
    made = []
    sizes = []
    group = {"moe_group": dist.group.WORLD, "num_experts": EXPERTS, "seed": 1}
    package = sys.modules["deep_ep"]

    class Counted(package.Buffer):
        def __init__(self, *args):
            made.append(args[1:])
            super().__init__(*args)

    package.Buffer = Counted
    torch.manual_seed(0)  # the sizes follow the rows that a rank receives
    for width, tokens in ((16, 6), (16, 3), (32, 6), (16, 50)):
        x = torch.randn(tokens, width)
        fmoe.FMoE(d_model=width, exchange="deepep", **group)(x)
        fmoe.FMoE(d_model=width, exchange="symmetric", **group)(x)
        sizes.append(symmetric._workspaces[dist.group.WORLD][x.device]._buffers[0].numel())
    return made, sizes


def test_buffers_grow_and_are_shared(two_ranks):
    for made, sizes in values(two_ranks.run(with_libraries, torch.float32, buffers)):
        rows = [2 * torch.float32.itemsize * width for width in (16, 32)]
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
