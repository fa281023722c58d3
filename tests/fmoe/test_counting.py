"""Statistics count each micro batch of training once, whatever is trained, recomputed or compiled."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fmoe
from fmoe.metrics import counting
from fmoe.routing import Routing, RoutingStats

TOKENS, WIDTH = 12, 8


def inside(*reentrant):
    """A call wrapped in checkpoints, the innermost last."""

    def wrap(call):
        for kind in reversed(reentrant):
            call = functools.partial(checkpoint, call, use_reentrant=kind)
        return call

    return wrap


CHECKPOINTS = {
    "none": inside(),
    "reentrant": inside(True),
    "other": inside(False),
    "other in other": inside(False, False),
    "other in reentrant": inside(True, False),
    "reentrant in other": inside(False, True),
    "reentrant in reentrant": inside(True, True),
}
TRAINED = {"all": (), "no router": ("gate",), "no experts": ("experts",), "head alone": ("gate", "experts")}


def built(gate, trained="all", **options):
    """A layer with frozen parts, and a trained head behind it."""
    layer = fmoe.FMoE(d_model=WIDTH, num_experts=4, d_hidden=8, gate=gate, seed=0, **options)
    for part in TRAINED[trained]:
        getattr(layer, part).requires_grad_(False)
    head = nn.Linear(WIDTH, WIDTH)
    return layer, lambda x: head(layer(x, token_ids=torch.arange(len(x))))


def counted(layer):
    """Tokens in the metrics, and assignments per token that the gate counted."""
    load_E = getattr(layer.gate, "_load_E", None)
    return fmoe.metrics(layer)[""].tokens, load_E if load_E is None else load_E.sum().item() / layer.gate.top_k


@pytest.mark.cover(2)
@pytest.mark.parametrize("gate", ["naive", "sigmoid", "random", "zero", "hash"])
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_each_micro_batch_counts_once(gate, trained, how):
    for needs_grad in (True,) if "reentrant" in how else (True, False):  # torch's reentrant one needs such an input
        layer, body = built(gate, trained)
        call = CHECKPOINTS[how](body)
        parts = [call(torch.randn(TOKENS, WIDTH, requires_grad=needs_grad)) for _ in range(2)]
        sum(part.sum() for part in parts).backward()
        call(torch.randn(TOKENS, WIDTH, requires_grad=needs_grad)).sum().backward()
        assert counted(layer) == (3 * TOKENS, 3 * TOKENS if gate == "sigmoid" else None), needs_grad


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_a_frozen_layer_counts_once_where_its_input_needs_no_gradient(how):
    layer, _ = built("random", "head alone")
    frozen = torch.randn(TOKENS, WIDTH)
    CHECKPOINTS[how](lambda x: x + layer(frozen))(torch.randn(TOKENS, WIDTH, requires_grad=True)).sum().backward()
    assert counted(layer)[0] == TOKENS


@pytest.mark.parametrize("gate", ["sigmoid", "random"])
@pytest.mark.parametrize("how", ["none", "other", "other in other"])
def test_a_backward_pass_that_runs_again_counts_nothing(gate, how):
    layer, body = built(gate)
    loss = CHECKPOINTS[how](body)(torch.randn(TOKENS, WIDTH, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in layer.named_parameters()}
    loss.backward()
    assert counted(layer) == (TOKENS, TOKENS if gate == "sigmoid" else None)
    for name, p in layer.named_parameters():  # of the auxiliary losses too, as of a loss that was added to this one
        torch.testing.assert_close(p.grad, 2 * once[name])


@pytest.mark.slow
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("gate", ["sigmoid", "random"])
def test_compiled_passes_count_once(gate, trained):
    layer, body = built(gate, trained)
    call = torch.compile(body, backend="aot_eager")
    for needs_grad in (True, False):
        loss = call(torch.randn(TOKENS, WIDTH, requires_grad=needs_grad)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert counted(layer) == (2 * TOKENS, 2 * TOKENS if gate == "sigmoid" else None)


@pytest.mark.parametrize("gate", ["sigmoid", "random"])
def test_gradients_of_the_experts_alone_count(gate):
    layer, body = built(gate)
    torch.autograd.grad(body(torch.randn(TOKENS, WIDTH)).sum(), list(layer.experts.parameters()))
    assert counted(layer)[0] == TOKENS


@pytest.mark.parametrize("gate", ["sigmoid", "random"])
def test_evaluation_and_no_grad_do_not_count(gate):
    layer, body = built(gate)
    with torch.no_grad():
        body(torch.randn(TOKENS, WIDTH))
    layer.eval()
    body(torch.randn(TOKENS, WIDTH, requires_grad=True)).sum().backward()
    assert counted(layer) == (0, 0 if gate == "sigmoid" else None)


def test_evaluation_in_inference_mode_and_without():
    layer, body = built("naive")
    layer.eval()
    with counting(layer):
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            with mode():
                body(torch.randn(TOKENS, WIDTH))
        assert counted(layer)[0] == 3 * TOKENS


def test_an_output_that_is_changed_in_place_counts():
    layer, _ = built("naive")
    y = layer(torch.randn(3, 4, WIDTH))
    y += 1
    y.relu_().sum().backward()
    assert counted(layer)[0] == TOKENS


def test_the_bias_moves_behind_a_frozen_router():
    layer, body = built("sigmoid", "no router")
    torch.manual_seed(0)  # of a hundred random batches, one is balanced
    body(torch.randn(TOKENS, WIDTH)).sum().backward()
    fmoe.end_step(layer)
    assert layer.gate.expert_bias_E.abs().max().item() == pytest.approx(1e-3)


def test_sums_grow_beyond_what_float32_counts():
    layer, _ = built("sigmoid")

    def add(load, tokens):
        one = torch.tensor(float(tokens))
        stats = RoutingStats(torch.tensor(load), one, one, one)
        layer.aux.record(Routing(torch.empty(0, 2).long(), torch.empty(0, 2), {"sequence_balance": one}, stats))

    add([2.0**25, 2.0**25, 2.0**25, 2.0**25], 2**25)
    for _ in range(64):
        add([1.0, 0.0, 0.0, 0.0], 1)
    assert fmoe.metrics(layer)[""].tokens == 2**25 + 64
    assert layer.metrics.sums()[0] == 2**25 + 64
    fmoe.end_step(layer)
    assert layer.gate.expert_bias_E.tolist() == pytest.approx([-1e-3, 1e-3, 1e-3, 1e-3])
