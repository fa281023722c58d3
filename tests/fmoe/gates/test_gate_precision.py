"""The router of a 16-bit model: logits in float32, and no float32 copy of the tokens kept for the backward pass."""

import pytest
import torch
from compare import assert_close
from torch.autograd.graph import saved_tensors_hooks

from fmoe.gates import build_gate
from fmoe.gates.naive import NaiveRouter
from fmoe.routing import RoutingGroups

T, D, E = 96, 256, 4
PLAIN = ["naive", "sigmoid", "gshard", "sinkhorn", "base", "expert_choice", "swipe"]


def tokens(dtype):
    return torch.randn(T, D, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


def results(gate, x):
    """Weights, choices and gradients; with the bytes that the gate saved of tensors as large as the tokens."""
    torch.manual_seed(0)  # of noise
    kept = {}

    def pack(tensor):
        if tensor.numel() >= T * D and tensor.data_ptr() != x.data_ptr():
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        routing = gate(x, RoutingGroups(2, T // 2))
    loss = routing.weight_TK.float().square().sum() + sum(routing.losses.values())
    loss.backward()
    gradients = {name: p.grad for name, p in gate.named_parameters() if p.grad is not None}
    return routing.expert_TK, {"weights": routing.weight_TK, "x": x.grad, **gradients}, sum(kept.values())


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", PLAIN)
def test_no_copy_of_the_tokens_is_kept(name, bias, weights):
    gate = build_gate(name, D, E, None, bias=bias).to(weights)
    experts, found, kept = results(gate, tokens(torch.bfloat16))
    exact = build_gate(name, D, E, None, bias=bias).double()
    exact.load_state_dict({key: value.double() for key, value in gate.state_dict().items()})
    expected_experts, expected, _ = results(exact, tokens(torch.bfloat16).detach().double().requires_grad_())
    assert kept <= 0.1 * T * D * 2
    assert torch.equal(experts, expected_experts)
    for key, value in expected.items():
        assert_close(found[key], value, 1e-5 if found[key].dtype == torch.float32 else 1e-2, key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_second_derivatives(dtype):
    gate, x = build_gate("naive", D, E, 2).to(dtype), tokens(dtype)
    double = build_gate("naive", D, E, 2).double()
    double.load_state_dict({key: value.double() for key, value in gate.state_dict().items()})

    def second(gate, x):
        weight = gate(x, RoutingGroups(2, T // 2)).weight_TK
        (first,) = torch.autograd.grad(weight.double().square().sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(first.double().square().sum(), gate.weight)
        return found

    assert_close(second(gate, x), second(double, tokens(dtype).detach().double().requires_grad_()), 3e-2, "second")


class OfInput(NaiveRouter):
    """Chooses by its input, which must be in float32."""

    def choose(self, scores, groups):
        self.seen = scores.x_TD.dtype
        return super().choose(scores, groups)


class OtherInput(NaiveRouter):
    routes_by_logits = True

    def router_input(self, x_TD, groups):
        self.seen = x_TD.dtype
        return 2 * x_TD


@pytest.mark.parametrize("kind", [OfInput, OtherInput])
def test_gates_that_use_their_input_get_it_in_float32(kind):
    gate = kind(D, E, 2).to(torch.bfloat16)
    gate(tokens(torch.bfloat16), RoutingGroups(2, T // 2))
    assert gate.seen == torch.float32
