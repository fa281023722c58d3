"""The contract that every registered gate keeps, whatever it decides, alone and in a layer."""

from dataclasses import dataclass

import pytest
import torch
from compare import assert_close
from torch import Tensor, nn

import fmoe
from fmoe.gates import GATES, build_gate
from fmoe.gates.router import routes_by_logits
from fmoe.routing import RoutingGroups

WIDTH, EXPERTS, SEQUENCES, LENGTH = 8, 6, 4, 9


@dataclass(frozen=True)
class Traits:
    """Promises of a gate beyond the contract.

    Attributes:
        losses: their names in training.
        is_trained: it has a router, to which gradients flow through the weights at every K above 1.
        top_1_is_trained: they do so for K = 1 too: its weight is not normalised away.
        is_distinct: a token's experts differ.
        is_noisy: it draws noise in training.
        ignores_order: in training without noise, permuted tokens of a group get permuted decisions.
        misses_choices: in training, a choice may be -1 without capacity.
    """

    losses: tuple[str, ...] = ("balance", "z")
    is_trained: bool = True
    top_1_is_trained: bool = True
    is_distinct: bool = True
    is_noisy: bool = False
    ignores_order: bool = True
    misses_choices: bool = False


TRAITS = {
    "naive": Traits(top_1_is_trained=False),
    "noisy": Traits(losses=("importance", "load"), is_noisy=True, top_1_is_trained=False),
    "switch": Traits(is_noisy=True),
    "gshard": Traits(is_noisy=True, misses_choices=True, top_1_is_trained=False),
    "swipe": Traits(losses=("z",), ignores_order=False, top_1_is_trained=False),
    "zero": Traits(losses=(), is_trained=False, is_distinct=False),
    "random": Traits(losses=(), is_trained=False, is_noisy=True),
    "base": Traits(losses=()),
    "hash": Traits(losses=(), is_trained=False),
    "expert_choice": Traits(losses=("z",), misses_choices=True),
    "sinkhorn": Traits(losses=("z",)),
    "sigmoid": Traits(losses=("sequence_balance",)),
    "topology": Traits(top_1_is_trained=False),
    "sparsemixer": Traits(is_noisy=True),
}

# Options without which a gate is another one.
OPTIONS = {"topology": {"num_nodes": 2, "bonus": 1.0}, "sparsemixer": {"margin": 0.5}}
# Options that turn the noise of training off, where a gate has them.
QUIET = {"switch": {"jitter": 0.0}, "gshard": {"random_routing": False}}

every_gate = pytest.mark.parametrize("name", sorted(GATES))
every_top_k = pytest.mark.parametrize("top_k", [1, 2, EXPERTS], ids=lambda k: f"top{k}")

with_and_without_capacity = pytest.mark.parametrize("factor", [None, 0.6], ids=["dropless", "capacity"])


def build(name, top_k=2, dtype=torch.float32, **options):
    torch.manual_seed(5)
    gate = build_gate(name, WIDTH, EXPERTS, top_k, **OPTIONS.get(name, {}), **options)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return gate.to(dtype)


def tokens(dtype=torch.float32, count=SEQUENCES * LENGTH):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype)


def groups_of(sequences=SEQUENCES, length=LENGTH, first_group=0, ids=None, **options):
    """Routing groups with token ids, and noise that their place alone decides."""
    count = sequences * length
    first_token = first_group * (options.get("size") or length)
    ids = torch.arange(first_token, first_token + count) % 11 if ids is None else ids
    return RoutingGroups(sequences, length, first_group=first_group, token_ids_T=ids, noise_key=lambda: 77, **options)


def dense(routing) -> Tensor:
    """Weights [T, E] and how often each expert was chosen [T, E], as one tensor: whatever the order of choices."""
    size = (len(routing.expert_TK), EXPERTS + 1)
    slot_TK = routing.expert_TK + 1
    weight_TE = routing.weight_TK.new_zeros(size).scatter_add(1, slot_TK, routing.weight_TK)[:, 1:]
    count_TE = routing.weight_TK.new_zeros(size).scatter_add(1, slot_TK, torch.ones_like(routing.weight_TK))[:, 1:]
    return torch.stack([weight_TE, count_TE], -1)


def check(routing, gate, name, groups, dtype):
    """Check the invariants of a Routing."""
    traits = TRAITS[name]
    expert_TK, weight_TK, stats = routing.expert_TK, routing.weight_TK, routing.stats
    assert expert_TK.shape == weight_TK.shape and expert_TK.shape[0] == groups.num_tokens
    assert name == "expert_choice" or expert_TK.shape[1] == gate.top_k
    assert expert_TK.dtype == torch.int64
    assert weight_TK.dtype == torch.promote_types(dtype, torch.float32)
    assert ((expert_TK >= -1) & (expert_TK < EXPERTS)).all()
    assert weight_TK.isfinite().all()
    valid_T = torch.ones(groups.num_tokens, dtype=torch.bool) if groups.mask_T is None else groups.mask_T
    assert (expert_TK[~valid_T] == -1).all()
    if traits.is_distinct and len(expert_TK):
        assert dense(routing)[..., 1].max() <= 1
    assert set(routing.losses) == (set(traits.losses) if gate.training else set())
    for key, loss in routing.losses.items():
        assert loss.shape == () and loss.isfinite() and loss >= 0, key
    assert stats.load_E.tolist() == [int((expert_TK == e).sum()) for e in range(EXPERTS)]
    assert stats.tokens == valid_T.sum()
    assert 0 <= stats.entropy <= valid_T.sum() * torch.tensor(EXPERTS).log() * (1 + 1e-5)
    made = int(stats.load_E.sum() + stats.dropped)
    if not traits.misses_choices:
        assert made == valid_T.sum() * gate.top_k
    assert all(not t.requires_grad for t in (stats.load_E, stats.dropped, stats.entropy, stats.tokens))


def test_every_gate_has_its_traits():
    """A new gate joins this suite with one line of TRAITS."""
    assert TRAITS.keys() == GATES.keys()


@pytest.mark.cover(2)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@every_top_k
@every_gate
def test_contract(name, top_k, dtype, training):
    gate = build(name, top_k, dtype).train(training)
    mask = torch.arange(SEQUENCES * LENGTH) % 5 != 1
    cases = [
        (SEQUENCES, LENGTH, {}),
        (SEQUENCES, LENGTH, {"mask_T": mask}),
        (SEQUENCES, LENGTH, {"mask_T": mask & False}),
        (SEQUENCES, LENGTH, {"size": 7}),  # ragged: 36 tokens in groups of 7
        (SEQUENCES, LENGTH, {"sequence_first": True, "mask_T": mask}),
        (0, LENGTH, {}),
        (2, 0, {}),
        (1, 1, {}),
        (1, 1, {"size": 16}),
    ]
    for sequences, length, options in cases:
        x = tokens(dtype, sequences * length)
        groups = groups_of(sequences, length, **options)
        check(gate(x, groups), gate, name, groups, dtype)


@pytest.mark.cover(2)
@pytest.mark.parametrize("factor", [None, 0.4, 1.0])
@every_top_k
@every_gate
def test_every_run_decides_and_drops_the_same(name, top_k, factor):
    gate = build(name, top_k, capacity_factor=factor)
    first = gate(tokens(), groups_of())
    check(first, gate, name, groups_of(), torch.float32)
    if factor is None:
        assert first.stats.dropped == 0
    else:
        limit = -(-factor * LENGTH // EXPERTS) if name == "expert_choice" else -(-factor * top_k * LENGTH // EXPERTS)
        load_SE = torch.stack([dense(r)[..., 1].sum(0) for r in chunks(first)])
        assert load_SE.max() <= limit
        if factor < 1 and name not in ("expert_choice", "gshard"):
            assert first.stats.dropped > 0
    for _ in range(3):
        again = gate(tokens(), groups_of())
        assert torch.equal(again.expert_TK, first.expert_TK)
        assert torch.equal(again.weight_TK, first.weight_TK)


def chunks(routing, count=SEQUENCES):
    parts = zip(routing.expert_TK.chunk(count), routing.weight_TK.chunk(count), strict=True)
    return [fmoe.Routing(expert, weight) for expert, weight in parts]


@every_top_k
@every_gate
def test_a_batch_in_parts_is_the_batch(name, top_k):
    gate, x = build(name, top_k), tokens()
    whole = gate(x, groups_of())
    parts = [gate(part, groups_of(2, LENGTH, 2 * i)) for i, part in enumerate(x.chunk(2))]
    assert_close(torch.cat([dense(p) for p in parts]), dense(whole), 1e-6, "decisions")
    assert torch.equal(torch.cat([dense(p) for p in parts])[..., 1], dense(whole)[..., 1])
    for key in whole.losses:
        mean = sum(p.losses[key].item() for p in parts) / 2
        assert mean == pytest.approx(whole.losses[key].item(), rel=1e-5, abs=1e-6), key


@every_gate
def test_padding_changes_nothing_for_the_tokens(name):
    """A masked batch decides as the batch without the masked tokens does, and whatever they hold."""
    gate = build(name)
    mask = torch.arange(LENGTH) < 6
    mask_T = mask.repeat(SEQUENCES)
    x = tokens()
    first = gate(x, groups_of(mask_T=mask_T))
    other = gate(torch.where(mask_T.unsqueeze(1), x, 100.0), groups_of(mask_T=mask_T))
    assert torch.equal(dense(first), dense(other))
    for key in first.losses:
        assert first.losses[key].item() == pytest.approx(other.losses[key].item(), rel=1e-6), key
    if not TRAITS[name].is_noisy:  # noise goes by the place in the group, which is another without them
        ids = groups_of().token_ids_T[mask_T]
        short = gate(x[mask_T], groups_of(SEQUENCES, 6, ids=ids))
        assert_close(dense(first)[mask_T], dense(short), 1e-6, "decisions")
        for key in first.losses:
            assert first.losses[key].item() == pytest.approx(short.losses[key].item(), rel=1e-5), key


@every_gate
def test_sequence_first_is_the_transposed_batch(name):
    gate, x, ids = build(name), tokens(), groups_of().token_ids_T
    swap = torch.arange(SEQUENCES * LENGTH).view(SEQUENCES, LENGTH).t().reshape(-1)
    expected = gate(x, groups_of())
    got = gate(x[swap], groups_of(sequence_first=True, ids=ids[swap]))
    assert_close(dense(got), dense(expected)[swap], 1e-6, "decisions")


@with_and_without_capacity
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@every_gate
def test_permutation_equivariance(name, training, factor):
    """Groups may change places; and tokens within a group, unless the gate or a full expert serves them in order."""
    traits, x, ids = TRAITS[name], tokens(), groups_of().token_ids_T
    if name == "random" or (training and traits.is_noisy and name not in QUIET):
        pytest.skip("noise goes by place")
    options = {"capacity_factor": factor, "eval_capacity_factor": factor}
    gate = build(name, **options, **QUIET.get(name, {})).train(training)
    expected = dense(gate(x, groups_of()))
    places = torch.arange(SEQUENCES * LENGTH).view(SEQUENCES, LENGTH)
    orders = [places[torch.tensor([2, 0, 3, 1])].reshape(-1)]
    in_order = factor is not None and name != "expert_choice"
    if (traits.ignores_order or not training) and not in_order:
        orders.append(places[:, torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1))].reshape(-1))
    for order in orders:
        got = gate(x[order], groups_of(ids=ids[order]))
        assert_close(dense(got), expected[order], 1e-6, "decisions")
        assert torch.equal(dense(got)[..., 1], expected[order][..., 1])


@pytest.mark.cover(2)
@with_and_without_capacity
@pytest.mark.parametrize("expert", ["ffn", "modules"])
@every_top_k
@every_gate
def test_experts_without_tokens_get_zero_gradients_not_none(name, top_k, expert, factor):
    """In a layer: no token, one token, tokens that are all padding, and a batch."""
    layer = fmoe.FMoE(
        d_model=WIDTH,
        num_experts=EXPERTS,
        d_hidden=8,
        top_k=top_k,
        gate=name,
        gate_options={"capacity_factor": factor},
        expert=(lambda width: nn.Linear(width, width)) if expert == "modules" else expert,
        seed=3,
    )
    decided = []
    layer.gate.register_forward_hook(lambda _gate, _inputs, routing: decided.append(routing.expert_TK))
    mean_idle = 0.0
    for shape, is_padding in (((0,), False), ((2, 0), False), ((1, 1), False), ((2, 3), True), ((2, 3), False)):
        layer.zero_grad()
        x = torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(4)).requires_grad_()
        mask = torch.zeros(shape, dtype=torch.bool) if is_padding else None
        y = layer(x, mask, token_ids=torch.arange(x.numel() // WIDTH).view(shape))
        assert y.shape == x.shape and y.isfinite().all()
        (y - 1).square().sum().backward()
        assert x.grad.shape == x.shape and x.grad.isfinite().all()
        for key, parameter in layer.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), key
        busy = set(decided[-1][decided[-1] >= 0].tolist())
        assert not busy or (x.numel() and not is_padding)
        for e in range(EXPERTS):
            of_expert = layer.experts[e].parameters() if expert == "modules" else layer.experts.parameters()
            gradients = [p.grad if expert == "modules" else p.grad[e] for p in of_expert]
            assert any(g.abs().sum() > 0 for g in gradients) == (e in busy), e
        mean_idle += (EXPERTS - len(busy)) / EXPERTS / 5
    assert mean_idle >= 0.6 - 1e-6  # three of five have no token to route


@pytest.mark.parametrize("top_k", [1, 2], ids=lambda k: f"top{k}")
@every_gate
def test_gradients_reach_the_router(name, top_k):
    gate, traits = build(name, top_k), TRAITS[name]
    x = tokens().requires_grad_()
    routing = gate(x, groups_of())
    if not traits.is_trained:
        assert not routing.weight_TK.requires_grad and not list(gate.parameters())
        return
    (routing.weight_TK * torch.randn(routing.weight_TK.shape)).sum().backward(retain_graph=True)
    through_weights = gate.weight.grad.abs().max() > 1e-6
    assert bool(through_weights) == (top_k > 1 or traits.top_1_is_trained)
    assert bool(x.grad.abs().max() > 1e-6) == bool(through_weights)
    for key, loss in routing.losses.items():
        (gradient,) = torch.autograd.grad(loss, gate.weight, retain_graph=True, allow_unused=True)
        is_constant = name == "noisy" and key == "importance" and top_k == 1  # one choice weighs 1: a count
        assert bool(gradient is not None and gradient.abs().max() > 1e-7) != is_constant, key
    for parameter in gate.parameters():
        loss = sum(routing.losses.values()) + routing.weight_TK.sum()
        (gradient,) = torch.autograd.grad(loss, parameter, retain_graph=True)
        assert gradient.isfinite().all()


@every_gate
def test_autocast_does_not_reach_the_router(name):
    gate = build(name)
    expected = gate(tokens(), groups_of())
    with torch.autocast("cpu", torch.bfloat16):
        got = gate(tokens(), groups_of())
    assert got.weight_TK.dtype == torch.float32
    assert torch.equal(dense(got), dense(expected))
    assert all(torch.equal(got.losses[key], loss) for key, loss in expected.losses.items())


@every_gate
def test_a_16_bit_model_decides_in_fp32(name):
    """The gate of a bf16 model is that of an fp32 model with the same numbers."""
    gate = build(name, dtype=torch.bfloat16)
    got = gate(tokens(torch.bfloat16), groups_of())
    expected = gate.float()(tokens(torch.bfloat16).float(), groups_of())
    assert torch.equal(dense(got), dense(expected))


@pytest.fixture
def positions():
    """Afterwards there is no position of the training."""
    yield
    torch.manual_seed(0)


@pytest.mark.cover(1)
@with_and_without_capacity
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@every_gate
def test_compiles_without_a_graph_break(name, training, factor, positions):
    """With a mask; new noise at each call, without compiling again."""
    torch._dynamo.reset()
    compilations = []

    def backend(graph, _):
        compilations.append(graph)
        return graph.forward

    gate, x = build(name, capacity_factor=factor, eval_capacity_factor=factor).train(training), tokens()
    compiled = torch.compile(gate, backend=backend, fullgraph=True)
    mask = torch.arange(SEQUENCES * LENGTH) % 5 != 1
    ids = groups_of().token_ids_T
    outcomes = []
    for step in range(3):
        results = []
        for call in (gate, compiled):
            fmoe.random.set_position(seed=3, step=step)
            groups = RoutingGroups(SEQUENCES, LENGTH, mask_T=mask, token_ids_T=ids)
            results.append(call(x, groups))
        eager, traced = results
        assert_close(dense(traced), dense(eager), 1e-6, "decisions")
        for key, loss in eager.losses.items():
            assert traced.losses[key].item() == pytest.approx(loss.item(), rel=1e-5), key
        assert torch.equal(traced.stats.load_E, eager.stats.load_E)
        outcomes.append(dense(eager))
    assert len(compilations) == 1
    if name == "random" or (name == "noisy" and training):
        assert not torch.equal(outcomes[0], outcomes[1])


def test_a_parametrization_leaves_a_gate_what_it_is():
    """torch gives the gate a class of its own, which must not change what is gathered, or in which precision."""
    gate = build_gate("naive", 8, 4, 2)
    assert routes_by_logits(gate)
    nn.utils.parametrize.register_parametrization(gate, "weight", nn.Identity())
    assert routes_by_logits(gate)
