"""One case of the matrix: three steps of training, split or alone, and everything that must come out the same."""

import functools
import re

import torch
import torch.distributed as dist
from torch import nn

import fmoe
from fmoe import parallel
from fmoe.exchange import Cost

BATCH = 8
LENGTH = 6
WIDTH = 16
HIDDEN = 12
OUT = 5
EXPERTS = 8
STEPS = 3
SPLITS = {"ep1 x dp2": (1, 2), "ep2": (2, 1), "ep4": (4, 1), "ep2 x dp2": (2, 2)}
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=1.0),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
}


class AlwaysShadow(Cost):
    """Sending experts instead of rows must not change the result: here the hottest experts are always sent."""

    def seconds(self, loads_WE, num_local, shadows):
        return -len(shadows)


ALWAYS = AlwaysShadow(row_seconds=0.0, row_bytes=0.0, expert_bytes=0.0, bandwidth=1.0)


class Block(nn.Module):
    """An expert as a module."""

    def __init__(self, d_model):
        super().__init__()
        self.up = nn.Linear(d_model, HIDDEN)
        self.down = nn.Linear(HIDDEN, d_model)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    """Dense, experts, dense."""

    def __init__(self, case, groups):
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Linear(WIDTH, OUT)
        self.moe = fmoe.FMoE(
            d_model=WIDTH,
            num_experts=EXPERTS,
            d_hidden=HIDDEN,
            gate=case["gate"],
            gate_options=gate_options(case["gate"]),
            expert=Block if case["experts"] == "modules" else case["experts"],
            expert_options={"dropout": 0.1} if case["experts"] == "ffn" else None,
            loss_weights={"balance": 0.1, "z": 0.01},
            moe_group=None if groups is None or groups.ep == 1 else groups.moe_group,
            exchange=case["exchange"],
            exchange_options=exchange_options(case, groups),
            seed=7,
        )

    def forward(self, x, token_ids):
        return self.after(torch.tanh(self.moe(self.before(x), token_ids=token_ids)))


def gate_options(gate):
    options = {} if gate in ("expert_choice", "base") else {"capacity_factor": 1.25}
    if gate == "topology":
        options |= {"num_nodes": 2, "node_of": first_half_on_node_0}
    return options


def first_half_on_node_0(groups):
    """A topology that does not depend on the split."""
    index_G = groups.first_group + torch.arange(groups.count)
    return index_G * 2 // BATCH


def exchange_options(case, groups):
    options = {}
    if case["exchange"] != "all_gather":
        options["chunks"] = case["chunks"]
    if case["exchange"] == "hierarchical" and groups is not None and groups.ep > 1:
        options["node_size"] = groups.ep // 2
    if case["shadow"]:
        options |= {"shadow": case["shadow"], "cost": ALWAYS}
    if case["bound"]:
        options["max_rows"] = 2 * EXPERTS
    return options


def groups_of(ep):
    return parallel.init(ep=ep)


def wrap(model, wrapper, groups):
    if groups is None or wrapper == "none":
        return model
    if wrapper == "ddp":
        return parallel.DistributedDataParallel(model, groups)
    if wrapper == "fsdp2":
        return parallel.fully_shard(model, groups)
    for name, parameter in model.named_parameters():
        # FastMoE's way: experts by a group of their own, averaged there as one process would have it.
        parameter.dp_comm = "experts" if ".experts." in name else "dp"
    return fmoe.DistributedGroupedDataParallel(
        model, dp_group=groups.data_group, experts_group=groups.expert_data_group
    )


def finish_gradients(model, wrapper, groups):
    if groups is None or wrapper in ("ddp", "fsdp2"):
        return
    if wrapper == "none":
        parallel.average_gradients(model, groups=groups)
        return
    model.allreduce_params()
    for parameter in model.parameters():
        if parameter.dp_comm == "experts" and parameter.grad is not None:
            parameter.grad.div_(groups.ep)  # they hold the tokens of that many ranks' means


def whole(tensor):
    """Return the whole of a parameter or gradient that may be sharded."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(case, is_split):
    """By name, what is to be the same at every split, of experts those of this rank under their global ids."""
    groups = groups_of(SPLITS[case["split"]][0]) if is_split else None
    rank, size = (0, 1) if groups is None else (dist.get_rank(groups.data_group), groups.size)
    dtype = getattr(torch, case["dtype"])
    torch.manual_seed(0)
    model = Model(case, groups)
    with torch.no_grad():
        if hasattr(model.moe.gate, "weight"):
            model.moe.gate.weight.mul_(4)  # decided routers: uneven loads
    model.to(dtype)
    first = model.moe.first_expert
    wrapped = wrap(model, case["wrapper"], groups)
    optimizer = OPTIMIZERS[case["optimizer"]](wrapped.parameters())
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randn(STEPS, BATCH, LENGTH, OUT, generator=generator, dtype=torch.float64).to(dtype)
    ids = torch.randint(0, 50, (STEPS, BATCH, LENGTH), generator=generator)
    share = BATCH // size
    mine = slice(rank * share, (rank + 1) * share)
    seen = {}

    def look(prefix, pick):
        for name, parameter in wrapped.named_parameters():
            name = name.removeprefix("module.")
            name = re.sub(r"\.experts\.(\d+)\.", lambda m: f".expert {int(m[1]) + first}.", name)
            seen[f"{prefix}{name}"] = whole(pick(parameter))

    for step in range(STEPS):
        fmoe.random.set_position(seed=2, step=step, first_token=rank * share * LENGTH)
        loss = (wrapped(x[step, mine], ids[step, mine]) - y[step, mine]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        finish_gradients(wrapped, case["wrapper"], groups)
        loss = loss.detach()
        if groups is not None:
            dist.all_reduce(loss, group=groups.data_group)
        seen[f"step {step}: loss"] = loss / size
        look(f"step {step}: gradient of ", lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
        seen[f"step {step}: gradient norm"] = (
            parallel.clip_grad_norm_(wrapped.parameters(), 0.5, groups=groups)
            if (groups is not None)
            else parallel.clip_grad_norm_(wrapped.parameters(), 0.5)
        )
        optimizer.step()
        fmoe.end_step(wrapped, None if groups is None else groups.data_group)
    look("after 3 steps: ", lambda p: p)
    return {name: value.numpy() for name, value in seen.items()}
