"""Exchanges: their options and errors, chunks and bounds, what shadowing chooses, precision on the wire, the watch."""

import copy
import datetime
import io
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from compare import assert_close, relative_error
from forks import values

import fmoe
from fmoe.exchange import EXCHANGES, Cost, build_exchange
from fmoe.exchange.collectives import PeerError, timeout_of
from fmoe.exchange.shadow import choose
from fmoe.kernels.padded import PaddedPlan
from fmoe.kernels.rows import DispatchPlan, chunk_counts
from fmoe.routing import Routing

WIDTH, EXPERTS = 16, 4


def test_an_unknown_exchange_or_option_lists_those_there_are():
    with pytest.raises(
        fmoe.UserError, match=r"exchange='alltoall' is not known; valid names: .*did you mean 'all_to_all'"
    ):
        fmoe.FMoE(d_model=8, num_experts=4, exchange="alltoall")
    with pytest.raises(fmoe.UserError, match=r"chunks=2 is not an option of all_gather; valid names: wire_dtype"):
        fmoe.FMoE(d_model=8, num_experts=4, exchange="all_gather", exchange_options={"chunks": 2})
    with pytest.raises(fmoe.UserError, match=r"is not an option of all_gather; valid names: wire_dtype"):
        build_exchange(None, 4, "all_gather", {"group": None})
    with pytest.raises(fmoe.UserError, match=r"is not an option of hierarchical.* did you mean 'node_size'"):
        build_exchange(None, 4, "hierarchical", {"nodesize": 2})


@pytest.mark.parametrize(
    ("exchange", "options", "message"),
    [
        ("all_to_all", {"chunks": 0}, "chunks=0 is not a positive whole number"),
        ("all_to_all", {"max_rows": 7}, "max_rows=7 must be a whole number of at least 8"),
        ("all_to_all", {"wire_dtype": torch.int8}, "wire_dtype=torch.int8 is not a floating point dtype"),
        ("all_to_all", {"shadow": 5}, "shadow=5 is not a whole number from 0 to num_experts=4"),
        ("padded", {"slots": -1}, "slots=-1 is not a positive whole number"),
        ("hierarchical", {"node_size": 3}, "node_size=3 does not divide the 2 ranks"),
    ],
)
def test_options_that_cannot_be(two_ranks, exchange, options, message):
    for kind, found in values(two_ranks.run(build_on_two, exchange, options)):
        assert kind == "UserError" and re.search(message, found), found


def build_on_two(exchange, options):
    try:
        build_exchange(dist.group.WORLD, EXPERTS, exchange, options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None, ""


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
            sizes = chunk_counts(len(rows), chunks)
            expected += rows[sum(sizes[:chunk]) :][: sizes[chunk]]
    expected += (flat == 3).nonzero().view(-1).tolist()
    assert arranged.perm_N[:kept].tolist() == expected


def test_experts_in_no_chunk_come_last_in_the_order_given():
    expert_TK = torch.tensor([[0, 1], [2, 3], [1, 0], [3, -1]])
    plan = DispatchPlan.from_routing(Routing(expert_TK, expert_TK), EXPERTS)
    assert plan.arranged(last=[1, 0]).perm_N.tolist() == [2, 3, 6, 1, 4, 0, 5, 7]


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_padded_rows_lie_by_chunk_expert_and_slot(chunks):
    num_experts, slots = 3, 6
    generator = torch.Generator().manual_seed(1)
    expert_TK = torch.tensor([[0, 2], [-1, 0], [2, 0], [1, -1], [2, 0], [0, 2]])
    x_TD, weight_TK, grad_PD, grad_TD = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(6, 4), (6, 2), (18, 4), (6, 4)]
    )
    place_TK, taken = torch.full_like(expert_TK, -1), [0] * num_experts
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
    found, expected = plan.combine(*given), torch.einsum("tkp,pd,tk->td", put_TKP, *given)
    assert_close(found, expected, 1e-12, "output")
    for name, a, b in zip(
        ("rows", "weights"), *(torch.autograd.grad(y, given, grad_TD) for y in (found, expected)), strict=True
    ):
        assert_close(a, b, 1e-12, f"gradient of the {name}")


@pytest.mark.parametrize("count", [0, 1, 5, 12])
def test_chunks_are_as_even_as_can_be(count):
    sizes = chunk_counts(count, 5)
    assert sum(sizes) == count and max(sizes) - min(sizes) <= 1


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


def run_with(exchange, options, dtype="float32", **layer_options):
    """Output and gradient of the input of two steps, and the same from one worker."""
    torch.manual_seed(dist.get_rank())
    layer_options = {"d_model": WIDTH, "num_experts": EXPERTS, "d_hidden": 24, "seed": 5, **layer_options}
    spread = fmoe.FMoE(moe_group=dist.group.WORLD, exchange=exchange, exchange_options=options, **layer_options)
    alone = fmoe.FMoE(**layer_options)
    found = []
    for _ in range(2):
        x = torch.randn(3, 20, WIDTH, dtype=getattr(torch, dtype))
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, z = spread.to(x.dtype)(a), alone.to(x.dtype)(b)
        weights = torch.randn_like(z)
        (y * weights).sum().backward()
        (z * weights).sum().backward()
        found += [relative_error(y, z), relative_error(a.grad, b.grad)]
    return max(found), getattr(spread.exchange, "cost", None)


@pytest.mark.parametrize("exchange", sorted(set(EXCHANGES) - {"deepep", "symmetric"}))  # test_optional_exchanges
def test_bf16_on_the_wire_rounds_once(two_ranks, exchange):
    for error, _ in values(two_ranks.run(run_with, exchange, {"wire_dtype": torch.bfloat16})):
        assert 1e-4 < error < 1e-2  # it does travel in 16 bits


def test_the_cost_of_shadowing_is_measured_and_agreed(two_ranks):
    (first_error, first), (second_error, second) = values(two_ranks.run(run_with, "all_to_all", {"shadow": 2}))
    assert max(first_error, second_error) < 1e-5
    assert first == second and first.row_seconds > 0 and first.bandwidth > 0
    size = 2 * WIDTH * 24 + WIDTH + 24
    assert first.expert_bytes == 4 * size and first.row_bytes == 4 * WIDTH


class Own(torch.nn.Module):
    """Experts that nobody knows how to lend."""

    def __init__(self, num_experts, d_model, d_hidden, *, first_expert, seed):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(d_model))

    def forward(self, rows, counts):
        return rows * self.weight


def shadow_unknown():
    fmoe.register_expert("own", Own)
    layer = fmoe.FMoE(
        d_model=8, num_experts=4, expert="own", moe_group=dist.group.WORLD, exchange_options={"shadow": 1}
    )
    try:
        layer(torch.randn(3, 8))
    except fmoe.UserError as error:
        return str(error)


def test_shadowing_asks_for_experts_that_can_be_lent(two_ranks):
    for message in values(two_ranks.run(shadow_unknown)):
        assert "shadow=1" in message and "for Own" in message


def bounded(max_rows):
    """Most rows that this rank's experts got at once, of a gate that sends everything to rank 0."""
    layer = fmoe.FMoE(
        d_model=8,
        num_experts=4,
        d_hidden=8,
        gate=lambda x: (torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1)),
        moe_group=dist.group.WORLD,
        exchange_options={"max_rows": max_rows},
        seed=0,
    )
    most = []
    layer.experts.register_forward_pre_hook(lambda _, args: most.append(args[0].shape[0]))
    x = torch.randn(500, 8, requires_grad=True)
    y = layer(x)
    forward = list(most)
    y.sum().backward()
    return forward, len(most), x.grad.isfinite().all().item()


def test_a_hot_expert_never_gets_more_rows_than_the_bound(two_ranks):
    first, second = values(two_ranks.run(bounded, 64))
    assert sum(first[0]) == 1000 and max(first[0]) <= 64 and sum(second[0]) == 0
    # Once more in the backward pass: activations of one chunk at a time.
    assert first[1] == 2 * len(first[0]) == second[1] and first[2] and second[2]


def padded_too_small():
    layer = fmoe.FMoE(d_model=8, num_experts=4, d_hidden=8, moe_group=dist.group.WORLD, exchange="padded", seed=0)
    layer(torch.randn(6, 8))
    try:
        layer(torch.randn(9, 8))
    except fmoe.UserError as error:
        return layer.exchange.slots, str(error)


def test_a_larger_batch_than_the_slots_is_an_error(two_ranks):
    for slots, message in values(two_ranks.run(padded_too_small)):
        assert slots == 6
        assert "may get 9 rows of this batch, more than slots=6" in message


def fails_before_the_counts(exchange):
    """Rank 1 fails between its gate and the exchange of counts, for which rank 0 waits."""
    layer = fmoe.FMoE(d_model=8, num_experts=4, d_hidden=8, moe_group=dist.group.WORLD, exchange=exchange, seed=0)
    x = torch.randn(6, 8)
    layer(x)
    if dist.get_rank() == 1:

        def fail(*_):
            raise MemoryError("no room for the plan")

        DispatchPlan.from_routing = fail
    try:
        layer(x)
    except (MemoryError, PeerError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("exchange", ["all_to_all", "hierarchical", "padded"])
def test_an_error_before_the_counts_reaches_the_others(forks, exchange):
    messages = values(forks.run(2, fails_before_the_counts, exchange))
    assert messages[1] == "MemoryError: no room for the plan"
    assert messages[0].startswith("PeerError: rank 1 failed in FMoE") and messages[0].endswith(messages[1])


def fails_in_the_gate():
    """Rank 1 fails before the sum of loads over the group, for which rank 0 waits in its gate."""
    options = {"d_model": 8, "num_experts": 4, "d_hidden": 8, "moe_group": dist.group.WORLD, "seed": 0}
    layer = fmoe.FMoE(gate="switch", gate_options={"balance_group": dist.group.WORLD}, **options)
    x = torch.randn(6, 8)
    layer(x)
    try:
        layer(x.double() if dist.get_rank() == 1 else x)
    except (fmoe.UserError, PeerError) as error:
        return type(error).__name__, str(error)


def test_an_error_reaches_ranks_that_wait_in_their_gates(forks):
    (waiting, text), (failed, reason) = values(forks.run(2, fails_in_the_gate))
    assert (waiting, failed) == ("PeerError", "UserError") and reason in text and "float64" in reason


def one_without_gradients(exchange):
    layer = fmoe.FMoE(d_model=8, num_experts=4, d_hidden=8, moe_group=dist.group.WORLD, exchange=exchange, seed=0)
    x = torch.randn(6, 8)
    with torch.set_grad_enabled(dist.get_rank() == 0):
        try:
            layer(x)
        except (fmoe.UserError, PeerError) as error:
            return str(error)


@pytest.mark.parametrize("exchange", ["all_to_all", "hierarchical", "all_gather"])
def test_one_rank_without_gradients_is_refused(forks, exchange):
    for message in values(forks.run(2, one_without_gradients, exchange)):
        assert "this rank trains while another one of moe_group runs under torch.no_grad()" in message


def timeouts():
    group = dist.new_group([0, 1], datetime.timedelta(seconds=17))
    dist.barrier()  # the pool destroys the group when this returns, while the other rank may still connect
    return timeout_of(group), timeout_of(dist.group.WORLD) > 60


def test_the_timeout_is_the_groups(two_ranks):
    assert values(two_ranks.run(timeouts)) == [(17.0, True)] * 2


def another(field):
    """One layer is built otherwise on rank 1."""
    mine = dist.get_rank() == 1
    options = {"d_model": WIDTH, "num_experts": EXPERTS, "d_hidden": 8, "seed": 1, "name": "block 3"}
    changes = {
        "d_hidden": {"d_hidden": 12},
        "num_experts": {"num_experts": 8},
        "top_k": {"top_k": 1},
        "gate": {"gate": "switch", "top_k": 2},
        "seed": {"seed": 2},
        "exchange": {"exchange_options": {"chunks": 2}},
        "experts": {"expert": "swiglu"},
        "dtype of the input": {},
    }
    layer = fmoe.FMoE(moe_group=dist.group.WORLD, **(options | (changes[field] if mine else {})))
    x = torch.randn(4, WIDTH)
    try:
        layer(x.double() if mine and field == "dtype of the input" else x)
    except fmoe.UserError as error:
        return str(error)


@pytest.mark.parametrize(
    "field", ["d_hidden", "num_experts", "top_k", "gate", "seed", "exchange", "experts", "dtype of the input"]
)
def test_workers_that_differ_are_told_so(two_ranks, field):
    messages = values(two_ranks.run(another, field))
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"block 3: {field}=") and " on rank 1, but " in messages[0]


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
    messages = []
    for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO()), pickle.dumps):
        try:
            save(torch.nn.Sequential(layer))
        except fmoe.UserError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("group", ["moe_group", "slice_group", "sequence_group", "expert_tensor_group", "balances"])
def test_a_layer_with_groups_asks_for_its_state_dict(two_ranks, group):
    for messages in values(two_ranks.run(pickled, {group: True})):
        assert len(messages) == 3 and all("block 3" in text and "state_dict" in text for text in messages)
