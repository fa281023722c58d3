"""LAMB and LARS equal the papers' algorithms, an expert of a stack is a tensor of its own, a shard a part of it."""

import copy
import itertools
from functools import partial

import optim_reference
import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from forks import values
from torch import nn

from fmoe import FMoE, FMoELinear, UserError
from fmoe.experts import FFNExperts
from fmoe.optim import Blocks, Lamb, Lars, Layout, OneBitLamb, is_matrix, is_stacked, param_groups
from fmoe.optim import trust as trust_module
from fmoe.optim.layout import parts_of

STEPS = 6
LAMB = {"lr": 0.03, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
LARS = {"lr": 2.0, "momentum": 0.9, "weight_decay": 0.1, "trust_coefficient": 0.01}
CASES = {
    "lamb": (Lamb, LAMB, optim_reference.lamb),
    "lamb, bounded": (Lamb, LAMB | {"max_trust": 3.0}, optim_reference.lamb),
    "lars": (Lars, LARS, optim_reference.lars),
}


def stacked(*shape):
    parameter = nn.Parameter(torch.randn(*shape))
    parameter.is_stacked = True
    return parameter


def model_like():
    """Tensors of many kinds, the stacked experts of very different norms."""
    torch.manual_seed(3)
    parameters = [nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(()))]
    parameters += [stacked(3, 4, 5), stacked(3, 4), stacked(1, 2, 3), nn.Parameter(torch.zeros(4, 4))]
    parameters += [nn.Parameter(torch.randn(3, 4).t()), stacked(2, 3, 2)]  # the first one not contiguous
    parameters[-1].data = torch.randn(3, 2, 2).transpose(0, 1)
    with torch.no_grad():
        parameters[3] *= torch.tensor([1e-2, 1.0, 30.0]).view(3, 1, 1)
        parameters[0] *= 10
    gradients = [[torch.randn(p.shape) * 3**i for i, p in enumerate(parameters)] for _ in range(STEPS)]
    for step in gradients:
        step[3][0] = 0  # an expert that no token reaches
    return parameters, gradients


def run(optimizer, parameters, gradients):
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def references(reference, options, parameters, gradients):
    """The reference of every parameter, experts one by one."""
    found = []
    for number, parameter in enumerate(parameters):
        tensors = [step[number] for step in gradients]
        if is_stacked(parameter):
            ends = [
                reference(parameter[e].detach(), [t[e] for t in tensors], is_matrix=is_matrix(parameter), **options)
                for e in range(len(parameter))
            ]
            found.append((torch.stack([w for w, _ in ends]), [ratio for _, ratio in ends]))
        else:
            weight, ratio = reference(parameter.detach(), tensors, is_matrix=is_matrix(parameter), **options)
            found.append((weight, [ratio]))
    return found


@pytest.mark.parametrize("chunk", [1, 30, 1 << 20])
@pytest.mark.parametrize("name", CASES)
def test_the_papers_algorithm(monkeypatch, name, chunk):
    """Values and trust ratios, however many tensors are stepped together."""
    monkeypatch.setattr(trust_module, "_CHUNK", {"cpu": chunk, "cuda": chunk})
    kind, options, reference = CASES[name]
    parameters, gradients = model_like()
    expected = references(reference, options, parameters, gradients)
    optimizer = kind(parameters, **options)
    run(optimizer, parameters, gradients)
    ratios = optimizer.trust_ratios()
    for number, (parameter, (weight, ratio)) in enumerate(zip(parameters, expected, strict=True)):
        assert_close(parameter, weight, 1e-6, f"parameter {number}")
        if is_matrix(parameter):
            assert ratios[number].tolist() == pytest.approx(ratio, rel=1e-5)
        else:
            assert not len(ratios[number])
    if name != "lamb, bounded":
        assert len(set(ratios[3].tolist())) == 3, "one ratio an expert"
    else:
        assert max(r.max().item() for r in ratios if len(r)) == 3.0


@pytest.mark.parametrize("kind", [Lamb, Lars])
def test_a_stack_equals_separate_tensors(kind):
    """Bit for bit, weights and ratios, the stack of one expert and the biases included."""
    parameters, gradients = model_like()
    apart = [
        nn.Parameter(tensor.detach().clone()) for p in parameters for tensor in (p.unbind() if is_stacked(p) else [p])
    ]
    apart_gradients = [
        [g for p, t in zip(parameters, step, strict=True) for g in (t.unbind() if is_stacked(p) else [t])]
        for step in gradients
    ]
    together_optimizer, apart_optimizer = kind(parameters), kind(apart)
    run(together_optimizer, parameters, gradients)
    run(apart_optimizer, apart, apart_gradients)
    flat = [tensor for p in parameters for tensor in (p.unbind() if is_stacked(p) else [p])]
    assert len(flat) == len(apart)
    assert all(torch.equal(a, b) for a, b in zip(flat, apart, strict=True))
    assert torch.equal(torch.cat(together_optimizer.trust_ratios()), torch.cat(apart_optimizer.trust_ratios()))


@pytest.mark.parametrize("kind", [Lamb, Lars])
def test_a_whole_layer_needs_no_more_than_its_parameters(kind):
    """FMoE's experts are told by their marks, which survive what makes new parameters."""
    torch.manual_seed(0)
    layer = FMoE(d_model=8, num_experts=4, d_hidden=16, top_k=2, gate="switch")
    twins = [copy.deepcopy(layer), FMoE(d_model=8, num_experts=4, d_hidden=16, top_k=2, gate="switch").to("meta")]
    twins[1] = twins[1].to_empty(device="cpu")
    for twin in (layer, *twins):
        assert {name for name, p in twin.named_parameters() if is_stacked(p)} == {
            f"experts.{name}_{end}" for name in ("weight", "bias") for end in ("in", "out")
        }
    optimizer = kind(layer.parameters(), lr=0.1)
    layer(torch.randn(2, 16, 8)).square().sum().backward()
    optimizer.step()
    by_name = dict(zip((name for name, _ in layer.named_parameters()), optimizer.trust_ratios(), strict=True))
    assert {name: len(ratios) for name, ratios in by_name.items() if "experts" in name} == {
        "experts.weight_in": 4,
        "experts.weight_out": 4,
        "experts.bias_in": 0,
        "experts.bias_out": 0,
    }
    assert is_stacked(FMoELinear(3, 4, 5).weight) and is_stacked(copy.deepcopy(FFNExperts(2, 4, 4)).bias_in)


def test_param_groups_spare_the_vectors():
    layer = FMoE(d_model=8, num_experts=4, d_hidden=16, top_k=2, gate="switch")
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), layer)
    model[0].weight.requires_grad_(False)
    decayed, spared = param_groups(model, 0.1, lr=3.0)
    assert (decayed["weight_decay"], spared["weight_decay"], spared["lr"]) == (0.1, 0.0, 3.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {"2.gate.weight", "2.experts.weight_in", "2.experts.weight_out"}
    assert len(decayed["params"]) + len(spared["params"]) == len(names) - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [Lamb, Lars, partial(OneBitLamb, freeze_step=4)], ids=["lamb", "lars", "one bit"])
def test_state_is_float32_or_better(kind, dtype):
    """And stays so through a state dict: steps after it are the same bit for bit."""
    parameters, gradients = model_like()
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
    optimizer = kind(parameters)
    run(optimizer, parameters, gradients[:3])
    twins = [copy.deepcopy(p.detach()).requires_grad_() for p in parameters]
    for twin, parameter in zip(twins, parameters, strict=True):
        twin.is_stacked = is_stacked(parameter)
    other = kind(twins)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    best = torch.promote_types(dtype, torch.float32)
    entries = [(name, value) for t in twins for name, value in other.state[t].items() if name != "step"]
    assert {name for name, _ in entries} >= set(other.state_names)
    assert all(value.dtype == best for _, value in entries)
    run(optimizer, parameters, gradients[3:])
    run(other, twins, gradients[3:])
    assert all(torch.equal(a, b) for a, b in zip(parameters, twins, strict=True))


@pytest.mark.parametrize("kind", [Lamb, Lars])
def test_a_parameter_without_gradient_is_left_alone(kind):
    parameters, gradients = model_like()
    before = parameters[0].detach().clone()
    optimizer = kind(parameters)
    for parameter, gradient in zip(parameters[1:], gradients[0][1:], strict=True):
        parameter.grad = gradient
    loss = optimizer.step(lambda: torch.tensor(3.0))
    assert loss == 3.0 and torch.equal(parameters[0], before)
    assert parameters[0] not in optimizer.state


@pytest.mark.parametrize("kind", [Lamb, Lars])
def test_ratios_are_on_the_device_of_the_parameters_or_there_are_none(kind):
    assert kind([nn.Parameter(torch.ones(2, 2, device="meta"))]).trust_ratios()[0].is_meta
    assert kind([{"params": []}]).trust_ratios() == []


def test_a_flat_range_is_whole_blocks_and_slices_of_blocks():
    blocks, length = Blocks(30, 6), 5
    for start, stop in itertools.combinations(range(31), 2):
        shard = torch.arange(start, stop)
        parts = list(parts_of(shard, blocks, 100, start, max_numel=2 * length))
        assert torch.equal(torch.cat([part.of(shard).reshape(-1) for part in parts]), shard)
        for part in parts:
            held = [100 + element // length for element in part.of(shard).flatten().tolist()]
            assert {*range(part.block, part.block + part.count)} == {*held} and len(held) <= 2 * length


def sharded_steps(kind, options):
    """Step on ranks that hold flat shards of everything, cut anywhere; the last shard of a tensor may be empty."""
    parameters, gradients = model_like()
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    shards, parts = [], {}
    for number, parameter in enumerate(parameters):
        cut = [parameter.numel() * i // size + (i == 1) * (number % 2) for i in range(size)] + [parameter.numel()]
        begin, end = cut[rank], max(cut[rank], cut[rank + 1])
        shard = parameter.detach().clone().reshape(-1)[begin:end]
        shards.append((shard, begin, end))
        parts[shard] = (number, begin)
    optimizer = kind([shard for shard, _, _ in shards], **options)
    optimizer.set_layout(Layout([Blocks.of(p, (world,)) for p in parameters], parts))
    for step in gradients:
        for (shard, begin, end), gradient in zip(shards, step, strict=True):
            shard.grad = gradient.reshape(-1)[begin:end]
        optimizer.step()
    return [shard for shard, _, _ in shards], optimizer.trust_ratios()


@pytest.mark.cover(1)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_flat_shards_equal_the_whole(forks, name, size):
    kind, options, _ = CASES[name]
    parameters, gradients = model_like()
    optimizer = kind(parameters, **options)
    run(optimizer, parameters, gradients)
    ranks = values(forks.run(size, sharded_steps, kind, options))
    for number, parameter in enumerate(parameters):
        found = torch.cat([shards[number] for shards, _ in ranks])
        assert_close(found, parameter.detach().reshape(-1), 1e-6, f"parameter {number}")
    found = torch.stack([torch.cat(ratios) for _, ratios in ranks])
    assert found.isnan().any() and (found.isnan() | (found == found.nan_to_num(-1).amax(0))).all(), "ranks disagree"
    assert_close(found.nan_to_num(-1).amax(0), torch.cat(optimizer.trust_ratios()), 1e-6, "trust ratios")


def rows_and_replicas(kind):
    """A weight cut by rows over two ranks, as under tensor parallelism, beside one that both have."""
    torch.manual_seed(5)
    cut, both = torch.randn(4, 6), torch.randn(3, 3)
    gradients = torch.randn(4, 6), torch.randn(3, 3)
    rank = dist.get_rank()
    mine = nn.Parameter(cut.chunk(2)[rank].clone())
    replica = nn.Parameter(both.clone())
    split = kind([mine, replica])
    world = dist.group.WORLD
    split.set_layout(Layout([Blocks.of(mine, (world,)), Blocks.of(replica)], {mine: (0, 0), replica: (1, 0)}))
    whole = [nn.Parameter(cut.clone()), nn.Parameter(both.clone())]
    alone = kind(whole)
    for _ in range(3):
        mine.grad, replica.grad = gradients[0].chunk(2)[rank].clone(), gradients[1].clone()
        whole[0].grad, whole[1].grad = gradients
        split.step()
        alone.step()
    assert_close(mine.detach(), whole[0].detach().chunk(2)[rank], 1e-6, "cut")
    assert torch.equal(replica, whole[1]), "a replica was counted twice"


@pytest.mark.by_default("Lars")
@pytest.mark.parametrize("kind", [Lamb, Lars])
def test_tensor_parallel_rows_and_replicas(forks, kind):
    values(forks.run(2, rows_and_replicas, kind))


WRONG = {
    "lr": ({"lr": -1.0}, "lr=-1.0 "),
    "nan": ({"weight_decay": float("nan")}, "weight_decay=nan "),
    "max_trust": ({"max_trust": 0.0}, "max_trust=0.0 is not positive"),
}


@pytest.mark.parametrize("kind", [Lamb, Lars])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_one_line(kind, case):
    options, says = WRONG[case]
    with pytest.raises(UserError, match=says):
        kind([nn.Parameter(torch.ones(2, 2))], **options)


def test_wrong_decay_rates():
    weight = [nn.Parameter(torch.ones(2, 2))]
    with pytest.raises(UserError, match=r"betas\[1\]=1.0 is not in \[0, 1\)"):
        Lamb(weight, betas=(0.9, 1.0))
    with pytest.raises(UserError, match=r"momentum=1.5 is not in \[0, 1\)"):
        Lars(weight, momentum=1.5)
    with pytest.raises(UserError, match="trust_coefficient=0 is not positive"):
        Lars(weight, trust_coefficient=0)
    optimizer = Lamb(weight)
    optimizer.set_layout(Layout([Blocks(3)], {weight[0]: (0, 0)}))
    weight[0].grad = torch.ones(2, 2)
    with pytest.raises(UserError, match="elements 0 to 4 exceed a parameter of 3"):
        optimizer.step()


@pytest.mark.parametrize("name", CASES)
def test_float64_parameters_have_float64_trust_ratios(name):
    """Also beside float32 ones, in the same group: to their own precision, steps and ratios alike."""
    make, options, reference = CASES[name]
    parameters, gradients = model_like()
    parameters = [nn.Parameter(p.detach().double()) if n % 2 else p for n, p in enumerate(parameters)]
    for old, new in zip(model_like()[0], parameters, strict=True):
        new.is_stacked = is_stacked(old)
    gradients = [[g.double() for g in step] for step in gradients]
    expected = references(reference, options, parameters, gradients)
    optimizer = make(parameters, **options)
    run(optimizer, parameters, gradients)
    for p, found, (weight, ratio) in zip(parameters, optimizer.trust_ratios(), expected, strict=True):
        assert found.dtype == torch.float64
        bound = 1e-13 if p.dtype == torch.float64 else 1e-5
        assert_close(p, weight, bound, f"weight {tuple(p.shape)}")
        if len(found):
            assert_close(found, torch.tensor(ratio, dtype=torch.float64), bound, f"ratio {tuple(p.shape)}")
    only = make([nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))], **options)
    assert only.trust_ratios()[0].dtype == torch.float32
