"""Launches of a layer's forward and backward pass on a GPU, counted on the CPU: bfloat16, losses and statistics on."""

import pytest
import torch
from emulator import on_cpu
from launches import LaunchCounter, products_of_a_gpu

import fmoe

LIMITS = {
    ("naive", "swiglu"): (10, 11),
    ("naive", "ffn"): (10, 11),  # with biases, whose gradients `combine` of the tokens' gradient computes too
    ("switch", "swiglu"): (12, 12),
    ("switch", "ffn"): (12, 12),
}


def counted(kernels, monkeypatch, gate, expert, scale=0.5, **options):
    """Launches by name of the second forward and backward pass, as a trainer runs them."""
    sizes = {"d_model": 16, "num_experts": 4, "d_hidden": 16, "top_k": 2 if gate == "naive" else 1, "seed": 3}
    experts = {"bias": expert == "ffn", "gemm": "grouped"}
    products_of_a_gpu(monkeypatch)
    with on_cpu(kernels) as launcher:
        layer = fmoe.FMoE(
            **sizes, gate=gate, expert=expert, expert_options=experts, backend="cuda", **options
        ).bfloat16()
        g = torch.Generator().manual_seed(0)
        x, grad = (torch.randn(2, 1040, 16, generator=g).bfloat16() for _ in range(2))
        try:
            fmoe.set_loss_scale(scale)
            for number in range(2):
                fmoe.random.set_position(1, number)
                x = x.detach().requires_grad_()
                layer.zero_grad(set_to_none=True)
                with LaunchCounter(launcher) as counter:
                    y = layer(x)
                    forward = counter.take()
                    y.backward(grad)
                    backward = counter.take()
        finally:
            fmoe.set_loss_scale(1.0)
    return forward, backward


@pytest.mark.by_default("switch-swiglu")
@pytest.mark.parametrize(("gate", "expert"), LIMITS)
def test_launches_of_a_layer(gate, expert, kernels, monkeypatch, capsys):
    passes = counted(kernels, monkeypatch, gate, expert)
    with capsys.disabled():
        for name, counts in zip(("forward", "backward"), passes, strict=True):
            listed = ", ".join(f"{n} {kernel}" for kernel, n in sorted(counts.items()))
            print(f"\n{gate} {expert} {name}: {counts.total()} ({listed})", end="")
    assert tuple(counts.total() for counts in passes) == LIMITS[gate, expert]
