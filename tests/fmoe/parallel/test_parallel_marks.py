"""Parameters that take the place of others: experts stay experts, stacks stay stacks."""

import copy

import pytest
import torch
from fmoe.distributed import DistributedGroupedDataParallel
from forks import values
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import fmoe
from fmoe import parallel
from fmoe.optim import is_matrix, is_stacked, param_groups

WIDTH, EXPERTS = 8, 4


def build(moe_group=None, device=None):
    with torch.device(device or "cpu"):
        torch.manual_seed(0)
        layer = fmoe.FMoE(
            d_model=WIDTH, num_experts=EXPERTS, d_hidden=6, moe_group=moe_group, seed=1, aux_loss="manual"
        )
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), layer).double()


def assigned(model, groups):
    empty = build(groups.moe_group, "meta")
    empty.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return empty


def distributed_state(model, groups):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    empty = build(groups.moe_group, "meta")
    set_model_state_dict(empty, state, options=StateDictOptions(full_state_dict=True, strict=False))
    for module, twin in zip(empty.modules(), model.modules(), strict=True):
        module._buffers.update(twin._buffers)
    return empty


def replaced(model, groups):
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            module._parameters[name] = None if parameter is None else nn.Parameter(parameter.detach().clone())
    return model


def set_anew(model, groups):
    experts = model[1].experts
    experts.weight_in = nn.Parameter(experts.weight_in.detach().clone())
    return model


class Same(nn.Module):
    def forward(self, x):
        return x.clone()


def parametrized(model, groups):
    nn.utils.parametrize.register_parametrization(model[1].experts, "weight_in", Same())
    return model


def swapped(model, groups):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.float().double().load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return model


def emptied(model, groups):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to_empty(device="cpu").load_state_dict(state)
    return model


def copied(model, groups):
    return copy.deepcopy(model)


ROUTES = [assigned, distributed_state, replaced, set_anew, parametrized, swapped, emptied, copied]


def tokens(rank):
    return torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def reduced(model, groups, way):
    x = tokens(torch.distributed.get_rank())
    if way == "wrapper":
        wrapped = parallel.DistributedDataParallel(model, groups)
        wrapped(x).square().mean().backward()
    elif way == "fastmoe":
        wrapped = DistributedGroupedDataParallel(model)
        wrapped(x).square().mean().backward()
        wrapped.allreduce_params()
        for parameter in model[1].experts.parameters():
            parameter.grad /= groups.ep  # FastMoE sums the tokens' gradients of all ranks
    else:
        model(x).square().mean().backward()
        parallel.average_gradients(model, groups=groups)
    return model


def expected():
    whole = build()
    (sum(whole(tokens(rank)).square().mean() for rank in range(2)) / 2).backward()
    return whole


def _plain(name):
    return name.replace("parametrizations.", "").replace(".original", "")


def compare_with_one_process(route, way):
    groups = parallel.init(ep=2)
    model = reduced(route(build(groups.moe_group), groups), groups, way)
    whole = dict(expected().named_parameters())
    for name, parameter in model.named_parameters():
        grad = whole[_plain(name)].grad
        if ".experts." in name:
            grad = grad.chunk(2)[torch.distributed.get_rank()]
            assert parallel.is_expert(parameter) and is_stacked(parameter), name
            assert is_matrix(parameter) == ("weight" in name)
        torch.testing.assert_close(parameter.grad, grad)
    total = torch.sqrt(sum(p.grad.square().sum() for p in whole.values()))
    torch.testing.assert_close(parallel.grad_norm(model.parameters(), groups=groups), total)
    decayed = [p for group in param_groups(model, 0.1) if group["weight_decay"] for p in group["params"]]
    assert sorted(p.dim() for p in decayed) == [2, 2, 3, 3]


@pytest.mark.cover(1)
@pytest.mark.parametrize("way", ["average", "wrapper", "fastmoe"])
@pytest.mark.parametrize("route", ROUTES)
def test_gradients_are_those_of_one_process_after_parameters_were_replaced(two_ranks, route, way):
    values(two_ranks.run(compare_with_one_process, route, way))


def shard_replaced(route):
    groups = parallel.init(ep=2)
    model = route(build(groups.moe_group), groups)
    before = {_plain(name): p.detach().clone() for name, p in model.named_parameters()}
    parallel.fully_shard(model, groups)
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor()
        assert torch.equal(whole, before[_plain(name)]), name


@pytest.mark.parametrize("route", [route for route in ROUTES if route is not parametrized])
def test_sharding_leaves_replaced_experts_as_they_are(two_ranks, route):
    values(two_ranks.run(shard_replaced, route))


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("normalize", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_stacks_under_weight_norm_stay_stacks(normalize, dim):
    experts = build()[1].experts
    rows, counts = tokens(0), [2, 3, 1, 4]
    expected = experts(rows, counts)
    normalize(experts, "weight_in", dim=dim)
    torch.testing.assert_close(experts(rows, counts), expected)
    stacks = {name: is_stacked(p) for name, p in experts.named_parameters()}
    without = {name for name, p in experts.named_parameters() if not p.dim() or len(p) != EXPERTS}
    assert len(stacks) == 5 and {name for name in stacks if not stacks[name]} == without


def test_parametrized_experts_are_drawn_as_others():
    experts, other = build()[1].experts, build()[1].experts
    nn.utils.parametrizations.weight_norm(other, "weight_in")
    nn.utils.parametrize.register_parametrization(other, "bias_out", Same())
    for parameter in other.parameters():
        parameter.data.fill_(2.0)
    other.reset_parameters()
    for name in ("weight_in", "weight_out", "bias_in", "bias_out"):
        torch.testing.assert_close(getattr(other, name), getattr(experts, name))


def test_a_longer_parameter_of_a_subclass_leaves_the_others_stacks():
    experts = build()[1].experts
    experts.scale = nn.Parameter(torch.ones(16))
    assert all(is_stacked(parameter) for parameter in experts.parameters())
