"""Experts that are frozen: after wrapping, until later, and on some ranks only."""

import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from forks import values
from rank_pool import Raised

import fmoe
from fmoe import parallel
from fmoe.parallel import is_expert

WIDTH, EXPERTS = 8, 4


def build(groups):
    torch.manual_seed(0)
    layer = {"d_model": WIDTH, "num_experts": EXPERTS, "d_hidden": 6, "moe_group": groups.moe_group}
    layers = [fmoe.FMoE(**layer, seed=seed) for seed in (1, 2)]
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), *layers).double()


def freeze(model, is_frozen=True):
    """Freeze the experts of the second layer and the weights going in of the first, or undo it."""
    for name, parameter in model.named_parameters():
        if "2.experts" in name or "1.experts.weight_in" in name:
            parameter.requires_grad_(not is_frozen)


def backward(model):
    x = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    model(x).square().mean().backward()


def compare(model, plain, groups):
    plain.zero_grad()
    backward(plain)
    parallel.average_gradients(plain, groups=groups)
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        if p.grad is None:
            assert q.grad is None, name
        else:
            grad = q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad
            assert_close(grad, p.grad, 1e-12, name)


WRAPPERS = {"ddp": parallel.DistributedDataParallel, "fsdp": parallel.fully_shard}


def later(ep, wrapper, begins_frozen):
    groups = parallel.init(ep=ep)
    model, plain = build(groups), build(groups)
    freeze(model, begins_frozen)
    model = WRAPPERS[wrapper](model, groups)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for is_frozen in (begins_frozen, not begins_frozen, begins_frozen):
        freeze(model, is_frozen)
        freeze(plain, is_frozen)
        backward(model)
        compare(model, plain, groups)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        for parameter, value in zip(model.parameters(), before, strict=True):
            is_unchanged = bool((parameter == value).all())
            assert is_unchanged == (not parameter.requires_grad)
        optimizer.zero_grad()
        plain.load_state_dict({
            name.removeprefix("module."): value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in model.state_dict().items()
        })
    return True


@pytest.mark.parametrize("begins_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("ep", [1, 2])
def test_wrappers_follow_requires_grad(two_ranks, ep, wrapper, begins_frozen):
    assert values(two_ranks.run(later, ep, wrapper, begins_frozen)) == [True, True]


def between():
    groups = parallel.init(ep=1)
    model = parallel.DistributedDataParallel(build(groups), groups)
    loss = model(torch.ones(3, WIDTH, dtype=torch.float64)).square().mean()
    freeze(model)
    loss.backward()
    return {name for name, p in model.module.named_parameters() if p.grad is None}


def test_experts_frozen_between_forward_and_backward_pass(two_ranks):
    for missing in values(two_ranks.run(between)):
        names = {"weight_in", "bias_in", "weight_out", "bias_out"}
        assert missing == {f"2.experts.{name}" for name in names} | {"1.experts.weight_in"}
