"""Every way of data parallelism with experts equals one process on the same global batch: loss, every gradient, the
gradient norm, parameters after three steps, with clipping and two micro batches a step."""

import contextlib

import numpy
import pytest
import torch
import torch.distributed as dist
from compare import assert_close, relative_error
from forks import values
from torch.distributed.tensor import DTensor

import fmoe
from fmoe import parallel
from fmoe.parallel import is_expert

BATCH, LENGTH, WIDTH, OUT, EXPERTS, STEPS, MICRO, MAX_NORM = 8, 6, 16, 6, 4, 3, 2, 0.05
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=5.0),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
}
SPLITS = {"dp2": (1, 2), "ep2": (2, 1), "ep4": (4, 1), "ep2-dp2": (2, 2)}  # (ep, dp)


class Model(torch.nn.Module):
    """Dense parts before, between and after two layers: one of stacked experts, one of modules beside a shared one."""

    def __init__(self, moe_group):
        super().__init__()
        common = {"d_model": WIDTH, "num_experts": EXPERTS, "loss_weights": {"balance": 0.1, "z": 0.01}}
        gate = {"gate": "switch", "gate_options": {"jitter": 0.2, "capacity_factor": 1.0}}
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.stacked = fmoe.FMoE(**common, **gate, d_hidden=20, moe_group=moe_group, seed=7)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.listed = fmoe.FMoE(**common, expert=Expert, shared_expert=12, gate="gshard", moe_group=moe_group, seed=8)
        self.last = torch.nn.Linear(WIDTH, OUT)

    def forward(self, x):
        x = x + self.stacked(self.first(x))
        return self.last(x + self.listed(self.norm(x)))


class Expert(torch.nn.Sequential):
    def __init__(self, d_model):
        super().__init__(torch.nn.Linear(d_model, 12), torch.nn.Tanh(), torch.nn.Linear(12, d_model))


def build(dtype, moe_group=None):
    torch.manual_seed(0)
    model = Model(moe_group).to(dtype)
    with torch.no_grad():
        model.stacked.gate.weight.mul_(6)  # decided routers: uneven loads
        model.listed.gate.weight.mul_(6)
    return model


def batches(dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randn(STEPS, BATCH, LENGTH, OUT, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def wrap(model, wrapper, groups):
    """The wrapped model, and what is to be done after the last backward pass of a step."""
    if wrapper == "ddp":
        return parallel.DistributedDataParallel(model, groups, bucket_cap_mb=0.001), lambda: None
    if wrapper == "fsdp":
        return parallel.fully_shard(model, groups), lambda: None
    if wrapper == "average":
        return model, lambda: parallel.average_gradients(model, groups=groups)
    for parameter in model.parameters():
        parameter.dp_comm = "moe" if is_expert(parameter) else "dp"
    grouped = fmoe.DistributedGroupedDataParallel(model, dp_group=groups.data_group, moe_group=groups.expert_data_group)

    def reduce():
        # FastMoE's mean is over the group of each tag; that over all tokens is their sum by the whole data group.
        grouped.allreduce_params(no_scale=True)
        for parameter in model.parameters():
            parameter.grad /= groups.size

    return grouped, reduce


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(wrapper, split, dtype, optimizer_name):
    """By name, what is to be the same at every split; of experts, those of this rank."""
    rank, size, micro, groups = 0, 1, 1, None
    if wrapper != "alone":
        groups = parallel.init(*SPLITS[split])
        rank, size, micro = dist.get_rank(), dist.get_world_size(), MICRO
    inner = build(dtype, groups and groups.moe_group)
    model, reduce = wrap(inner, wrapper, groups) if groups else (inner, lambda: None)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    x, y = batches(dtype)
    share = BATCH // size // micro
    fmoe.set_loss_scale(1 / micro)
    seen = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=dtype)
        for part in range(micro):
            begin = (rank * micro + part) * share
            fmoe.random.set_position(seed=2, step=step, first_token=begin * LENGTH)
            mine = slice(begin, begin + share)
            with parallel.no_sync(model) if part < micro - 1 else contextlib.nullcontext():
                loss = (model(x[step, mine]) - y[step, mine]).square().mean() / micro
                loss.backward()
            total += loss.detach()
        reduce()
        if groups:
            dist.all_reduce(total)
        seen[f"step {step}: loss"] = total / size
        for name, parameter in inner.named_parameters():
            seen[f"step {step}: gradient of {name}"] = whole(parameter.grad)
        norm = parallel.clip_grad_norm_(model.parameters(), MAX_NORM, groups=groups)
        seen[f"step {step}: gradient norm"] = norm
        clipped = parallel.grad_norm(model.parameters(), groups=groups)
        assert norm > MAX_NORM and clipped.item() == pytest.approx(MAX_NORM, rel=1e-3), "nothing was clipped"
        optimizer.step()
    for name, parameter in inner.named_parameters():
        seen[name] = whole(parameter)
        assert is_expert(parameter) == (".experts." in name)
    fmoe.set_loss_scale(1.0)
    return {name: value.numpy() for name, value in seen.items()}


def held(ranks, name, ep, dp):
    """Collect what the ranks hold under a name of the single process: once, or once per replica."""
    if ".experts." not in name:
        return [rank[name] for rank in ranks]
    rows = [ranks[row * ep : (row + 1) * ep] for row in range(dp)]
    if ".experts.weight" in name or ".experts.bias" in name:  # stacked in the order of a row's ranks
        return [numpy.concatenate([rank[name] for rank in row]) for row in rows]
    before, after = name.split(".experts.")
    number, after = after.split(".", 1)
    holder, local = divmod(int(number), EXPERTS // ep)
    return [row[holder][f"{before}.experts.{local}.{after}"] for row in rows]


def equal_one_process(pool, wrapper, split, dtype, optimizer):
    ranks = values(pool.run(train, wrapper, split, dtype, optimizer))
    alone = train("alone", split, dtype, optimizer)
    limit = 1e-5 if dtype == torch.float32 else 1e-10
    worst = 0.0
    for name, value in alone.items():
        expected = torch.from_numpy(value)
        for actual in map(torch.from_numpy, held(ranks, name, *SPLITS[split])):
            assert_close(actual, expected, limit, name)
            worst = max(worst, relative_error(actual, expected))
    print(f"{wrapper} {split} {dtype} {optimizer}: worst relative error {worst:.1e}")


WRAPPERS = pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "grouped", "average"])


@pytest.mark.cover(1)
@pytest.mark.parametrize("split", ["dp2", "ep2"])
@WRAPPERS
def test_two_ranks_equal_one(two_ranks, wrapper, split):
    equal_one_process(two_ranks, wrapper, split, torch.float32, "sgd")
    equal_one_process(two_ranks, wrapper, split, torch.float64, "adamw")


@pytest.mark.slow
@pytest.mark.parametrize("split", ["ep4", "ep2-dp2"])
@WRAPPERS
def test_four_ranks_equal_one(four_ranks, wrapper, split):
    equal_one_process(four_ranks, wrapper, split, torch.float32, "adamw")
    equal_one_process(four_ranks, wrapper, split, torch.float64, "sgd")
