"""FastMoE's parallelism (doc/parallelism) on two ranks: expert groups, slice groups, grouped data parallel, and the
functions and gates that exchange counts."""

import copy

import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from fastmoe_reference import SmallExpert, brute_force
from fmoe.layers import _fmoe_general_global_forward, mark_module_parallel_comm
from forks import values
from rank_pool import Raised

import fmoe
from fmoe import DistributedGroupedDataParallel, FMoE, FMoETransformerMLP, functions
from fmoe.gates import DCGate, NaiveGate, SwipeGate, SwitchGate, utils

D, L, W = 8, 3, 2  # width, experts per rank, ranks


def tokens(rank, count, dtype=torch.float32):
    x = torch.randn(count, D, generator=torch.Generator().manual_seed(10 + rank)).to(dtype)
    weight = torch.randn(count, D, generator=torch.Generator().manual_seed(20 + rank)).to(dtype)
    return x, weight


def all_experts(dtype=torch.float32):
    torch.manual_seed(3)
    return [SmallExpert(D).to(dtype) for _ in range(W * L)]


def give_experts(layer, experts):
    """This rank's experts, and the gate, which is equal on all ranks."""
    with torch.no_grad():
        for mine, expert in zip(layer.experts, experts[layer.first_expert :], strict=False):
            mine.load_state_dict(expert.state_dict())
        for parameter in layer.gate.parameters():
            dist.broadcast(parameter, 0)


def as_numbers(tensors):
    return [tensor.detach().double().numpy() for tensor in tensors]


def close(found, expected, limit, name):
    assert len(found) == len(expected)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_close(torch.as_tensor(a), torch.as_tensor(b), limit, f"{name} {number}")


# One layer over both ranks, each with as many tokens as ``counts`` says.


def expert_parallel(counts, top_k, dtype, name_group):
    rank, experts = dist.get_rank(), all_experts(dtype)
    group = dist.group.WORLD if name_group else None
    layer = FMoE(L, D, world_size=W, moe_group=group, top_k=top_k, expert=SmallExpert).to(dtype)
    give_experts(layer, experts)
    x, weight = tokens(rank, counts[rank], dtype)
    x.requires_grad_()
    index, score = layer.gate(x)
    y = layer(x)
    (y * weight).sum().backward()
    whole = []  # output of one rank for the tokens of both
    everything = [None] * W
    dist.all_gather_object(everything, (x.detach(), index, score.detach(), weight))
    for parts in everything:
        whole.append(brute_force(*parts[:3], experts, parts[3]))
    grads = [sum(outcome.grad_experts[e][p] for outcome in whole) for e in layer_experts(layer) for p in range(2)]
    own = [p.grad for expert in layer.experts for p in expert.parameters()]
    return as_numbers([y, *own]), as_numbers([whole[rank].output, *grads])


def layer_experts(layer):
    return range(layer.first_expert, layer.first_expert + layer.num_expert)


@pytest.mark.cover(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("counts", [(7, 5), (6, 0)], ids=["uneven", "none-on-one"])
@pytest.mark.parametrize(("top_k", "name_group"), [(2, True), (3, False)], ids=["top2", "top3-whole-world"])
def test_moe_group(two_ranks, counts, top_k, name_group, dtype):
    for found, expected in values(two_ranks.run(expert_parallel, counts, top_k, dtype, name_group)):
        close(found, expected, 1e-5 if dtype == torch.float32 else 2e-2, "value")


# Both ranks hold the same tokens and share the work.


def sliced_and_masked():
    mask = torch.tensor([0, 1, 0, 0, 1])
    layer = FMoE(2, D, slice_group=dist.group.WORLD, expert=SmallExpert, mask=mask, mask_dict={1: torch.ones(D)})
    for parameter in layer.parameters():
        dist.broadcast(parameter.data, 0)
    y = layer(tokens(0, 5)[0])
    alone = FMoE(2, D, expert=SmallExpert, mask=mask, mask_dict={1: torch.ones(D)})
    alone.load_state_dict(layer.state_dict())
    return as_numbers([y]), as_numbers([alone(tokens(0, 5)[0])])


def test_slice_group_with_a_mask(two_ranks):
    for found, expected in values(two_ranks.run(sliced_and_masked)):
        close(found, expected, 1e-6, "output")


# Two layers over groups of their own, which FastMoE took to be the same.


def two_groups():
    alone = [dist.new_group([rank]) for rank in range(W)]
    spread = FMoE(L, D, world_size=W, moe_group=dist.group.WORLD, expert=SmallExpert, gate=SwitchGate)
    local = FMoE(L, D, world_size=1, moe_group=alone[dist.get_rank()], expert=SmallExpert, gate=SwitchGate)
    x, _ = tokens(dist.get_rank(), 6)
    spread(local(x)).sum().backward()
    local(spread(x)).sum().backward()
    try:
        FMoE(L, D, world_size=3, moe_group=dist.group.WORLD)
    except fmoe.UserError as error:
        return spread.world_size, local.world_size, str(error)


def test_every_layer_has_its_own_group(two_ranks):
    for spread, local, message in values(two_ranks.run(two_groups)):
        assert (spread, local) == (2, 1)
        assert "world_size=3 differs from the 2 ranks" in message


# Grouped data parallel.


class Tagged(torch.nn.Module):
    def __init__(self):
        super().__init__()
        names = ("dp", "world", "gate", "moe", "mp", "none", "other")
        self.layers = torch.nn.ModuleDict({name: torch.nn.Linear(D, D) for name in names})
        for name in names[1:]:
            mark_module_parallel_comm(self.layers[name], name)

    def forward(self, x):
        return sum(layer(x) for layer in self.layers.values())


def grouped(options, dtype):
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(W)][rank]
    torch.manual_seed(rank)
    model = Tagged().to(dtype)
    before = copy.deepcopy(model)
    wrapped = DistributedGroupedDataParallel(model, dp_group=alone, mp_group=dist.group.WORLD, gate_group=None)
    x, weight = tokens(rank, 4, dtype)
    (wrapped(x) * weight).sum().backward()
    own = {name: layer.bias.grad.clone() for name, layer in model.layers.items()}
    wrapped.allreduce_params(**options)
    seen = {}
    for name, layer in model.layers.items():
        first = before.layers[name].weight.detach().clone()
        dist.broadcast(first, 0)
        synced = torch.equal(layer.weight, first)
        total = own[name].clone().float()
        dist.all_reduce(total)
        seen[name] = (synced, *as_numbers([layer.bias.grad, own[name], total]))
    return seen


@pytest.mark.cover(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "options", [{}, {"no_scale": True}, {"reduce_after": True, "fp32_allreduce": True}], ids=["mean", "sum", "after"]
)
def test_gradients_are_averaged_over_the_group_of_their_tag(two_ranks, options, dtype):
    scale = 1 if options.get("no_scale") else W
    for rank, seen in enumerate(values(two_ranks.run(grouped, options, dtype))):
        for name, (synced, grad, own, total) in seen.items():
            shared = name in ("world", "gate", "moe", "mp")
            expected = total / scale if shared else own
            close([grad], [expected], 1e-6 if dtype == torch.float32 else 1e-2, name)
            assert synced is (shared or rank == 0), name


def grouped_layers(expert_dp_comm):
    """Tags of a layer's parameters, and what is done to those of a plain FMoE and MoE that nobody tagged."""
    torch.manual_seed(dist.get_rank())
    mlp = FMoETransformerMLP(L, D, 16, expert_dp_comm=expert_dp_comm, world_size=1 if expert_dp_comm == "dp" else W)
    plain = FMoE(L, D, world_size=W, expert=SmallExpert)
    mine = plain.experts[0].linear.weight.detach().clone()
    modern = fmoe.MoE.build(d_model=D, num_experts=L * W, moe_group=dist.group.WORLD)
    wrapped = DistributedGroupedDataParallel(torch.nn.Sequential(mlp, plain, modern))
    same = {}
    for name, parameter in wrapped.module.named_parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        flag = torch.tensor(float(torch.equal(first, parameter)))
        dist.all_reduce(flag)
        same[name] = flag.item() == W
    x, _ = tokens(dist.get_rank(), 4)
    wrapped(x).sum().backward()
    wrapped.allreduce_gradients()
    return same, torch.equal(mine, plain.experts[0].linear.weight)


@pytest.mark.parametrize("expert_dp_comm", ["dp", "none"])
def test_experts_are_synchronised_only_where_ranks_hold_the_same(two_ranks, expert_dp_comm):
    for same, plain_is_untouched in values(two_ranks.run(grouped_layers, expert_dp_comm)):
        assert plain_is_untouched
        for name, equal in same.items():
            if "gate" in name:
                assert equal, name
            elif name.startswith(("1.", "2.")) or expert_dp_comm == "none":
                assert not equal or name.endswith("bias"), name
            else:
                assert equal, name


# Functions.


def exchange(top_k):
    rank = dist.get_rank()
    functions.ensure_comm(None, None)
    assert functions.get_moe_group() is dist.group.WORLD
    generator = torch.Generator().manual_seed(rank)
    index = torch.randint(-1, W * L, (5 + rank, top_k), generator=generator)
    index = index.squeeze(1) if top_k == 1 else index
    x = tokens(rank, 5 + rank)[0].requires_grad_()
    pos, lec, gec = functions.count_by_gate(index, L, W)
    assert functions.count_by_gate(index, L, W, require_pos=False)[0] is None
    prepared = functions.prepare_forward(index, L, W)
    rows = functions.MOEScatter.apply(x, pos // top_k, lec, gec, prepared[4], W)
    back = functions.MOEGather.apply(rows * 3, pos, lec, gec, index.numel(), W)
    general = _fmoe_general_global_forward({"a": x}, index, lambda r, _: {"a": r["a"] * 3, "b": r["a"]}, L, W)
    same = torch.equal(general["a"], back) and torch.equal(general["a"], 3 * general["b"])
    grad = torch.autograd.grad(back.sum(), x)[0]
    return [t.tolist() for t in (index, lec, gec, prepared[3])], prepared[4], same, *as_numbers([x, rows, back, grad])


@pytest.mark.parametrize("top_k", [1, 2])
def test_scatter_and_gather(two_ranks, top_k):
    results = values(two_ranks.run(exchange, top_k))
    indices = [torch.tensor(result[0][0]).view(-1, top_k) for result in results]
    inputs = [torch.as_tensor(result[3]) for result in results]
    for rank, ((_, lec, gec, fwd), num_rows, same, x, rows, back, grad) in enumerate(results):
        mine = indices[rank].flatten()
        assert same
        assert lec == [(mine == e).sum().item() for e in range(W * L)]
        owned = range(rank * L, rank * L + L)
        assert gec == [(indices[w] == e).sum().item() for w in range(W) for e in owned]
        assert fwd == [sum((indices[w] == e).sum().item() for w in range(W)) for e in owned]
        assert num_rows == sum(fwd) == len(rows)
        expected = [inputs[w][t] for e in owned for w in range(W) for t in (indices[w] == e).nonzero()[:, 0].tolist()]
        assert torch.equal(torch.as_tensor(rows), torch.stack(expected))
        made = (mine >= 0).double().unsqueeze(1)
        close([back], [3 * torch.as_tensor(x).repeat_interleave(top_k, 0) * made], 1e-7, "gathered")
        close([grad], [3 * made.view(-1, top_k).sum(1, keepdim=True).expand(-1, D)], 1e-7, "gradient")


def slice_and_gather(count):
    rank, x = dist.get_rank(), tokens(0, count)[0].requires_grad_()
    part = functions.Slice.apply(x, rank, W, dist.group.WORLD)
    whole = functions.AllGather.apply(part * 2, rank, W, None)
    whole.sum().backward()
    return len(part), *as_numbers([x, whole, x.grad])


@pytest.mark.parametrize("count", [6, 5])
def test_slice_and_all_gather(two_ranks, count):
    results = values(two_ranks.run(slice_and_gather, count))
    assert sum(result[0] for result in results) == count
    for _, x, whole, grad in results:
        close([whole, grad], [2 * torch.as_tensor(x), torch.full((count, D), 2.0)], 1e-7, "value")


def wrong_group():
    functions.ensure_comm(None, dist.group.WORLD)
    functions.count_by_gate(torch.tensor([0]), 1, 3)


def test_functions_say_that_the_group_is_another(two_ranks):
    for result in two_ranks.run(wrong_group):
        assert isinstance(result, Raised) and "world_size=3 differs from the 2 ranks" in result.message


# Gates that exchange counts.


def decide(kind, options, count):
    torch.manual_seed(1)  # the same gate everywhere
    gate = kind(D, L, W, **options)
    x, _ = tokens(dist.get_rank(), count)
    functions.ensure_comm(x, None)
    torch.manual_seed(2)
    index, score = gate(x)
    free = gate.gate(x).topk(gate.top_k).indices
    return index.tolist(), free.tolist(), score.isfinite().all().item()


def test_capacity_over_all_ranks(two_ranks):
    """An expert accepts that many choices of both ranks together, those of the first rank first."""
    options = {"capacity": (0.4, 0.4), "random_routing": False}
    results = values(two_ranks.run(decide, DCGate, options, 30))
    taken = [0] * (W * L)
    for index, free, _ in results:
        for k in range(2):
            for t in range(30):
                e = free[t][k]
                taken[e] += 1
                assert index[t][k] == (e if taken[e] <= 12 else -1)


def test_switch_capacity_over_all_ranks(two_ranks):
    results = values(two_ranks.run(decide, SwitchGate, {"capacity": (0.3, 0.3)}, 30))
    counts = torch.bincount(torch.tensor([r[0] for r in results]).flatten() + 1, minlength=W * L + 1)
    assert counts[1:].max() <= 3 and counts[0] > 0


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_swipe_gives_every_rank_the_same_load(two_ranks, top_k):
    results = values(two_ranks.run(decide, SwipeGate, {"top_k": top_k}, 30))
    moved = 0
    for index, free, finite in results:
        assert finite
        moved += sum(a != b for row, other in zip(index, free, strict=True) for a, b in zip(row, other, strict=True))
    loads = torch.bincount(torch.tensor([r[0] for r in results]).flatten() // L, minlength=W)
    assert loads.tolist() == [30 * top_k] * W
    assert 0 < moved < 30 * top_k


def limited():
    rank = dist.get_rank()
    functions.ensure_comm(None, None)
    index = torch.tensor([0, 0, 0, 4, 4, 1] if rank == 0 else [0, 4, 4, 4, 5, -1])
    new_lec, new_gec, kept = utils.limit_by_capacity(index, L, W, 4)
    return new_lec.tolist(), new_gec.tolist(), kept.tolist()


def test_limit_by_capacity_serves_the_first_rank_first(two_ranks):
    first, second = values(two_ranks.run(limited))
    assert first == ([3, 1, 0, 0, 2, 0], [3, 1, 0, 1, 0, 0], [0, 0, 0, 4, 4, 1])
    assert second == ([1, 0, 0, 0, 2, 1], [0, 2, 0, 0, 2, 1], [0, 4, 4, -1, 5, -1])


@pytest.mark.parametrize("kind", [SwitchGate, SwipeGate, DCGate, NaiveGate])
def test_gates_that_exchange_inside_a_layer(two_ranks, kind):
    assert values(two_ranks.run(run_layer, kind)) == [True, True]


def run_layer(kind):
    layer = FMoE(L, D, world_size=W, gate=kind, expert=SmallExpert)
    x, _ = tokens(dist.get_rank(), 10)
    y = layer(x)
    y.sum().backward()
    return all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())
