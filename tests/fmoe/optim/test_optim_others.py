"""Adafactor by expert, AdamW with 8-bit moments, NVIDIA's fused LAMB where it is installed."""

import functools
import importlib.util

import pytest
import torch
import torch.distributed as dist
from compare import assert_close, relative_error
from forks import only, values
from test_optim_trust import model_like, run, stacked
from torch import nn

from fmoe import MissingPackageError, UserError
from fmoe.optim import Adafactor, AdamW8bit, Lamb, Shards, is_stacked

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


def test_adafactor_steps_experts_one_by_one():
    """As torch's does separate tensors, those of very different norms and stacked biases included."""
    parameters, gradients = model_like()
    tensors = [tensor for p in parameters for tensor in (p.unbind() if is_stacked(p) else [p])]
    apart = [nn.Parameter(tensor.detach().clone()) for tensor in tensors]
    apart_gradients = [
        [g for p, t in zip(parameters, step, strict=True) for g in (t.unbind() if is_stacked(p) else [t])]
        for step in gradients
    ]
    optimizer = Adafactor(parameters, lr=0.1, weight_decay=0.1)
    run(optimizer, parameters, gradients)
    run(torch.optim.Adafactor(apart, lr=0.1, weight_decay=0.1), apart, apart_gradients)
    for actual, expected in zip(tensors, apart, strict=True):
        assert_close(actual, expected, 1e-6, "a tensor")
    stack, biases = parameters[3], parameters[4]
    assert {name: tuple(value.shape) for name, value in optimizer.state[stack].items()} == {
        "step": (),
        "row_var": (3, 4, 1),
        "col_var": (3, 1, 5),
    }
    assert optimizer.state[biases]["variance"].shape == (3, 4)
    assert optimizer.state[stack]["step"] == optimizer.state[parameters[0]]["step"] == len(gradients)


def test_adafactor_skips_empty_tensors():
    """torch's divides by their number of elements."""
    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (0, 3), (0,), (4,))]
    parameters.append(stacked(2, 0, 3))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = Adafactor(parameters, lr=0.1)
    optimizer.step()
    assert all((p != 1).all() for p in parameters if p.numel())
    assert [p.numel() for p in optimizer.state if "step" in optimizer.state[p] and optimizer.state[p]["step"]] == [6, 4]


def decaying_problem(optimizer_of):
    """Noisy steps to a target; the distance at the end."""
    torch.manual_seed(0)
    target = torch.randn(4, 64, 64)
    weight, bias = nn.Parameter(torch.zeros(4, 64, 64)), nn.Parameter(torch.zeros(100))
    optimizer = optimizer_of([weight, bias])
    for step in range(60):
        weight.grad = weight.detach() - target + 0.1 * torch.randn_like(target)
        bias.grad = bias.detach() - 1
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 60)  # a number, as schedulers put it there
        optimizer.step()
    return weight.detach(), bias.detach(), optimizer


@needs_torchao
def test_8_bit_moments_are_close_to_32():
    options = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.01}
    weight, bias, optimizer = decaying_problem(lambda p: AdamW8bit(p, **options))
    exact, exact_bias, _ = decaying_problem(lambda p: torch.optim.AdamW(p, **options))
    assert relative_error(weight, exact) < 0.02
    assert_close(bias, exact_bias, 1e-5, "a small tensor, whose moments are float32")
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert state["exp_avg"].codes.dtype == state["exp_avg_sq"].codes.dtype == torch.uint8
    assert state["exp_avg"].scale.numel() == 4 * 64 * 64 // 256
    assert state["step"] == 60


@needs_torchao
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_moments_are_made_again_from_their_values_exactly(name):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(16, 256))
    optimizer = AdamW8bit([weight])
    for step in range(3):
        weight.grad = torch.randn(16, 256) * 10.0**-step
        optimizer.step()
    moment = optimizer.state[weight][name]
    again = optimizer.moment_of(weight, name, moment.dequantize())
    assert torch.equal(again.dequantize(), moment.dequantize())


def stepped_in_ranges(make, cuts):
    """Step parameters whole, and ranges of them that end at ``cuts`` (fractions); return the largest difference.

    The parameters are two stacks of three experts, a matrix and a vector.
    """
    torch.manual_seed(0)
    stack, biases = nn.Parameter(torch.randn(3, 32, 64)), nn.Parameter(torch.randn(3, 40))
    stack.is_stacked = biases.is_stacked = True
    whole = [stack, biases, nn.Parameter(torch.randn(2, 4096)), nn.Parameter(torch.randn(33))]
    parameters = [nn.Parameter(p.detach().clone()) for p in whole]
    parameters[0].is_stacked = parameters[1].is_stacked = True
    parts = {}
    rank = dist.get_rank()
    for parameter in parameters:
        bounds = [0, *(int(cut * parameter.numel()) for cut in cuts), parameter.numel()]
        begin, end = bounds[rank : rank + 2]
        middle = (begin + end) // 2  # two ranges of a rank, as FSDP2 makes of experts
        flat = parameter.detach().view(-1)
        parts |= {flat[begin:middle].clone(): (parameter, begin), flat[middle:end].clone(): (parameter, middle)}
    optimizers = make(whole), make(list(parts))
    optimizers[1].set_shards(Shards(parts, parameters, dist.group.WORLD))
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    for _ in range(4):
        for parameter in whole:
            parameter.grad = torch.randn_like(parameter)
        for part, (parameter, begin) in parts.items():
            part.grad = whole[numbers[parameter]].grad.view(-1)[begin : begin + part.numel()].clone()
        for optimizer in optimizers:
            optimizer.step()
    differences = [0.0]
    for part, (parameter, begin) in parts.items():
        expected = whole[numbers[parameter]].detach().view(-1)[begin : begin + part.numel()]
        differences += (part - expected).abs().tolist()
    return max(differences)


CUTS = {
    "in blocks": (0.0001, 0.3, 0.61),
    "at blocks": (0.25, 0.5, 0.75),
    "some empty": (0.5, 0.5, 1.0),
    "within one block": (0.5, 0.505, 0.51),
}


@pytest.mark.by_default("in blocks", "some empty")
@pytest.mark.parametrize("name", CUTS)
def test_adafactor_steps_ranges_as_it_steps_whole_parameters(forks, name):
    differences = values(
        forks.run(4, stepped_in_ranges, functools.partial(Adafactor, lr=0.05, weight_decay=0.1), CUTS[name])
    )
    assert max(differences) < 2e-6


@needs_torchao
@pytest.mark.by_default("in blocks", "some empty")
@pytest.mark.parametrize("name", CUTS)
def test_8_bit_moments_of_ranges_are_those_of_whole_parameters(forks, name):
    make = functools.partial(AdamW8bit, lr=0.05, weight_decay=0.1)
    assert values(forks.run(4, stepped_in_ranges, make, CUTS[name])) == [0.0] * 4


def without_torchao():
    import sys

    sys.modules["torchao"] = sys.modules["torchao.optim"] = None
    try:
        AdamW8bit([nn.Parameter(torch.ones(2))])
    except MissingPackageError as error:
        return str(error)


def test_without_torchao_the_extra_is_named(forks):
    says = only(forks.run(1, without_torchao))
    assert says == "AdamW8bit needs the package torchao, which is not installed: pip install 'fmoe[adamw8bit]'"


def test_wrong_values_are_one_line():
    with pytest.raises(UserError, match="lr=-1 "):
        AdamW8bit([nn.Parameter(torch.ones(2))], lr=-1)


@pytest.mark.gpu
def test_apexs_fused_lamb_takes_the_same_steps():
    """NVIDIA's, not the package of that name on PyPI; it knows tensors alone, so experts are given one by one."""
    apex = pytest.importorskip("apex.optimizers", reason="NVIDIA apex is not installed", exc_type=ImportError)
    if not (torch.cuda.is_available() and hasattr(apex, "FusedLAMB")):
        pytest.skip("needs a GPU and apex.optimizers.FusedLAMB")
    parameters, gradients = model_like()
    parameters = [nn.Parameter(p.detach().cuda()) for p in parameters[:1] + parameters[3:4]]
    parameters[1].is_stacked = True
    apart = [nn.Parameter(parameters[0].detach().clone()), *(nn.Parameter(e.clone()) for e in parameters[1].detach())]
    steps = [[step[0].cuda(), step[3].cuda()] for step in gradients]
    options = {"lr": 0.03, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    run(Lamb(parameters, **options), parameters, steps)
    fused = apex.FusedLAMB(apart, **options, max_grad_norm=1e30, use_nvlamb=True)
    run(fused, apart, [[first, *stack] for first, stack in steps])
    for actual, expected in zip([parameters[0], *parameters[1]], apart, strict=True):
        assert_close(actual, expected, 1e-5, "a tensor")
