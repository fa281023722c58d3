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
        plain.load_state_dict(
            {
                name.removeprefix("module."): value.full_tensor() if hasattr(value, "full_tensor") else value
                for name, value in model.state_dict().items()
            }
        )
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


# Frozen on some ranks only.


def one_sided(case):
    """Freeze the experts of rank 0, and return the norm and a sum over ranks that follows it."""
    groups = parallel.init(ep=2)
    model = build(groups)
    backward(model)
    parallel.average_gradients(model, groups=groups)
    if dist.get_rank() == 0:
        for parameter in filter(is_expert, model.parameters()):
            parameter.requires_grad_(False)
            parameter.grad = None
    parameters = list(model.parameters())
    if case == "left out":
        parameters = [p for p in parameters if p.requires_grad]
    if case == "sharded":
        for parameter in parameters:
            parameter.grad = None
        parallel.fully_shard(model, groups)
        backward(model)
        parameters = [p for p in model.parameters() if p.requires_grad]
    norm = parallel.grad_norm(parameters, groups=groups)
    following = torch.tensor(100.0 + dist.get_rank())
    dist.all_reduce(following)
    squares = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        if parameter.grad is not None:
            whole = parameter.grad.full_tensor() if case == "sharded" else parameter.grad
            squares += whole.square().sum() / (1 if is_expert(parameter) else 2)
    dist.all_reduce(squares)
    assert_close(norm, squares.sqrt(), 1e-12, "norm")
    parallel.clip_grad_norm_(parameters, norm.item() / 2, groups=groups)
    assert_close(parallel.grad_norm(parameters, groups=groups), norm / 2, 1e-3, "norm after clipping")
    return norm.item(), following.item()


@pytest.mark.parametrize("case", ["all", "left out", "sharded"])
def test_norm_of_experts_that_are_frozen_on_one_rank(two_ranks, case):
    (norm, total), (other, _) = values(two_ranks.run(one_sided, case))
    assert norm == other and total == 201


def one_replica(way):
    groups = parallel.init(ep=1)
    model = build(groups)
    if dist.get_rank() == 0:
        freeze(model)
    if way in WRAPPERS:
        return WRAPPERS[way](model, groups)
    backward(model)
    if way == "average":
        return parallel.average_gradients(model, groups=groups)
    return fmoe.DistributedGroupedDataParallel(model).allreduce_params()


@pytest.mark.parametrize("way", [*WRAPPERS, "average", "fastmoe"])
def test_replicas_of_which_one_is_frozen_are_refused(two_ranks, way):
    for result in two_ranks.run(one_replica, way):
        assert isinstance(result, Raised) and result.kind is fmoe.UserError
        assert "requires_grad of 1.experts.weight_in" in result.message


def partly_meta():
    groups = parallel.init(ep=1)
    with torch.device("meta" if dist.get_rank() else "cpu"):
        return parallel.fully_shard(torch.nn.Linear(2, 2), groups)


def test_sharding_a_model_of_which_one_rank_holds_the_weights_is_refused(two_ranks):
    for result in two_ranks.run(partly_meta):
        assert isinstance(result, Raised) and result.kind is fmoe.UserError and "is_meta of weight" in result.message


def unused_here(way):
    groups = parallel.init(ep=1)
    model = build(groups)
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    (model if dist.get_rank() else model[:1])(x).square().mean().backward()
    mine = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if way == "average":
        parallel.average_gradients(model, groups=groups)
    else:
        fmoe.DistributedGroupedDataParallel(model).allreduce_params()
    for name, parameter in model.named_parameters():
        total = mine.get(name, torch.zeros_like(parameter))
        dist.all_reduce(total)
        assert_close(parameter.grad, total / 2, 1e-12, name)
    return True


@pytest.mark.parametrize("way", ["average", "fastmoe"])
def test_layers_that_one_rank_leaves_out_are_averaged(two_ranks, way):
    assert values(two_ranks.run(unused_here, way)) == [True, True]


def first_layer(exchange):
    """A layer whose input, gate and experts are frozen on rank 0, whose tokens rank 1's experts get."""
    groups = parallel.init(ep=2)
    options = {"d_model": WIDTH, "num_experts": EXPERTS, "d_hidden": 6, "seed": 1, "aux_loss": "manual"}
    layer = fmoe.FMoE(**options, moe_group=groups.moe_group, exchange=exchange)
    whole = fmoe.FMoE(**options)
    layer.gate.requires_grad_(False)
    layer.experts.requires_grad_(dist.get_rank() == 1)
    xs = [torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    out = layer(xs[dist.get_rank()])
    out.square().sum().backward() if out.requires_grad else None
    sum(whole(x).square().sum() for x in xs).backward()
    if dist.get_rank() == 1:
        assert_close(layer.experts.weight_in.grad, whole.experts.weight_in.grad[EXPERTS // 2 :], 1e-5, "gradient")
    return True


@pytest.mark.parametrize("exchange", ["all_to_all", "padded", "all_gather", "hierarchical"])
def test_all_ranks_join_the_backward_pass(two_ranks, exchange):
    assert values(two_ranks.run(first_layer, exchange)) == [True, True]


def parted():
    """Each replica freezes another layer after wrapping."""
    groups = parallel.init(ep=1)
    model = parallel.DistributedDataParallel(build(groups), groups)
    model.module[1 + dist.get_rank()].experts.requires_grad_(False)
    backward(model)


def test_replicas_that_freeze_different_experts_are_refused(two_ranks):
    for result in two_ranks.run(parted):
        assert isinstance(result, Raised) and result.kind is fmoe.UserError and "requires_grad of" in result.message


# Frozen after wrapping, on one rank only.


def experts_of(model):
    return model.module[1].experts


def one_sided_later(is_before):
    """Rank 0 freezes a tensor before a forward pass or between it and its backward pass, and unfreezes it later."""
    groups = parallel.init(ep=1)
    model, plain = parallel.DistributedDataParallel(build(groups), groups), build(groups)
    backward(model)
    with model.no_sync():  # no collective here, so no error either
        experts_of(model).weight_in.requires_grad_(dist.get_rank() == 1)
        backward(model)
        experts_of(model).weight_in.requires_grad_(True)
    model.zero_grad()
    weight = experts_of(model).weight_out
    is_trained = dist.get_rank() == 1
    if is_before:
        weight.requires_grad_(is_trained)
    else:
        loss = model(torch.ones(3, WIDTH, dtype=torch.float64)).square().mean()
        weight.requires_grad_(is_trained)
        loss.backward()
        assert (weight.grad is not None) == is_trained
    with pytest.raises(fmoe.UserError, match=r"requires_grad of .*1\.experts\.weight_out"):
        backward(model)
    weight.requires_grad_(True)
    model.zero_grad()
    backward(model)
    compare(model, plain, groups)
    return True


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "between"])
def test_a_tensor_that_one_rank_freezes_after_wrapping_is_refused_on_all(two_ranks, is_before):
    assert values(two_ranks.run(one_sided_later, is_before)) == [True, True]


def frozen_in_between():
    """A gradient of an earlier pass stays while its tensor is frozen between the passes of a later one."""
    groups = parallel.init(ep=1)
    model = parallel.DistributedDataParallel(build(groups), groups)
    backward(model)
    weight = experts_of(model).weight_out
    before = weight.grad.clone()
    loss = model(torch.ones(3, WIDTH, dtype=torch.float64)).square().mean()
    weight.requires_grad_(False)
    loss.backward()
    assert torch.equal(weight.grad, before)
    return True


def test_gradients_of_tensors_frozen_between_the_passes_stay(two_ranks):
    assert values(two_ranks.run(frozen_in_between)) == [True, True]
