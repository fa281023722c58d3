"""One suite over every gate x experts x precision x capacity: the layer against a float64 loop over tokens that is
given the same decisions, in values and in the gradients of the input, the router and every expert. The decisions
themselves are those of float64 in every precision, for the router never runs in 16 bits.

What a gate decides is tested in test_gate_*; here its choices are taken from the layer's own gate, and its weights and
losses from a float64 copy of it, so that all that follows is compared.
"""

import contextlib
import copy

import pytest
import torch
from compare import assert_close
from torch import nn

import fmoe
from fmoe.gates import GATES
from fmoe.layout import Layout

BATCH, LENGTH, WIDTH, HIDDEN, EXPERTS = 2, 12, 16, 24, 4
# Name -> dtype of the layer and its input, dtype of autocast or None, limit of the relative error.
PRECISIONS = {
    "float32": (torch.float32, None, 1e-5),
    "bfloat16": (torch.bfloat16, None, 2e-2),
    "float16": (torch.float16, None, 2e-2),
    "autocast_bfloat16": (torch.float32, torch.bfloat16, 2e-2),
    "autocast_float16": (torch.float32, torch.float16, 2e-2),
}


class Block(nn.Module):
    """An expert as a module."""

    def __init__(self, d_model):
        super().__init__()
        self.up, self.down = nn.Linear(d_model, HIDDEN), nn.Linear(HIDDEN, d_model)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


EXPERT_KINDS = {"ffn": "ffn", "swiglu": "swiglu", "modules": Block}


def one_expert(layer, e, row):
    """Expert e of a float64 layer over one row, written out."""
    experts = layer.experts
    if isinstance(experts, nn.ModuleList):
        return experts[e](row)
    hidden = experts.weight_in[e] @ row + experts.bias_in[e]
    gelu, silu = nn.functional.gelu, nn.functional.silu
    hidden = silu(hidden[:HIDDEN]) * hidden[HIDDEN:] if experts.gated else gelu(hidden)
    return experts.weight_out[e] @ hidden + experts.bias_out[e]


def routed(layer, x, token_ids):
    x_TD, groups = Layout(WIDTH).tokens(x, None, token_ids, layer.seed)
    return layer.gate(x_TD, groups)


def cases():
    for gate in sorted(GATES):
        for kind in EXPERT_KINDS:
            for precision in PRECISIONS:
                for factor in (None, 0.75):
                    name = "dropless" if factor is None else "capacity"
                    yield pytest.param(gate, kind, precision, factor, id=f"{gate}-{kind}-{precision}-{name}")


@pytest.mark.cover(2)
@pytest.mark.parametrize(("gate", "kind", "precision", "factor"), list(cases()))
def test_the_layer_is_the_loop(gate, kind, precision, factor):
    dtype, cast_to, limit = PRECISIONS[precision]
    autocast = contextlib.nullcontext if cast_to is None else lambda: torch.autocast("cpu", dtype=cast_to)
    torch.manual_seed(0)
    options = {} if gate in ("zero", "random", "hash") else {"capacity_factor": factor}
    if gate in ("expert_choice", "base") and factor is None:
        options = {}
    layer = fmoe.FMoE(
        d_model=WIDTH,
        num_experts=EXPERTS,
        d_hidden=HIDDEN,
        gate=gate,
        gate_options=options,
        expert=EXPERT_KINDS[kind],
        loss_weights=dict.fromkeys(fmoe.losses.DEFAULT_LOSS_WEIGHTS, 0.1),
        seed=5,
    ).to(dtype)
    x = torch.randn(BATCH, LENGTH, WIDTH).to(dtype).requires_grad_()
    token_ids = torch.randint(0, 100, (BATCH, LENGTH)) if gate == "hash" else None
    upstream = torch.randn(BATCH, LENGTH, WIDTH).to(cast_to or dtype)
    exact = copy.deepcopy(layer).double()
    fmoe.random.set_position(seed=1, step=2)
    with autocast():
        y = layer(x, token_ids=token_ids)
        assert y.dtype == nn.functional.linear(x.detach(), x.new_ones(1, WIDTH)).dtype, "that of torch's Linear"
    y.backward(upstream)
    assert x.grad.dtype == dtype

    x64 = x.detach().double().requires_grad_()
    fmoe.random.set_position(seed=1, step=2)
    with torch.no_grad(), autocast():
        decided_TK = routed(layer, x, token_ids).expert_TK
    fmoe.random.set_position(seed=1, step=2)
    routing = routed(exact, x64, token_ids)
    assert torch.equal(routing.expert_TK, decided_TK), "decisions are those of float64"
    rows = x64.reshape(-1, WIDTH)
    outputs = []
    for t in range(len(rows)):
        total = torch.zeros(WIDTH, dtype=torch.float64)
        for k, e in enumerate(decided_TK[t].tolist()):
            if e >= 0:
                total = total + routing.weight_TK[t, k] * one_expert(exact, e, rows[t])
        outputs.append(total)
    y64 = torch.stack(outputs).view(BATCH, LENGTH, WIDTH)
    loss = (y64 * upstream.double()).sum() + sum(0.1 * value for value in routing.losses.values())
    loss.backward()

    assert_close(y, y64, limit, "output")
    assert_close(x.grad, x64.grad, limit, "gradient of the input")
    for (name, parameter), reference in zip(layer.named_parameters(), exact.parameters(), strict=True):
        expected = torch.zeros_like(reference) if reference.grad is None else reference.grad
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == parameter.dtype and parameter.grad.isfinite().all(), name
        assert_close(parameter.grad, expected, limit, f"gradient of {name}")
