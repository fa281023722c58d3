"""Exchanges: their options and errors, chunks and bounds, the choice of shadowed experts, failures of one rank."""

import contextlib
import copy
import datetime
import io
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from exchange_libraries import installed
from forks import values
from one_process import EXPERTS, WIDTH, compared
from torch import nn

import fmoe
from fmoe.exchange import Cost, build_exchange, collectives, hops
from fmoe.exchange.monitor import PeerError, timeout_of
from fmoe.exchange.shadow import choose
from fmoe.kernels.padded import PaddedPlan
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import Routing


def layer_of(exchange="all_to_all", exchange_options=None, **options):
    """A layer over all ranks."""
    options = {"d_model": WIDTH, "num_experts": EXPERTS, "d_hidden": 24, "seed": 5, "name": "block 3", **options}
    return fmoe.FMoE(moe_group=dist.group.WORLD, exchange=exchange, exchange_options=exchange_options, **options)


def refused(action, *arguments, **options):
    """Class and message of the error of a call; None if there is none."""
    try:
        action(*arguments, **options)
    except (fmoe.UserError, PeerError, MemoryError) as error:
        return type(error).__name__, str(error)


# exchange, its options, words of the error; on one rank, only names are checked
REFUSED_NAMES = {
    ("alltoall", "chunks"): "exchange='alltoall' .* 'all_to_all'",
    ("all_gather", "chunks"): "chunks=2 .* all_gather; .* wire_dtype",
    ("all_gather", "group"): "group=2 .* all_gather",
    ("hierarchical", "nodesize"): "hierarchical.* 'node_size'",
}


@pytest.mark.parametrize(("exchange", "option"), REFUSED_NAMES)
def test_unknown_names(exchange, option):
    with pytest.raises(fmoe.UserError, match=REFUSED_NAMES[exchange, option]):
        build_exchange(None, EXPERTS, exchange, {option: 2})


REFUSED = [
    ("all_to_all", {"chunks": 0}, "chunks=0"),
    ("all_to_all", {"max_rows": 7}, "max_rows=7 .* 8"),
    ("all_to_all", {"wire_dtype": torch.int8}, "wire_dtype=torch.int8"),
    ("all_to_all", {"shadow": 5}, "shadow=5 .* num_experts=4"),
    ("padded", {"slots": -1}, "slots=-1"),
    ("hierarchical", {"node_size": 3}, "node_size=3 .* 2 ranks"),
    ("deepep", {"wire_dtype": torch.float16}, "wire_dtype=torch.float16"),
    ("deepep", {"num_sms": 3}, "num_sms=3"),
    ("symmetric", {"max_rows": 3}, "max_rows=3"),
]


def refused_values():
    with installed():
        return [
            refused(build_exchange, dist.group.WORLD, EXPERTS, exchange, options) for exchange, options, _ in REFUSED
        ]


def test_invalid_values(two_ranks):
    for errors in values(two_ranks.run(refused_values)):
        for (kind, message), (*_, pattern) in zip(errors, REFUSED, strict=True):
            assert kind == "UserError" and re.search(pattern, message), message


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_chunks_hold_every_row_once_in_the_order_of_experts(chunks):
    generator = torch.Generator().manual_seed(0)
    expert_TK = torch.randint(-1, EXPERTS, (30, 2), generator=generator)
    plan = DispatchPlan.from_routing(Routing(expert_TK, expert_TK), EXPERTS)
    arranged = plan.arranged(chunks, expert_order=[2, 0, 3, 1], last=[3])
    flat = expert_TK.reshape(-1)
    kept = int((flat >= 0).sum())
    assert sorted(arranged.perm_N.tolist()) == list(range(60))
    assert torch.equal(arranged.perm_N[arranged.inverse_TK.reshape(-1)], torch.arange(60))
    assert (flat[arranged.perm_N[kept:]] == -1).all()
    expected = []
    for chunk in range(chunks):
        for expert in (2, 0, 1):
            rows = (flat == expert).nonzero().view(-1).tolist()
            sizes = [hops.chunk_of(len(rows), c, chunks) for c in range(chunks)]
            expected += rows[sum(sizes[:chunk]) :][: sizes[chunk]]
    expected += (flat == 3).nonzero().view(-1).tolist()
    assert arranged.perm_N[:kept].tolist() == expected


def test_experts_in_no_chunk_come_last_in_the_order_given():
    expert_TK = torch.tensor([[0, 1], [2, 3], [1, 0], [3, -1]])
    plan = DispatchPlan.from_routing(Routing(expert_TK, expert_TK), EXPERTS)
    assert plan.arranged(last=[1, 0]).perm_N.tolist() == [2, 3, 6, 1, 4, 0, 5, 7]


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_padded_rows_lie_by_chunk_expert_and_slot(chunks):
    num_experts = 3
    slots = 6
    generator = torch.Generator().manual_seed(1)
    expert_TK = torch.tensor([[0, 2], [-1, 0], [2, 0], [1, -1], [2, 0], [0, 2]])
    x_TD, weight_TK, grad_PD, grad_TD = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(6, 4), (6, 2), (18, 4), (6, 4)]
    )
    place_TK = torch.full_like(expert_TK, -1)
    taken = [0] * num_experts
    for assignment, expert in enumerate(expert_TK.flatten().tolist()):
        if expert >= 0:
            chunk, slot = divmod(taken[expert], slots // chunks)
            place_TK.view(-1)[assignment] = (chunk * num_experts + expert) * (slots // chunks) + slot
            taken[expert] += 1
    put_TKP = torch.nn.functional.one_hot(place_TK + 1, 19)[..., 1:].double()  # 1 where an assignment has its slot

    plan = PaddedPlan(DispatchPlan.from_routing(Routing(expert_TK, weight_TK), num_experts), slots, chunks)
    x_TD.requires_grad_()
    rows_PD = plan.permute(x_TD, 18)
    rows_PD.backward(grad_PD)
    assert torch.equal(rows_PD, torch.einsum("tkp,td->pd", put_TKP, x_TD))
    assert_close(x_TD.grad, torch.einsum("tkp,pd->td", put_TKP, grad_PD), 1e-12, "gradient of the tokens")
    given = [grad_PD.requires_grad_(), weight_TK.requires_grad_()]
    found = plan.combine(*given)
    expected = torch.einsum("tkp,pd,tk->td", put_TKP, *given)
    assert_close(found, expected, 1e-12, "output")
    for name, a, b in zip(
        ("rows", "weights"), *(torch.autograd.grad(y, given, grad_TD) for y in (found, expected)), strict=True
    ):
        assert_close(a, b, 1e-12, f"gradient of the {name}")


def test_shadowing_takes_a_hot_expert_and_no_more():
    even = [[10, 10, 10, 10], [10, 10, 10, 10]]
    hot = [[2, 2, 2, 100], [2, 2, 2, 100]]
    cost = Cost(row_seconds=1e-3, row_bytes=1e3, expert_bytes=1e5, bandwidth=1e7)
    assert choose(even, 2, 4, cost) == []
    assert choose(hot, 2, 4, cost) == [3]
    assert choose(hot, 2, 0, cost) == []
    # By hand: worker 1 computes 204 + 4 rows, 102 of which worker 0 sends; shadowed, each computes 100 of its own.
    assert cost.seconds(hot, 2, []) == pytest.approx(204 * 1e-3 + 4 * 102 * 1e3 / 1e7)
    assert cost.seconds(hot, 2, [3]) == pytest.approx(108 * 1e-3 + 4 * 4 * 1e3 / 1e7 + 2 * 1e5 / 1e7)
    dear = Cost(row_seconds=1e-3, row_bytes=1e3, expert_bytes=1e9, bandwidth=1e7)
    assert choose(hot, 2, 4, dear) == []


def measured():
    layer = layer_of(exchange_options={"shadow": 2})
    layer(torch.randn(3, WIDTH))
    return layer.exchange.cost


def test_the_cost_of_shadowing_is_measured_and_agreed(two_ranks):
    first, second = values(two_ranks.run(measured))
    assert first == second and first.row_seconds > 0 and first.bandwidth > 0
    size = 2 * WIDTH * 24 + WIDTH + 24
    assert first.expert_bytes == 4 * size and first.row_bytes == 4 * WIDTH


class Own(nn.Module):
    """Experts that cannot be shadowed."""

    def __init__(self, num_experts, d_model, d_hidden, *, first_expert, seed):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, rows, counts):
        return rows * self.weight


def not_shadowed(case):
    if case == "fully_shard":
        groups = fmoe.parallel.init(ep=2)
        layer = fmoe.FMoE(d_model=WIDTH, num_experts=4, moe_group=groups.moe_group, exchange_options={"shadow": 1})
        layer = fmoe.parallel.fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer), groups)
    else:
        small = [nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)) for _ in range(2)]
        kinds = {"own": Own, "several kinds": [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), *small]}
        layer = layer_of(exchange_options={"shadow": 1}, expert=kinds[case])
    with contextlib.suppress(StopIteration):
        return refused(layer, torch.randn(4, WIDTH))


@pytest.mark.parametrize(
    ("case", "pattern"),
    [
        ("own", "shadow=1 .* Own"),
        ("fully_shard", "shadow=1 .* fully_shard"),
        ("several kinds", r"^block 3: expert shapes=\[4, 16\] torch.float32, \[4\]"),
    ],
)
def test_experts_that_cannot_be_shadowed(request, case, pattern):
    ranks = request.getfixturevalue("four_ranks" if case == "fully_shard" else "two_ranks")
    for kind, message in values(ranks.run(not_shadowed, case)):
        assert kind == "UserError" and re.search(pattern, message), message


def bounded(max_rows):
    """Most rows that this rank's experts got at once, of a gate that sends everything to rank 0."""
    layer = layer_of(
        exchange_options={"max_rows": max_rows},
        gate=lambda x: (torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1)),
    )
    most = []
    layer.experts.register_forward_pre_hook(lambda _, args: most.append(args[0].shape[0]))
    x = torch.randn(500, WIDTH, requires_grad=True)
    y = layer(x)
    forward = list(most)
    y.sum().backward()
    return forward, len(most), x.grad.isfinite().all().item()


def test_a_hot_expert_never_gets_more_rows_than_the_bound(two_ranks):
    first, second = values(two_ranks.run(bounded, 64))
    assert sum(first[0]) == 1000 and max(first[0]) <= 64 and sum(second[0]) == 0
    # Once more in the backward pass: activations of one chunk at a time.
    assert first[1] == 2 * len(first[0]) == second[1] and first[2] and second[2]


def relayed():
    """Most rows of an all-to-all; the first node's ranks send all rows to ranks of index 0, the others to all ranks."""
    expert = torch.arange(400).unsqueeze(1)
    expert = expert % 2 * 2 if dist.get_rank() < 2 else expert % 4
    sizes = []

    def all_to_all(*args, **kwargs):
        pending = collectives.all_to_all(*args, **kwargs)
        sizes.append(len(pending._result))
        return pending

    hops.all_to_all = all_to_all
    try:
        gate = lambda x: (expert, torch.ones(len(x), 1))  # noqa: E731
        layer_of("hierarchical", {"max_rows": 310, "node_size": 2}, gate=gate)(torch.randn(400, WIDTH))
    finally:
        hops.all_to_all = collectives.all_to_all
    return max(sizes)


def test_the_bound_holds_for_rows_that_pass_through(four_ranks):
    assert max(values(four_ranks.run(relayed))) <= 310


def other_groups():
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    near = pairs[rank // 2]
    far = pairs[2 + rank % 2]
    hierarchical = (build_exchange, dist.group.WORLD, EXPERTS, "hierarchical")
    return refused(*hierarchical, {"groups": (near, far)}), refused(*hierarchical, {"groups": (far, near)})


def test_groups_that_are_no_nodes_are_an_error(four_ranks):
    for rank, (accepted, (_, message)) in enumerate(values(four_ranks.run(other_groups))):
        wrong = [rank % 2, rank % 2 + 2]
        right = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert accepted is None and f"groups must have the ranks {right} for this node, not {wrong}" in message


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hierarchical", "deepep", "symmetric"])
def test_four_ranks(forks, way):
    assert max(values(forks.run(4, compared, way, "three of eight"))) < 1e-5


def padded_too_small():
    layer = layer_of("padded")
    layer(torch.randn(6, WIDTH))
    return layer.exchange.slots, *refused(layer, torch.randn(9, WIDTH))


def test_a_larger_batch_than_the_slots_is_an_error(two_ranks):
    for slots, _, message in values(two_ranks.run(padded_too_small)):
        assert slots == 6 and " 9 rows" in message and "slots=6" in message


def fails_before_the_counts(exchange):
    """Rank 1 fails between its gate and the exchange of counts, for which rank 0 waits; then both go on."""
    with installed(torch.float32):
        layer = layer_of(exchange)
        x = torch.randn(6, WIDTH)
        layer(x)
        plan = layer.exchange.plan

        def fail(_routing):
            raise MemoryError("no room for the plan")

        if dist.get_rank() == 1:
            layer.exchange.plan = fail
        error = refused(layer, x)
        layer.exchange.plan = plan
        return error, exchange == "padded" or layer(x).isfinite().all().item()


@pytest.mark.parametrize("exchange", ["all_to_all", "hierarchical", "padded", "all_gather", "deepep", "symmetric"])
def test_an_error_before_the_counts_reaches_the_others(forks, exchange):
    ((waiting, text), _), (failed, _) = results = values(forks.run(2, fails_before_the_counts, exchange))
    assert failed == ("MemoryError", "no room for the plan") and all(usable for _, usable in results)
    assert waiting == "PeerError" and "rank 1 failed in block 3" in text and "MemoryError: no room for the plan" in text


def fails_in_the_gate():
    """Rank 1 fails before the sum of loads over the group, for which rank 0 waits in its gate."""
    layer = layer_of(gate="switch", gate_options={"balance_group": dist.group.WORLD})
    x = torch.randn(6, WIDTH)
    layer(x)
    return refused(layer, x.double() if dist.get_rank() == 1 else x)


def test_an_error_reaches_ranks_that_wait_in_their_gates(forks):
    (waiting, text), (failed, reason) = values(forks.run(2, fails_in_the_gate))
    assert (waiting, failed) == ("PeerError", "UserError") and reason in text and "float64" in reason


def one_without_gradients(exchange):
    with installed(torch.float32), torch.set_grad_enabled(dist.get_rank() == 0):
        return refused(layer_of(exchange), torch.randn(6, WIDTH))


@pytest.mark.by_default("all_to_all", "hierarchical", "all_gather")
@pytest.mark.parametrize("exchange", ["all_to_all", "hierarchical", "all_gather", "deepep", "symmetric"])
def test_one_rank_without_gradients_is_refused(forks, exchange):
    for _, message in values(forks.run(2, one_without_gradients, exchange)):
        assert "trains while" in message and "torch.no_grad()" in message


def timeouts():
    group = dist.new_group([0, 1], datetime.timedelta(seconds=17))
    dist.barrier()  # the pool destroys the group when this returns, while the other rank may still connect
    return timeout_of(group), timeout_of(dist.group.WORLD) > 60


def test_the_timeout_is_the_groups(two_ranks):
    assert values(two_ranks.run(timeouts)) == [(17.0, True)] * 2


CHANGES = {
    "d_hidden": {"d_hidden": 12},
    "num_experts": {"num_experts": 8},
    "top_k": {"top_k": 1},
    "gate": {"gate": "switch", "top_k": 2},
    "seed": {"seed": 2},
    "exchange": {"exchange_options": {"chunks": 2}},
    "experts": {"expert": "swiglu"},
    "dtype of the input": {},
}


def one_that_differs():
    """Errors of layers that are built otherwise on rank 1, by the name of the setting."""
    errors = {}
    for name, change in CHANGES.items():
        is_other = dist.get_rank() == 1
        x = torch.randn(4, WIDTH)
        x = x.double() if is_other and name == "dtype of the input" else x
        errors[name] = refused(layer_of(**(change if is_other else {})), x)
    return errors


def test_settings_that_differ_between_ranks(two_ranks):
    first, second = values(two_ranks.run(one_that_differs))
    assert first == second
    for name, (kind, message) in first.items():
        assert kind == "UserError" and message.startswith(f"block 3: {name}=") and " on rank 1, but " in message


def evaluated_between(gate, exchange, first):
    options = {"gate": gate, "seed": 0, "moe_group": dist.group.WORLD, "exchange": exchange}
    layer = fmoe.FMoE(d_model=8, num_experts=4, d_hidden=8, gate_options={"eval_capacity_factor": 3.0}, **options)
    outputs = []
    for index, training in enumerate([first, not first, first, not first]):
        tokens = torch.randn(12 if training else 20, 8, generator=torch.Generator().manual_seed(index))
        fmoe.random.set_position(seed=0, step=index)
        outputs.append(layer.train(training)(tokens))
        outputs[-1].sum().backward()
    return [y.detach() for y in outputs], layer.gate.weight.grad


@pytest.mark.parametrize("first", [True, False], ids=["training first", "evaluation first"])
@pytest.mark.parametrize("gate", ["switch", "gshard"])
def test_padded_slots_are_those_of_the_mode(two_ranks, gate, first):
    padded, plain = (values(two_ranks.run(evaluated_between, gate, way, first)) for way in ("padded", "all_to_all"))
    for rank, expected in zip(padded, plain, strict=True):
        for y, other in zip([*rank[0], rank[1]], [*expected[0], expected[1]], strict=True):
            assert_close(y, other, 1e-5, "output or gradient")


def pickled(options):
    for group in ("moe_group", "slice_group", "sequence_group", "expert_tensor_group"):
        if group in options:
            options[group] = dist.group.WORLD
    if options.pop("balances", False):
        options["gate_options"] = {"balance_group": dist.group.WORLD}
    layer = fmoe.MoE.build(d_model=8, num_experts=4, d_hidden=8, seed=0, name="block 3", **options)
    copy.copy(layer)
    assert all(torch.equal(a, b) for a, b in zip(copy.deepcopy(layer).parameters(), layer.parameters(), strict=True))
    model = nn.Sequential(layer)
    saves = (pickle.dumps, lambda model: torch.save(model, io.BytesIO()), pickle.dumps)
    return [refused(save, model) for save in saves]


@pytest.mark.parametrize("group", ["moe_group", "slice_group", "sequence_group", "expert_tensor_group", "balances"])
def test_a_layer_with_groups_asks_for_its_state_dict(two_ranks, group):
    for errors in values(two_ranks.run(pickled, {group: True})):
        assert all(kind == "UserError" and "block 3" in text and "state_dict" in text for kind, text in errors)
