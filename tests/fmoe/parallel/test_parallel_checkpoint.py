"""Checkpoints of one's own loop: `fmoe.parallel.state_dict` through torch.distributed.checkpoint at every split, and
states of one rank, which other ranks refuse."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compare import assert_close
from forks import values
from rank_pool import Raised
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import fmoe
from fmoe import parallel

WIDTH, EXPERTS, BATCH = 8, 4, 8


class Model(torch.nn.Module):
    """A layer of stacked experts and a layer of experts that are modules."""

    def __init__(self, moe_group=None):
        super().__init__()
        common = {"d_model": WIDTH, "num_experts": EXPERTS, "moe_group": moe_group}
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.stacked = fmoe.FMoE(**common, d_hidden=5, expert="swiglu", gate="sigmoid", seed=7)
        self.listed = fmoe.FMoE(**common, expert=lambda width: torch.nn.Linear(width, width), seed=8)

    def forward(self, x):
        return self.listed(x + self.stacked(self.first(x)))


def build(moe_group=None):
    torch.manual_seed(0)
    return Model(moe_group).double()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, step, groups=None):
    x = torch.randn(BATCH, 3, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    if groups is not None:
        x = x.chunk(groups.size)[dist.get_rank()]
    model(x).square().mean().backward()
    if type(model) is Model and groups is not None:
        parallel.average_gradients(model, groups=groups)
    optimizer.step()
    optimizer.zero_grad()


WRAPPERS = {
    "plain": lambda model, groups: model,
    "ddp": parallel.DistributedDataParallel,
    "fsdp": parallel.fully_shard,
    "hsdp": parallel.fully_shard,
}
MOST = [*WRAPPERS][:3]


def started(wrapper, ep):
    groups = parallel.init(ep=ep, shard_size=dist.get_world_size() // 2 if wrapper == "hsdp" else None)
    model = build(groups.moe_group)
    model = WRAPPERS[wrapper](model, groups)
    return model, adam(model), groups


def scramble(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def state_of(model, optimizer, groups):
    return {
        "model": parallel.state_dict(model, groups),
        "optimizer": parallel.optimizer_state_dict(model, optimizer, groups),
    }


def save(folder, wrapper, ep):
    model, optimizer, groups = started(wrapper, ep)
    train(model, optimizer, 0, groups)
    dcp.save(state_of(model, optimizer, groups), checkpoint_id=folder)
    return True


def resume(folder, wrapper, ep):
    """Load, take the second step, and return the parameters of this rank's model as whole tensors."""
    model, optimizer, groups = started(wrapper, ep)
    scramble(model)
    state = state_of(model, optimizer, groups)
    dcp.load(state, checkpoint_id=folder)
    parallel.load_state_dict(model, state["model"], groups)
    parallel.load_optimizer_state_dict(model, optimizer, state["optimizer"], groups)
    train(model, optimizer, 1, groups)
    return {name: whole(value).numpy() for name, value in parallel.state_dict(model, groups).items()}


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def save_alone(folder):
    """As anyone saves a model of one process."""
    model = build()
    optimizer = adam(model)
    train(model, optimizer, 0)
    optimizer_state = get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": get_model_state_dict(model), "optimizer": optimizer_state}, checkpoint_id=folder, no_dist=True)


def resume_alone(folder):
    model = build()
    optimizer = adam(model)
    scramble(model)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, 1)
    return {name: value.numpy() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def expected():
    model = build()
    optimizer = adam(model)
    for step in range(2):
        train(model, optimizer, step)
    return model.state_dict()


def assert_resumed(ranks, expected):
    seen = set()
    for rank in ranks:
        for name, value in rank.items():
            assert_close(torch.from_numpy(value), expected[name], 1e-10, name)
        seen |= rank.keys()
    assert seen == expected.keys()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_checkpoint_of_two_ranks_loads_at_every_split(two_ranks, tmp_path, expected, wrapper):
    assert values(two_ranks.run(save, tmp_path, wrapper, 2)) == [True, True]
    assert_resumed([resume_alone(tmp_path)], expected)
    for ep in (1, 2):
        assert_resumed(values(two_ranks.run(resume, tmp_path, wrapper, ep)), expected)


@pytest.mark.parametrize("wrapper", MOST)
def test_a_checkpoint_of_one_process_loads_on_two_ranks(two_ranks, tmp_path, expected, wrapper):
    save_alone(tmp_path)
    assert_resumed(values(two_ranks.run(resume, tmp_path, wrapper, 2)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize(("ep", "then"), [(1, 4), (4, 2), (2, 1)])
def test_checkpoints_of_four_ranks(four_ranks, tmp_path, expected, wrapper, ep, then):
    values(four_ranks.run(save, tmp_path, wrapper, ep))
    assert_resumed(values(four_ranks.run(resume, tmp_path, wrapper, then)), expected)
    assert_resumed([resume_alone(tmp_path)], expected)


def wrapped_names():
    groups = parallel.init(ep=2)
    names = set(parallel.state_dict(build(groups.moe_group), groups))
    inner = build(groups.moe_group)
    inner.stacked = checkpoint_wrapper(inner.stacked)
    inner.listed = torch.compile(inner.listed)
    model = torch.compile(parallel.DistributedDataParallel(inner, groups))
    assert parallel.state_dict(model, groups).keys() == names
    assert parallel.optimizer_state_dict(model, adam(model), groups)["state"].keys() < names
    return names


def test_names_do_not_depend_on_wrappers(two_ranks):
    names = values(two_ranks.run(wrapped_names))
    assert set.union(*names) == set(build().state_dict())


def whole_state(wrapper):
    """Load the state of one process, as torch.load returns it."""
    model, optimizer, groups = started(wrapper, 2)
    alone = build()
    scramble(model)
    alone_optimizer = adam(alone)
    train(alone, alone_optimizer, 0)
    parallel.load_state_dict(model, alone.state_dict(), groups)
    state = copy.deepcopy(get_optimizer_state_dict(alone, alone_optimizer))  # optimizers keep the tensors they load
    parallel.load_optimizer_state_dict(model, optimizer, state, groups)
    for step in (1, 2):
        train(alone, alone_optimizer, step)
        train(model, optimizer, step, groups)
    for name, value in parallel.state_dict(model, groups).items():
        assert_close(whole(value), alone.state_dict()[name], 1e-10, name)
    return True


@pytest.mark.parametrize("wrapper", MOST)
def test_the_state_of_one_process_loads_at_two_ranks(two_ranks, wrapper):
    assert values(two_ranks.run(whole_state, wrapper)) == [True, True]


# States of one rank.


def one_ranks_checkpoint(folder, wrapper):
    """torch.distributed.checkpoint of torch's state dict, which has the experts of one rank."""
    model, _, _ = started(wrapper, 2)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    scramble(model)
    state = {"model": get_model_state_dict(model)}
    try:
        dcp.load(state, checkpoint_id=folder)
    except BaseException as error:  # torch's CheckpointException is no Exception
        assert not any(whole(p).any() for p in model.parameters())  # nothing was overwritten
        return str(error)


@pytest.mark.parametrize("wrapper", MOST)
def test_a_checkpoint_of_one_ranks_experts_is_refused_on_all_ranks(two_ranks, tmp_path, wrapper):
    for result in values(two_ranks.run(one_ranks_checkpoint, tmp_path, wrapper)):
        assert "stacked.one_rank.experts" in result


def foreign(folder, how):
    """Load the first rank's file on every rank."""
    model, _, groups = started("ddp" if how == "set" else "plain", 2)
    state = get_model_state_dict(model) if how == "set" else model.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, folder / "state.pt")
    dist.barrier()
    state = torch.load(folder / "state.pt")
    if how == "set":
        set_model_state_dict(model, state)
    elif how == "ours":
        parallel.load_state_dict(model, state, groups)
    elif how == "alone":
        build().load_state_dict(state, strict=False)
    else:
        model.load_state_dict(state, strict=how == "strict")
    return True


@pytest.mark.parametrize("how", ["strict", "lenient", "set", "ours", "alone"])
def test_another_ranks_experts_are_refused(two_ranks, tmp_path, how):
    first, second = two_ranks.run(foreign, tmp_path, how)
    assert isinstance(second, Raised) and second.kind is fmoe.UserError and "experts" in second.message
    if how in ("ours", "alone"):
        assert isinstance(first, Raised) and first.kind is fmoe.UserError
    else:
        assert first is True


def own_file(folder):
    """Every rank saves and loads a file of its own, as before."""
    from safetensors.torch import load_file, save_file

    model, _, groups = started("plain", 2)
    state = model.state_dict()
    assert [name for name in state if name.endswith("_extra_state")] == [
        f"{layer}.one_rank.experts._extra_state" for layer in ("stacked", "listed")
    ]
    path = folder / f"{dist.get_rank()}.safetensors"
    save_file(state, path)
    other = build(groups.moe_group)
    for strict in (True, False):
        scramble(other)
        other.load_state_dict(load_file(path), strict=strict)
        assert torch.equal(other.stacked.experts.weight_in, model.stacked.experts.weight_in)
    old = {name: value for name, value in state.items() if not name.endswith("_extra_state")}
    scramble(other)
    other.load_state_dict(old)  # of an earlier release
    assert torch.equal(other.listed.experts[1].weight, model.listed.experts[1].weight)
    wrapped = parallel.DistributedDataParallel(other, groups)
    set_model_state_dict(wrapped, copy.deepcopy(get_model_state_dict(wrapped)))
    wrapped.load_state_dict(wrapped.state_dict())
    return True


def test_a_file_per_rank_loads_on_its_rank(two_ranks, tmp_path):
    assert values(two_ranks.run(own_file, tmp_path)) == [True, True]


class Quantized(torch.Tensor):
    """As the moments of 8-bit optimizers."""


def misfit(case):
    model, optimizer, groups = started("plain", 2)
    state = state_of(model, optimizer, groups)
    if case == "missing":
        del state["model"]["stacked.experts.weight_in"]
        parallel.load_state_dict(model, state["model"], groups, strict=False)
        parallel.load_state_dict(model, state["model"], groups)
    if case == "unknown":
        state["model"]["stacked.other"] = torch.zeros(1)
        parallel.load_state_dict(model, state["model"], groups)
    if case == "part":
        state["model"]["stacked.experts.weight_in"] = model.stacked.experts.weight_in.detach()
        parallel.load_state_dict(model, state["model"], groups)
    if case == "optimizer":
        del state["optimizer"]["state"]["stacked.experts.weight_in"]
        parallel.load_optimizer_state_dict(model, optimizer, state["optimizer"], groups)
    if case == "groups":
        state["optimizer"]["param_groups"] *= 2
        parallel.load_optimizer_state_dict(model, optimizer, state["optimizer"], groups)
    if case == "quantized":
        moment = torch.zeros(2, 10, 8).as_subclass(Quantized)
        optimizer.state[model.stacked.experts.weight_in] = {"exp_avg": moment}
        parallel.optimizer_state_dict(model, optimizer, groups)
    if case == "axis":
        optimizer.state[model.stacked.experts.weight_in] = {"block": torch.zeros(3)}
        parallel.optimizer_state_dict(model, optimizer, groups)


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("missing", fmoe.UserError, "stacked.experts.weight_in"),
        ("unknown", RuntimeError, "stacked.other"),
        ("part", fmoe.UserError, "stacked.experts.weight_in has shape (2, 10, 8)"),
        ("optimizer", fmoe.UserError, "stacked.experts.weight_in"),
        ("groups", fmoe.UserError, "2 parameter groups"),
        ("quantized", fmoe.UserError, "exp_avg of stacked.experts.weight_in is a Quantized"),
        ("axis", fmoe.UserError, "block of stacked.experts.weight_in has shape (3,)"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_states_that_do_not_fit(two_ranks, case, kind, message):
    for result in two_ranks.run(misfit, case):
        assert isinstance(result, Raised) and result.kind is kind and message in result.message, result
