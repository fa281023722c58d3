"""Muon against the algorithm in float64, a matrix at a time: experts, fused weights, flat shards, slices."""

import copy

import optim_reference
import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from forks import values
from torch import nn

from fmoe import FMoE, UserError
from fmoe.optim import Matrices, Muon, Shards, hidden_matrices, orthogonalize, param_groups
from fmoe.optim import muon as muon_module

STEPS = 4
OPTIONS = {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.1}
FUSED = (2, 1, 1)  # rows of query, key and value of a head


def stacked(*shape):
    parameter = nn.Parameter(torch.randn(*shape))
    parameter.is_stacked = True
    return parameter


def model_like():
    """Parameters of many kinds, the hidden matrices among them, and gradients of some steps."""
    torch.manual_seed(3)
    wide, tall, experts, gated = (
        nn.Parameter(torch.randn(5, 9)),
        nn.Parameter(torch.randn(8, 3)),
        stacked(3, 4, 6),
        None,
    )
    gated, qkv = stacked(2, 6, 5), nn.Parameter(torch.randn(12, 7))
    embedding, bias, biases = nn.Parameter(torch.randn(10, 4)), nn.Parameter(torch.randn(5)), stacked(3, 4)
    turned = nn.Parameter(torch.randn(4, 6).t())  # not contiguous
    parameters = [wide, tall, embedding, experts, gated, bias, qkv, biases, turned]
    matrices = {p: Matrices.of(p) for p in (wide, tall, experts, turned)}
    matrices |= {gated: Matrices.of(gated, parts=2), qkv: Matrices.of(qkv).with_sections(*FUSED)}
    gradients = [[torch.randn(p.shape) * 3.0**i for i, p in enumerate(parameters)] for _ in range(STEPS)]
    for step in gradients:
        step[3][0] = 0  # an expert that no token reaches
    return parameters, matrices, gradients


def run(optimizer, parameters, gradients):
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def rows_of(sections, rows):
    """The numbers of the rows of each matrix of a fused weight, by a loop over the rows."""
    found, row = [[] for _ in sections], 0
    while row < rows:
        for number, size in enumerate(sections):
            found[number] += range(row, row + size)
            row += size
    return found


def reference(parameter, matrices, gradients, **options):
    """The weights after the steps, a matrix at a time."""
    stack = parameter.detach().reshape(matrices.blocks, matrices.rows, matrices.columns)
    steps = [gradient.reshape(stack.shape) for gradient in gradients]
    found = torch.empty_like(stack, dtype=torch.float64)
    for expert in range(len(stack)):
        for rows in rows_of(matrices.sections, matrices.rows):
            found[expert, rows] = optim_reference.muon(stack[expert, rows], [s[expert, rows] for s in steps], **options)
    return found.view(parameter.shape)


@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("more", [{}, {"nesterov": False, "scale": "original"}], ids=["default", "original"])
def test_the_published_algorithm(monkeypatch, more, dtype, chunk):
    monkeypatch.setattr(muon_module, "_CHUNK", chunk)
    parameters, matrices, gradients = model_like()
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
    expected = {p: reference(p, matrices[p], [g[i] for g in gradients], **OPTIONS, **more)
                for i, p in enumerate(parameters) if p in matrices}  # fmt: skip
    others = [nn.Parameter(p.detach().clone()) for p in parameters if p not in matrices]
    adamw = torch.optim.AdamW(others, lr=0.03, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    run(adamw, others, [[g for g, p in zip(step, parameters, strict=True) if p not in matrices] for step in gradients])
    before = parameters[0].detach().clone()
    run(Muon(parameters, **OPTIONS, **more, matrices=matrices), parameters, gradients)
    for number, parameter in enumerate(parameters):
        if parameter in matrices:
            assert_close(parameter, expected[parameter], 1e-12 if dtype == torch.float64 else 3e-6, f"number {number}")
        else:
            assert torch.equal(parameter, others.pop(0)), "AdamW's bits"
    assert (parameters[0] - before).norm() > 0.1


def test_newton_schulz_is_near_the_polar_factor():
    """Singular vectors are kept, and every singular value above 1/500 of the norm ends in the published band."""
    torch.manual_seed(0)
    for rows, columns in ((6, 6), (5, 20), (20, 5), (1, 4)):
        rank = min(rows, columns)
        left, right = torch.linalg.qr(torch.randn(rows, rank))[0], torch.linalg.qr(torch.randn(columns, rank))[0]
        values = torch.logspace(0, -2, rank) * 7
        stack = torch.stack([left @ torch.diag(values) @ right.T, torch.zeros(rows, columns)])
        found, nothing = orthogonalize(stack)
        inside = left.T @ found @ right
        assert inside.diag().min() >= 0.68 and inside.diag().max() <= 1.21
        assert (inside - inside.diag().diag()).abs().max() < 1e-4 and not nothing.any()
        assert_close(found, optim_reference.newton_schulz(stack[0]), 1e-5, "against the loop")
        polar = torch.linalg.svd(stack[0], full_matrices=False)
        assert (found - polar.U @ polar.Vh).norm() <= 0.33 * rank**0.5


def test_default_matrices_are_those_of_torchs_muon_in_float32():
    """Within bfloat16, in which torch's iterates."""
    torch.manual_seed(0)
    ours, theirs = nn.Parameter(torch.randn(16, 24)), nn.Parameter(torch.empty(16, 24))
    theirs.data.copy_(ours.data)
    gradients = [[torch.randn(16, 24)] for _ in range(STEPS)]
    run(Muon([ours], lr=0.03), [ours], gradients)
    run(torch.optim.Muon([theirs], lr=0.03, adjust_lr_fn="match_rms_adamw"), [theirs], gradients)
    assert_close(ours.detach(), theirs.detach(), 1e-2, "torch.optim.Muon")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e-30])
def test_an_expert_does_not_see_the_others(value):
    """Bit for bit, whatever the gradients of the others are: not finite, zero, tiny."""
    ends = []
    for other in (1.0, value):
        torch.manual_seed(1)
        stack, gradient = stacked(3, 4, 6), torch.randn(3, 4, 6)
        gradient[1] *= other
        run(Muon([stack], **OPTIONS), [stack], [[gradient]] * 2)
        ends.append(stack.detach())
    for expert in (0, 2):
        assert torch.equal(ends[0][expert], ends[1][expert])
    assert ends[1][1].isfinite().all() == (value < 1)
    assert not torch.equal(ends[0][1], ends[1][1])


def test_experts_are_the_same_wherever_they_are():
    """A stack of four, two stacks of two, four matrices."""
    torch.manual_seed(2)
    weight, gradients = torch.randn(4, 6, 5), [torch.randn(4, 6, 5) for _ in range(STEPS)]
    ends = []
    for parts in (1, 2, 4):
        parameters = [nn.Parameter(part.clone()) for part in weight.chunk(parts)]
        for parameter in parameters:
            parameter.is_stacked = True
        run(Muon(parameters, **OPTIONS), parameters, [list(g.chunk(parts)) for g in gradients])
        ends.append(torch.cat([p.detach() for p in parameters]))
    assert_close(ends[1], ends[0], 1e-6, "two stacks")
    assert_close(ends[2], ends[0], 1e-6, "four stacks")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.convolution = nn.Conv1d(8, 8, 3)
        shared = {"shared_expert": 12, "shared_gate": True}
        self.moe = FMoE(d_model=8, num_experts=4, d_hidden=16, top_k=2, expert="swiglu", **shared)
        self.tied, self.head = nn.Linear(8, 11), nn.Linear(8, 11)
        self.tied.weight = self.embedding.weight


def names_of(model, **options):
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: matrices.sections for p, matrices in hidden_matrices(model, **options).items()}


def test_hidden_matrices_are_found_by_their_modules():
    """Also after other tensors took the place of the parameters."""
    model = Model()
    expected = {"hidden.weight": (8,), "moe.experts.weight_in": (16, 16), "moe.experts.weight_out": (8,)}
    expected |= {"moe.shared.expert.weight_in": (12,), "moe.shared.expert.weight_out": (8,)}
    assert names_of(model, others=[model.head]) == expected
    assert names_of(model) == expected | {"head.weight": (11,)}
    assert names_of(copy.deepcopy(model), others=()) == expected | {"head.weight": (11,)}
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    model.tied.weight = model.embedding.weight
    assert names_of(model, others=[model.head]) == expected
    model.hidden.weight.requires_grad_(False)
    assert "hidden.weight" not in names_of(model)


def test_a_model_trains():
    torch.manual_seed(0)
    model = Model()
    optimizer = Muon(param_groups(model, 0.1), lr=3e-3, matrices=hidden_matrices(model, [model.head]))
    x, y = torch.randint(11, (2, 16)), torch.randint(11, (2, 16))
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        hidden = model.embedding(x)
        out = model.head(hidden + model.moe(model.norm(model.hidden(hidden))))
        loss = nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert {tuple(state) for state in optimizer.state.values()} == {
        ("momentum_buffer", "step"),
        ("exp_avg", "exp_avg_sq", "step"),
    }
    assert "momentum_buffer" in optimizer.state[model.moe.experts.weight_in]
    assert "exp_avg" in optimizer.state[model.moe.gate.weight] and model.convolution.weight not in optimizer.state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_state_is_float32_or_better_and_survives(dtype):
    """Through a state dict and a copy of the optimizer, bit for bit."""
    parameters, matrices, gradients = model_like()
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
    optimizer = Muon(parameters, **OPTIONS, matrices=matrices)
    run(optimizer, parameters, gradients[:2])
    best = torch.promote_types(dtype, torch.float32)
    copied = copy.deepcopy(optimizer)
    twins = [p for group in copied.param_groups for p in group["params"]]
    others = [nn.Parameter(p.detach().clone()) for p in parameters]
    loaded = Muon(others, **OPTIONS, matrices={o: matrices[p] for o, p in zip(others, parameters, strict=True)
                                               if p in matrices})  # fmt: skip
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for state in loaded.state.values():
        assert {value.dtype for name, value in state.items() if name != "step"} == {best}
    for each, held in ((optimizer, parameters), (copied, twins), (loaded, others)):
        run(each, held, gradients[2:])
    for parameter, twin, other in zip(parameters, twins, others, strict=True):
        assert torch.equal(parameter, twin) and torch.equal(parameter, other)


def test_a_parameter_without_gradient_is_left_alone():
    parameters, matrices, gradients = model_like()
    before = [p.detach().clone() for p in parameters]
    optimizer = Muon(parameters, matrices=matrices)
    for number in (1, 2, 4):
        parameters[number].grad = gradients[0][number]
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0
    changed = [not torch.equal(p, b) for p, b in zip(parameters, before, strict=True)]
    assert [number for number, is_changed in enumerate(changed) if is_changed] == [1, 2, 4]
    assert parameters[0] not in optimizer.state


def alone(chunk):
    parameters, matrices, gradients = model_like()
    muon_module._CHUNK = chunk
    run(Muon(parameters, **OPTIONS, matrices=matrices), parameters, gradients)
    return [(p.detach(), p in matrices) for p in parameters]


def cuts_of(number, numel, size):
    """Starts of the ranks' ranges: even, shifted by an element, or everything on one rank."""
    if number == 1:
        return [0] + [numel] * size
    return [0, *(numel * i // size + number % 2 for i in range(1, size)), numel]


def sharded_steps():
    """Step on ranks that hold flat shards of everything, cut anywhere; the last shards of a parameter may be empty."""
    parameters, matrices, gradients = model_like()
    muon_module._CHUNK = 1
    rank, size = dist.get_rank(), dist.get_world_size()
    shards, parts = [], {}
    for number, parameter in enumerate(parameters):
        begin, end = cuts_of(number, parameter.numel(), size)[rank : rank + 2]
        shards.append((parameter.detach().reshape(-1)[begin:end].clone(), begin, end))
        parts[shards[-1][0]] = (parameter, begin)
    optimizer = Muon([shard for shard, _, _ in reversed(shards)], **OPTIONS)
    optimizer.set_shards(matrices, Shards(parts, parameters, dist.group.WORLD))
    for step in gradients:
        for (shard, begin, end), gradient in zip(shards, step, strict=True):
            shard.grad = gradient.reshape(-1)[begin:end]
        optimizer.step()
    return [shard for shard, _, _ in shards], len(optimizer._plan_now.parts)


@pytest.mark.parametrize("size", [2, 3])
def test_flat_shards_equal_the_whole_bit_for_bit(forks, size):
    """Ranks that step parts of a matrix compute the same one: parts put together are what one process has."""
    whole = values(forks.run(1, alone, 1))[0]
    ranks = values(forks.run(size, sharded_steps))
    assert all(parts > 0 for _, parts in ranks), "no matrix was cut"
    for number, (parameter, is_hidden) in enumerate(whole):
        found, parameter = torch.cat([shards[number] for shards, _ in ranks]), parameter.reshape(-1)
        assert torch.equal(found, parameter) or not is_hidden, f"parameter {number}"
        assert_close(found, parameter, 1e-6, "torch's fused AdamW rounds by an element's place in its vector registers")


def sliced_steps():
    """Fused rows, plain columns and a gated stack, cut over two ranks, beside one that both have."""
    torch.manual_seed(5)
    world, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    qkv, out, stack, both = torch.randn(16, 6), torch.randn(6, 8), torch.randn(2, 8, 6), torch.randn(3, 3)
    wholes = [qkv, out, stack, both]

    def own(values):
        halves = values[2].chunk(2, 1)  # each half is cut
        gated = torch.cat([half.chunk(size, 1)[rank] for half in halves], 1)
        return [values[0].chunk(size)[rank], values[1].chunk(size, 1)[rank], gated, values[3]]

    def optimizer_of(tensors, is_split):
        parameters = [nn.Parameter(value.clone()) for value in tensors]
        parameters[2].is_stacked = True
        described = [Matrices.of(p, parts=2 if n == 2 else 1) for n, p in enumerate(parameters)]
        if is_split:
            described = [m if n == 3 else m.split_over(world, int(n == 1)) for n, m in enumerate(described)]
        described[0] = described[0].with_sections(*FUSED)
        return parameters, Muon(parameters, **OPTIONS, matrices=dict(zip(parameters, described, strict=True)))

    whole, alone = optimizer_of(wholes, False)
    mine, split = optimizer_of(own(wholes), True)
    for _ in range(3):
        gradients = [torch.randn(value.shape) for value in wholes]
        run(alone, whole, [gradients])
        run(split, mine, [own(gradients)])
    return [torch.equal(a, b) for a, b in zip(mine, own([p.detach() for p in whole]), strict=True)]


def test_tensor_parallel_slices_equal_the_whole_bit_for_bit(forks):
    for rank in values(forks.run(2, sliced_steps)):
        assert rank == [True] * 4


def lonely_gradient():
    """A gradient is missing on the one rank of two that step parts of a matrix."""
    weight = torch.ones(4, 2)
    shard = weight.reshape(-1)[dist.get_rank() * 3 :][: 3 + 2 * dist.get_rank()].clone()
    optimizer = Muon([shard])
    optimizer.set_shards(
        {weight: Matrices.of(weight)}, Shards({shard: (weight, dist.get_rank() * 3)}, [weight], dist.group.WORLD)
    )
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)


def test_a_part_of_a_matrix_needs_its_gradient(forks):
    assert all("no gradient" in error for error in values(forks.run(2, lonely_gradient)))


WRONG = {
    "lr": ({"lr": -1.0}, "lr=-1.0 "),
    "momentum": ({"momentum": 1.0}, r"momentum=1.0 is not in \[0, 1\)"),
    "betas": ({"betas": (0.9, 1.0)}, r"betas\[1\]=1.0 is not in \[0, 1\)"),
    "steps": ({"ns_steps": 0}, "ns_steps=0 is not positive"),
    "scale": ({"scale": "rsm"}, "scale='rsm' must be 'rms' or 'original'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_one_line(case):
    options, says = WRONG[case]
    with pytest.raises(UserError, match=says):
        Muon([nn.Parameter(torch.ones(2, 2))], **options)


def test_sections_that_do_not_divide_the_rows():
    with pytest.raises(UserError, match=r"sections=\(3, 1, 1\) must .* 12 rows"):
        Matrices.of(nn.Parameter(torch.ones(12, 2))).with_sections(3, 1, 1)


def test_many_matrices_are_iterated_in_parts():
    """On a CPU a stack is cut so that a part fits into a cache: each matrix ends as it does alone."""
    stack = torch.randn(3, 100, 96, 64, generator=torch.Generator().manual_seed(0))
    found = orthogonalize(stack)
    assert found.shape == stack.shape
    for number in (0, 41, 42, 43, 99):
        assert_close(found[1, number], orthogonalize(stack[1, number]), 1e-5, f"matrix {number}")  # threads differ
    assert orthogonalize(stack[:0]).shape == (0, 100, 96, 64)


def test_weight_norm_divides_a_matrix_into_a_matrix_and_a_vector():
    model = Model()
    for module, name in ((model.hidden, "weight"), (model.moe.experts, "weight_in")):
        nn.utils.parametrizations.weight_norm(module, name)
    found = names_of(model, others=[model.head])
    assert found["moe.experts.parametrizations.weight_in.original1"] == (16, 16)
    assert found["hidden.parametrizations.weight.original1"] == (8,)
    assert not any(name.endswith("original0") for name in found)


@pytest.mark.parametrize("gate", ["gate", "router"])
def test_routers_of_other_packages_are_no_hidden_matrices(gate):
    block = nn.Module()
    block.experts, block.shared_expert = nn.ModuleList([nn.Linear(8, 8)]), nn.Linear(8, 8)
    block.shared_expert_gate = nn.Linear(8, 1)
    block.add_module(gate, nn.Linear(8, 4))
    assert names_of(block).keys() == {"experts.0.weight", "shared_expert.weight"}
