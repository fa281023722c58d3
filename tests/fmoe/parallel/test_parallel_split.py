"""EP=2 equals EP=1 in plain torch: loss, every gradient, gradient norm, and parameters after 5 optimizer steps."""

import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from forks import values

import fmoe
from fmoe.parallel import average_gradients, clip_grad_norm_, grad_norm, is_expert

BATCH, LENGTH, WIDTH, OUT, EXPERTS, STEPS, MAX_NORM = 8, 12, 16, 6, 4, 5, 0.05
GATES = {
    "naive": ("naive", {}),
    "switch": ("switch", {"jitter": 0.2}),
    "gshard": ("gshard", {}),
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=5.0),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
}


def build(gate, factor, dtype, group):
    torch.manual_seed(0)
    name, options = GATES[gate]
    capacity = {"capacity_factor": factor, "eval_capacity_factor": factor}
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH),
        fmoe.FMoE(
            d_model=WIDTH,
            num_experts=EXPERTS,
            d_hidden=20,
            gate=name,
            gate_options=options | capacity,
            loss_weights={"balance": 0.1, "z": 0.01},
            moe_group=group,
            seed=7,
        ),
        torch.nn.Linear(WIDTH, OUT),
    ).to(dtype)
    with torch.no_grad():
        model[1].gate.weight.mul_(6)  # decided routers: uneven loads
    return model


def train(split, gate, factor, dtype):
    """By name, what is to be the same at every split, of the experts those of this rank. ``split`` is "alone", "ep2" or
    "dp2"."""
    world = None if split == "alone" else dist.group.WORLD
    moe_group = world if split == "ep2" else None
    rank, size = (0, 1) if world is None else (dist.get_rank(), world.size())
    share = BATCH // size
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randn(STEPS, BATCH, LENGTH, OUT, generator=generator, dtype=torch.float64).to(dtype)
    seen = {}
    for optimizer_name, make in OPTIMIZERS.items():
        model = build(gate, factor, dtype, moe_group)
        assert sum(map(is_expert, model.parameters())) == 4
        optimizer = make(model.parameters())
        for step in range(STEPS):
            fmoe.random.set_position(seed=2, step=step, first_token=rank * share * LENGTH)
            mine = slice(rank * share, (rank + 1) * share)
            loss = (model(x[step, mine]) - y[step, mine]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            loss = loss.detach()
            if world is not None:
                dist.all_reduce(loss)
                average_gradients(model, world, None if split == "ep2" else world)
            key = f"{optimizer_name}, step {step}: "
            seen[f"{key}loss"] = loss / size
            for name, parameter in model.named_parameters():
                seen[f"{key}gradient of {name}"] = parameter.grad.clone()
            norm = clip_grad_norm_(model.parameters(), MAX_NORM, moe_group)
            seen[f"{key}gradient norm"] = norm
            clipped = grad_norm(model.parameters(), moe_group)
            assert norm > MAX_NORM and clipped.item() == pytest.approx(MAX_NORM, rel=1e-3), "nothing was clipped"
            optimizer.step()
        for name, parameter in model.named_parameters():
            seen[f"{optimizer_name}: {name}"] = parameter.detach()
    sums = model[1].metrics.sums()  # of the last optimizer
    if world is not None:
        dist.all_reduce(sums)
    seen["drop rate"] = torch.tensor(model[1].metrics.report(sums).drop_rate)
    return {name: value.numpy() for name, value in seen.items()}


def train_all(*case):
    return {split: train(split, *case) for split in ("alone", "ep2", "dp2")}


@pytest.mark.cover(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("factor", [None, 0.75], ids=["dropless", "capacity"])
@pytest.mark.parametrize("gate", GATES)
def test_two_ranks_equal_one(two_ranks, gate, factor, dtype):
    ranks = values(two_ranks.run(train_all, gate, factor, dtype))
    alone = ranks[0]["alone"]
    assert (alone["drop rate"] > 0) == (factor is not None)
    limit = 1e-5 if dtype == torch.float32 else 1e-10
    for split in ("ep2", "dp2"):
        for name, value in alone.items():
            expected = torch.from_numpy(value)
            found = [torch.from_numpy(rank[split][name]) for rank in ranks]
            if split == "ep2" and ".experts." in name:
                found = [torch.cat(found)]
            for rank, actual in enumerate(found):
                assert_close(actual, expected, limit, f"{split}, rank {rank}, {name}")


class BrokenGate(fmoe.gates.NaiveRouter):
    """Fails on the ranks it is told to."""

    def __init__(self, d_model, num_experts, top_k, *, ranks):
        super().__init__(d_model, num_experts, top_k)
        self.ranks = ranks

    def forward(self, x_TD, groups):
        if dist.get_rank() in self.ranks:
            raise ArithmeticError(f"rank {dist.get_rank()} has no router today")
        return super().forward(x_TD, groups)


def with_a_broken_gate(ranks):
    layer = fmoe.FMoE(
        d_model=WIDTH,
        num_experts=EXPERTS,
        d_hidden=20,
        gate=BrokenGate,
        gate_options={"ranks": ranks},
        moe_group=dist.group.WORLD,
    )
    x = torch.ones(4, WIDTH)
    try:
        layer(x)
        raised = None
    except Exception as error:
        raised = (type(error).__name__, str(error))
    layer.gate.ranks = ()
    again = layer(x).isfinite().all().item()  # the exchange is usable
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)  # and so is the group
    return raised, again, total.item()


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)], ids=str)
def test_an_error_before_the_exchange_is_an_error_everywhere(two_ranks, ranks):
    found = values(two_ranks.run(with_a_broken_gate, ranks))
    for rank, (raised, again, total) in enumerate(found):
        if rank in ranks:
            assert raised == ("ArithmeticError", f"rank {rank} has no router today")
        else:
            assert raised[0] == "PeerError"
            assert f"rank {ranks[0]} " in raised[1]
            assert f"rank {ranks[0]} has no router today" in raised[1]
        assert again
        assert total == 3.0
