"""Options, errors, registration, state of the gates."""

import copy

import pytest
import torch
from compare import assert_close

import fmoe
from fmoe import kernels, losses
from fmoe.gates import GATES, HashRouter, SigmoidRouter, TopKRouter, build_gate, register_gate
from fmoe.gates.router import routes_by_logits
from fmoe.kernels import reference
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import Routing, RoutingGroups

IDS = torch.arange(24) % 5


@pytest.mark.parametrize("name", sorted(GATES))
def test_a_layer_with_each_gate_trains_and_saves(name):
    layer = fmoe.FMoE(d_model=8, num_experts=4, d_hidden=8, gate=name, seed=3)
    x = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))
    ids = {"token_ids": IDS.view(2, 12)}
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    fmoe.attach_end_step(optimizer, layer)
    before = layer.eval()(x, **ids).square().mean().item()
    layer.train()
    for _ in range(5):
        optimizer.zero_grad()
        layer(x, **ids).square().mean().backward()
        optimizer.step()
    report = fmoe.metrics(layer)[""]
    assert report.tokens == 5 * 24
    assert set(report.losses) <= losses.DEFAULT_LOSS_WEIGHTS.keys()
    layer.eval()
    if name != "random":
        assert layer(x, **ids).square().mean().item() < before
    with torch.device("meta"):
        other = fmoe.FMoE(d_model=8, num_experts=4, d_hidden=8, gate=name, seed=3)
    other.to_empty(device="cpu").reset_parameters()
    fresh = fmoe.FMoE(d_model=8, num_experts=4, d_hidden=8, gate=name, seed=3).state_dict()
    assert other.state_dict().keys() == fresh.keys()
    assert all(torch.equal(value, fresh[key]) for key, value in other.state_dict().items())
    other.load_state_dict(layer.state_dict())
    other.eval()
    torch.manual_seed(1)
    expected = layer(x, **ids)
    torch.manual_seed(1)
    assert torch.equal(other(x, **ids), expected)
    twin = copy.deepcopy(layer).state_dict()
    assert all(torch.equal(value, twin[key]) for key, value in layer.state_dict().items())


def test_a_gate_is_registered_by_one_line():
    class LastRouter(TopKRouter):
        def choose(self, scores, groups):
            expert_TK = scores.logits_TE.topk(self.top_k, largest=False).indices
            return fmoe.gates.Choice(expert_TK, scores.probs_TE.gather(-1, expert_TK))

    def by_sign(x_TD, groups):
        return Routing((x_TD[:, :1] > 0).long(), torch.ones(len(x_TD), 1))

    try:
        register_gate("last", LastRouter)
        fmoe.register_gate("sign", by_sign)
        assert build_gate("last", 8, 4, 1).top_k == 1
        assert build_gate("sign", 8, 4, None) is by_sign
        layer = fmoe.FMoE(d_model=8, num_experts=4, gate="sign", d_hidden=8)
        x = torch.randn(6, 8)
        assert layer(x).shape == (6, 8)
        with pytest.raises(fmoe.UserError, match="did you mean 'last'"):
            build_gate("lasst", 8, 4, 1)
        with pytest.raises(fmoe.UserError, match="gate_options="):
            build_gate("sign", 8, 4, None, jitter=1)
    finally:
        GATES.pop("last", None)
        GATES.pop("sign", None)


@pytest.mark.parametrize("form", ["name", "class"])
def test_a_gate_of_yours_may_have_a_loss_of_its_own(form):
    """Its weight is in `loss_weights`; without one, the layer refuses to train."""

    class Shy(TopKRouter):
        common_losses = ()

        def choose(self, scores, groups):
            expert_TK = scores.logits_TE.topk(self.top_k).indices
            return fmoe.gates.Choice(expert_TK, scores.probs_TE.gather(-1, expert_TK), {"shy": scores.logits_TE.sum()})

    try:
        register_gate("shy", Shy)
        gate, x = {"name": "shy", "class": Shy}[form], torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
        grads = []
        for weight in (0.0, 2.0):
            layer = fmoe.FMoE(d_model=8, num_experts=4, gate=gate, d_hidden=8, loss_weights={"shy": weight}, seed=3)
            layer(x).sum().backward()
            grads.append(layer.gate.weight.grad)
        torch.testing.assert_close(grads[1] - grads[0], 2.0 * x.sum(0).expand(4, 8))
        with pytest.raises(fmoe.UserError, match="'shy'"):
            fmoe.FMoE(d_model=8, num_experts=4, gate=gate, d_hidden=8)(x)
    finally:
        GATES.pop("shy")


def test_two_ranks_come_to_the_bias_of_their_batch(two_ranks):
    assert two_ranks.run(_bias_of_two_ranks) == [None, None]


def _bias_of_two_ranks():
    import torch.distributed as dist

    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) + 1
    biases = []
    for part, group in ((x, None), (x.chunk(2)[dist.get_rank()], dist.group.WORLD)):
        torch.manual_seed(0)
        gate = SigmoidRouter(8, 4)
        gate.record(gate(part, RoutingGroups(len(part) // 16, 16)))
        gate.end_step(group)
        biases.append(gate.expert_bias_E.tolist())
    assert biases[0] == biases[1]
    idle = SigmoidRouter(8, 4)
    if dist.get_rank() == 0:  # a rank without tokens takes part
        idle.record(idle(x, RoutingGroups(4, 16)))
    idle.end_step(dist.group.WORLD)
    assert idle.expert_bias_E.abs().max() > 0


@pytest.mark.parametrize("name", ["naive", "switch", "gshard"])
def test_global_batch_balance_is_that_of_one_group(two_ranks, name):
    assert two_ranks.run(_global_balance_of_two_ranks, name) == [None, None]


def _global_balance_of_two_ranks(name):
    """Sequences over two ranks with balance_group: the loss of one rank whose group is the whole batch."""
    import torch.distributed as dist

    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) + 1
    options = {"capacity_factor": None, "jitter": 0.0} if name == "switch" else {"capacity_factor": None}
    if name == "gshard":
        options["random_routing"] = False
    results = []
    for part, size, group in ((x, 64, None), (x.chunk(2)[dist.get_rank()], 16, dist.group.WORLD)):
        torch.manual_seed(0)
        gate = build_gate(name, 8, 4, 2, balance_group=group, **options)
        loss = gate(part, RoutingGroups(len(part) // size, size)).losses["balance"]
        gradient = torch.autograd.grad(loss, gate.weight)[0]
        loss = loss.detach()
        if group is not None:
            dist.all_reduce(loss)
            dist.all_reduce(gradient)
            loss, gradient = loss / 2, gradient / 2
        results.append((loss, gradient))
    assert_close(results[1][0], results[0][0], 1e-6, "loss")
    assert_close(results[1][1], results[0][1], 1e-5, "gradient")


def test_hash_by_table_and_by_seed():
    table = torch.tensor([[1, 0], [2, 3], [0, 1], [3, 2], [1, 2]])
    groups = RoutingGroups(2, 12, token_ids_T=IDS)
    gate = HashRouter(8, 4, 2, table=table)
    assert torch.equal(gate(torch.zeros(24, 8), groups).expert_TK, table[IDS])
    assert torch.equal(gate.state_dict()["table"], table)
    a, b = (HashRouter(8, 4, 2, seed=seed)(torch.randn(24, 8), groups).expert_TK for seed in (0, 1))
    assert torch.equal(a[IDS == 3], a[IDS == 3][:1].expand(int((IDS == 3).sum()), 2))
    assert not torch.equal(a, b)


def test_expert_choice_takes_top_k_for_its_factor():
    assert build_gate("expert_choice", 8, 4, 3).capacity_factor == 3
    gate = build_gate("expert_choice", 8, 4, None, capacity_factor=1.5)
    assert (gate.capacity_factor, gate.eval_capacity_factor) == (1.5, 1.5)


def test_expert_choice_ranks_equal_tokens_by_place():
    gate = build_gate("expert_choice", 8, 4, 1)
    expert_TK = gate(torch.ones(8, 8), RoutingGroups(1, 8)).expert_TK
    assert ((expert_TK >= 0).sum(1) == torch.tensor([4, 4, 0, 0, 0, 0, 0, 0])).all()


def test_expert_choice_has_a_column_for_each_expert_of_the_busiest_token():
    gate = build_gate("expert_choice", 8, 4, 1)
    gate.weight = torch.nn.Parameter(torch.eye(4, 8))
    x = 9 * torch.eye(8)[torch.arange(16) % 4]  # token t is for expert t % 4
    mask = torch.arange(16) < 8  # the second group has padding alone
    assert gate(x, RoutingGroups(2, 8, mask_T=mask)).expert_TK[:8].tolist() == [[t % 4] for t in range(8)]


def test_all_gates_but_two_gather_logits_instead_of_tokens():
    own = [name for name, kind in GATES.items() if kind.__module__.startswith("fmoe.")]  # other tests register more
    gates = {name: build_gate(name, 8, 4, 1) for name in own}
    assert {name for name, gate in gates.items() if not routes_by_logits(gate)} == {"noisy", "topology"}


@pytest.mark.parametrize("name", ["naive", "noisy", "gshard", "swipe", "sigmoid", "topology"])
def test_default_weights_sum_to_one(name):
    weight_TK = build_gate(name, 8, 4, 2).eval()(torch.randn(24, 8), RoutingGroups(2, 12)).weight_TK
    assert_close(weight_TK.sum(1), torch.ones(24), 1e-6, "sums")


@pytest.mark.parametrize("seed", range(6))
def test_combine_of_few_rows_for_many_places(seed):
    """The sparse path of expert choice, against the reference."""
    g = torch.Generator().manual_seed(seed)
    expert = torch.randint(0, 3, (40, 8), generator=g)
    expert[torch.rand(40, 8, generator=g) < 0.8] = -1
    plan = DispatchPlan.from_routing(Routing(expert, expert), 3)
    num_rows = sum(plan.counts)
    assert 2 * num_rows < expert.numel()
    results = []
    for module in (kernels, reference):
        g.manual_seed(seed)
        x, w = (torch.randn(40, n, dtype=torch.float64, generator=g).requires_grad_() for n in (6, 8))
        rows = module.permute(x, plan.perm_N, plan.inverse_TK, num_rows)
        y = module.combine(rows.square(), w, plan.inverse_TK)
        (y * torch.randn(y.shape, dtype=torch.float64, generator=g)).sum().backward()
        results.append((y, x.grad, w.grad))
    for name, got, expected in zip(("y", "dx", "dw"), *results, strict=True):
        assert_close(got, expected, 1e-12, name)


def test_group_limited_choice_stays_in_the_kept_groups():
    for name in ("naive", "sigmoid"):
        gate = build_gate(name, 8, 12, 3, expert_groups=4, kept_groups=2)
        expert_TK = gate(torch.randn(50, 8), RoutingGroups(1, 50)).expert_TK
        assert all(len({e // 3 for e in row}) <= 2 for row in expert_TK.tolist())


def test_default_weights_of_losses_are_those_of_the_papers():
    papers = {"balance": 1e-2, "z": 1e-3, "importance": 1e-1, "load": 1e-1, "sequence_balance": 1e-4}
    assert papers == losses.DEFAULT_LOSS_WEIGHTS


def test_losses_of_even_and_extreme_loads():
    even = torch.full((2, 6, 4), 0.25)
    one = torch.zeros(2, 6, 4)
    one[..., 1] = 1.0
    for loss in (losses.importance_loss, losses.load_loss):
        assert loss(even).item() == 0
        assert loss(one).item() == pytest.approx(3)  # E - 1
        assert loss(one[:, :0]).item() == 0
        mask = torch.zeros(2, 6, dtype=torch.bool)
        assert loss(one, mask).item() == 0
    load = torch.tensor([[0.0, 6, 0, 0]] * 2)
    assert losses.sequence_balance_loss(3 * even, torch.full((2, 4), 3.0)).item() == pytest.approx(1)
    assert losses.sequence_balance_loss(0.1 * one, load).item() == pytest.approx(4)  # E


@pytest.mark.parametrize(
    ("gate", "top_k", "options", "limit"),
    [
        ("expert_choice", None, {"capacity_factor": 5.0}, "num_experts=4"),
        ("expert_choice", 5, {}, "num_experts=4"),
        ("zero", 9, {}, "num_experts=4"),
        ("sigmoid", 2, {"bias_step": -1.0}, "0"),
        ("sigmoid", 2, {"score": "tanh"}, "sigmoid"),
        ("naive", 2, {"routed_scale": 0.0}, "positive"),
        ("naive", 2, {"kept_groups": 2}, "expert_groups"),
        ("sigmoid", 2, {"expert_groups": 3}, "num_experts=4"),
        ("naive", 3, {"expert_groups": 2, "kept_groups": 1}, "top_k=3"),
        ("sinkhorn", 1, {"iterations": 0}, "1"),
        ("random", 2, {"capacity_factor": -1}, "positive"),
        ("base", 1, {"balance_group": object()}, "BaseRouter"),
        ("hash", 2, {"table": torch.zeros(5, 1, dtype=torch.int64)}, "top_k=2"),
        ("hash", 1, {"table": torch.full((5, 1), 4)}, "0..3"),
        ("hash", 1, {"table": [[0]]}, "int64"),
        ("sparsemixer", 2, {"margin": -0.1}, "0 or more"),
        ("sparsemixer", 2, {"margin": float("nan")}, "0 or more"),
        (3, 2, {}, "name"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_invalid_options(gate, top_k, options, limit):
    """The error has key, value and limit."""
    with pytest.raises(fmoe.UserError) as error:
        build_gate(gate, 8, 4, top_k, **options)
    message = str(error.value)
    key, value = list({"gate" if gate == 3 else "top_k": gate if gate == 3 else top_k, **options}.items())[-1]
    assert key in message and limit in message and "\n" not in message
    assert not isinstance(value, int | float | str) or f"{key}={value!r}" in message


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: RoutingGroups(2, 12), ["token_ids"]),
        (lambda: RoutingGroups(2, 12, token_ids_T=IDS[:5]), ["token_ids_T", "(5,)", "(24,)"]),
        (lambda: RoutingGroups(2, 12, mask_T=IDS[:5] > 1), ["mask_T", "(5,)", "(24,)"]),
        (lambda: RoutingGroups(2, 12, token_ids_T=IDS.float()), ["token_ids", "torch.float32"]),
        (lambda: RoutingGroups(2, 12, token_ids_T=IDS > 1), ["token_ids", "torch.bool"]),
    ],
)
def test_invalid_ids_of_tokens(call, says):
    with pytest.raises(fmoe.UserError) as error:
        build_gate("hash", 8, 4, 1)(torch.zeros(24, 8), call())
    assert all(part in str(error.value) for part in says) and "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("table", [None, torch.arange(20).view(10, 2) % 4], ids=["hash", "table"])
def test_ids_out_of_range_say_so(table, dtype):
    layer = fmoe.FMoE(d_model=8, num_experts=4, top_k=2, d_hidden=8, gate="hash", gate_options={"table": table}, seed=0)
    x, ids = torch.randn(3, 4, 8), torch.arange(12, dtype=dtype).view(3, 4) % 10
    layer(x, token_ids=ids)
    bad = {-1: "-1", -100: "-100"} | ({10: "10", 2**31 - 1: "2147483647"} if table is not None else {})
    for value, says in bad.items():
        ids[1, 2] = value
        with pytest.raises(fmoe.UserError) as error:
            layer(x, token_ids=ids)
        assert "token_ids" in str(error.value) and says in str(error.value) and "\n" not in str(error.value)
        layer(x, ids != value, token_ids=ids)  # padding
    with pytest.raises(fmoe.UserError, match=r"token_ids has dtype torch\.float32"):
        layer(x, token_ids=ids.float())
