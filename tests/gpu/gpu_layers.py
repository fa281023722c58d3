"""Layers on the cuda backend and their float64 twins. Not a test itself."""

import torch
from compare import assert_close
from torch import Tensor

import fmoe
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import RoutingGroups

LIMITS = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def layer_of(backend="cuda", dtype=torch.bfloat16, **options):
    """A small layer on the GPU."""
    defaults = {"d_model": 128, "num_experts": 16, "d_hidden": 192, "top_k": 2, "gate": "naive", "seed": 3}
    return fmoe.FMoE(**{**defaults, **options}, backend=backend).to("cuda", dtype)


def tokens(count=512, width=128, dtype=torch.bfloat16, seed=0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def results(layer, x, run=None):
    """Output and all gradients."""
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = layer(x) if run is None else run(layer, x)
    y.double().square().mean().mul(100).backward()
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def assert_like_float64(layer, options, x, run=None):
    plain = layer_of("torch", torch.float64, **options)
    plain.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    found = results(layer, x, run)
    expected = results(plain, x.double(), run)
    for name, value in expected.items():
        assert_close(found[name], value, LIMITS[x.dtype], name)


def straight(layer, x):
    """From tokens to outputs, without what the layer keeps of it."""
    routing = layer.gate(x, RoutingGroups(1, x.shape[0]))
    plan = DispatchPlan.from_routing(routing, layer.num_experts)
    return layer.experts.fused_forward(x, plan.count_E, **plan.fused_arguments(routing.weight_TK))
