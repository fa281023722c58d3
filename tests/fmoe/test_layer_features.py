"""Experts of every kind, gates of one's own, losses by hand, shared and fine-grained experts, nests, copies."""

import copy
import io
import logging
import pickle

import pytest
import torch
from compare import assert_close
from forks import values
from torch import nn
from torch.utils import _pytree as pytree

import fmoe
from fmoe.gates import GATES
from fmoe.parallel import is_expert
from fmoe.routing import Routing

D, E = 8, 4


def build(**options):
    torch.manual_seed(0)
    return fmoe.FMoE(**{"d_model": D, "num_experts": E, "d_hidden": 16, "seed": 1} | options)


def tokens(*shape):
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(3)).requires_grad_()


class Block(nn.Module):
    """An expert like those of FFNExperts, as a module of its own."""

    def __init__(self, d_model):
        super().__init__()
        self.up, self.down = nn.Linear(d_model, 16), nn.Linear(16, d_model)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Paired(Block):
    """An expert whose output is a tuple."""

    def forward(self, x):
        return (super().forward(x),)


def copy_into(blocks, stack):
    with torch.no_grad():
        for e, block in enumerate(blocks):
            block.up.weight.copy_(stack.weight_in[e])
            block.up.bias.copy_(stack.bias_in[e])
            block.down.weight.copy_(stack.weight_out[e])
            block.down.bias.copy_(stack.bias_out[e])


def test_modules_as_experts_equal_the_stack():
    stacked, listed = build(), build(expert=Block)
    copy_into(listed.experts, stacked.experts)
    x, y = tokens(2, 6), tokens(2, 6)
    a, b = stacked(x), listed(y)
    assert_close(b, a, 1e-6, "output")
    a.square().sum().backward()
    b.square().sum().backward()
    assert_close(y.grad, x.grad, 1e-5, "gradient of the input")
    for e in range(E):
        assert_close(listed.experts[e].up.weight.grad, stacked.experts.weight_in.grad[e], 1e-5, f"expert {e}")


def test_experts_of_different_kinds_and_ready_ones():
    ready = Block(D)
    layer = build(expert=[Block, lambda d: nn.Linear(d, d), nn.Identity(), ready])
    assert layer.experts[3] is ready
    x = tokens(3, 5)
    layer(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_modules_are_drawn_by_global_id():
    a, b = build(expert=Block), build(expert=Block)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.experts[0].up.weight, a.experts[1].up.weight)


def test_granularity_splits_experts_and_keeps_their_size():
    layer, fine = build(top_k=1), build(top_k=1, granularity=4)
    assert fine.num_experts == 4 * E and fine.gate.top_k == 4 and fine.experts.d_hidden == 4
    count = lambda m: sum(p.numel() for n, p in m.experts.named_parameters() if "weight" in n)  # noqa: E731
    assert count(fine) == count(layer)
    assert fine(tokens(5)).shape == (5, D)


@pytest.mark.parametrize("gate", [False, True], ids=["plain", "gated"])
def test_shared_expert_adds_its_output(gate):
    layer = build(shared_expert=24, shared_gate=gate)
    x = tokens(2, 5)
    routed = build()
    expected = routed(x) + layer.shared(x.reshape(-1, D)).view_as(x)
    assert_close(layer(x), expected, 1e-6, "output")
    assert not any(is_expert(p) for p in layer.shared.parameters())
    assert all(is_expert(p) for p in layer.experts.parameters())


def test_a_gated_shared_expert_by_hand():
    """Output and gradients, in double precision."""
    swiglu = {"activation": "silu", "gated": True, "bias": False}
    shared = build(shared_expert=24, shared_gate=True, shared_options=swiglu).shared.double()
    x, d_y = torch.randn(2, 5, D, dtype=torch.float64)
    x.requires_grad_()
    parameters = [shared.expert.weight_in, shared.expert.weight_out, shared.output_gate.weight, x]
    found = shared(x)
    gate, value = x @ parameters[0][0, :24].T, x @ parameters[0][0, 24:].T
    expected = (gate * gate.sigmoid() * value) @ parameters[1][0].T * (x @ parameters[2].T).sigmoid()
    assert_close(found, expected, 1e-12, "output")
    for a, b in zip(*(torch.autograd.grad(y, parameters, d_y) for y in (found, expected)), strict=True):
        assert_close(a, b, 1e-12, "gradient")


@pytest.mark.parametrize("options", [{}, {"granularity": 2}, {"sequence_first": True}, {"group_size": 3}], ids=str)
@pytest.mark.parametrize("gate", ["naive", "switch", "random", "expert_choice"])
def test_padding_is_zero_beside_a_shared_expert(gate, options):
    layer, x = build(gate=gate, shared_expert=24, shared_gate=True, **options), tokens(3, 8)
    mask = torch.rand(3, 8) < 0.6
    y = layer(x, mask)
    assert not y[~mask].any() and y[mask].all()
    if gate == "naive":
        assert_close(y[mask], layer(x)[mask], 1e-5, "tokens")
    x.grad = None
    layer(x, mask).sum().backward()
    assert not x.grad[~mask].any()
    none = layer(x, torch.zeros(3, 8, dtype=torch.bool))
    assert not none.any()


def test_padding_of_a_nest_is_zero_beside_a_shared_expert():
    class Two(nn.Module):
        def __init__(self, d_model):
            super().__init__()
            self.a = nn.Linear(d_model, d_model)

        def forward(self, nest):
            return {"x": self.a(nest["x"]), "more": nest["more"] + 1}

    layer = build(expert=Two, shared_expert=24)
    mask = torch.tensor([True, False, True, False])
    out = layer({"x": tokens(4), "more": torch.randn(4, 3)}, mask)
    assert not out["x"][~mask].any() and not out["more"][~mask].any() and out["x"][mask].all()


def test_filled_tokens_have_no_output_of_a_shared_expert():
    """FastMoE's mask: 0 is routed, k is `mask_dict[k]`, and what the dict lacks is zero."""
    mask = torch.tensor([0, 1, 2, 0])
    value = torch.arange(float(D))
    layer = fmoe.FMoE(
        num_expert=E, d_model=D, world_size=1, expert=[Block] * E, shared_expert=24, mask=mask, mask_dict={1: value}
    )
    y = layer(tokens(4))
    assert_close(y[1], value, 1e-6, "filled")
    assert not y[2].any() and y[0].all() and y[3].all()


def padding_over_ranks(kind):
    layer = build(shared_expert=24, shared_gate=True, **{kind: torch.distributed.group.WORLD})
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, D, generator=generator)
    mask = torch.rand(6, 3, generator=generator) < 0.5
    if kind == "sequence_group":
        own = slice(3 * torch.distributed.get_rank(), 3 * torch.distributed.get_rank() + 3)
        x, mask = x[own], mask[own]
    layer.sequence_first = True
    y = layer(x, mask)
    y.sum().backward()
    return bool(y[~mask].any()), bool(y[mask].all()), int(mask.sum())


@pytest.mark.parametrize("kind", ["slice_group", "sequence_group"])
def test_padding_is_zero_beside_a_shared_expert_on_parts(two_ranks, kind):
    for padding_has_any, tokens_have_all, count in values(two_ranks.run(padding_over_ranks, kind)):
        assert not padding_has_any and tokens_have_all and count


def test_shared_experts_of_two_layers_differ():
    a, b = build(shared_expert=24, seed=1), build(shared_expert=24, seed=2)
    assert not torch.equal(a.shared.expert.weight_in, b.shared.expert.weight_in)


def test_nests_of_tensors():
    class Pair(nn.Module):
        def __init__(self, d_model):
            super().__init__()
            self.a, self.b = nn.Linear(d_model, d_model), nn.Linear(3, 5)

        def forward(self, rows):
            return {"a": self.a(rows["a"]), "b": self.b(rows["b"])}

    layer = build(expert=Pair, top_k=1)
    inputs = {"a": tokens(2, 6), "b": torch.randn(2, 6, 3, requires_grad=True)}
    out = layer(inputs)
    assert out["a"].shape == (2, 6, D) and out["b"].shape == (2, 6, 5)
    x_TD, groups = fmoe.layout.Layout(D).tokens(inputs["a"], None, None, seed=0)
    routing = layer.gate(x_TD, groups)
    flat_b = inputs["b"].reshape(-1, 3)
    for t in range(12):
        e = int(routing.expert_TK[t, 0])
        assert_close(out["b"].reshape(-1, 5)[t], layer.experts[e].b(flat_b[t]), 1e-6, f"token {t}")
    (out["a"].sum() + out["b"].sum()).backward()
    assert inputs["b"].grad.shape == (2, 6, 3)


def test_a_function_is_a_gate_and_fastmoes_pair_too():
    by_hand = lambda x_TD: Routing(torch.full((len(x_TD), 1), 2), torch.ones(len(x_TD), 1))  # noqa: E731
    pair = lambda x_TD: (torch.full((len(x_TD),), 2), torch.ones(len(x_TD), 1, 1))  # noqa: E731
    x = tokens(7)
    a, b = build(gate=by_hand), build(gate=pair)
    assert torch.equal(a(x), b(x))
    expected = a.experts(x, [0, 0, 7, 0])
    assert_close(a(x), expected, 1e-6, "output")


def test_losses_by_hand_are_those_of_auto():
    """Also summed over two passes of different losses."""
    weights = {"balance": 2.0, "z": 3.0}
    auto, manual = (build(gate="switch", aux_loss=how, loss_weights=weights) for how in ("auto", "manual"))
    for layer in (auto, manual):
        fmoe.random.set_position(1, 1)
        loss = layer(tokens(3, 6)).square().sum() + layer(tokens(7)).sum()
        if layer is manual:
            loss = loss + fmoe.collect_losses(nn.Sequential(layer))
        loss.backward()
    for (name, p), q in zip(auto.named_parameters(), manual.parameters(), strict=True):
        assert_close(q.grad, p.grad, 1e-5, name)
    assert fmoe.collect_losses(manual) == 0
    assert fmoe.metrics(manual)[""].tokens == 25


def test_no_losses_by_hand_are_a_zero_of_the_models_device():
    assert fmoe.collect_losses(nn.Identity()) == 0
    assert fmoe.collect_losses(nn.Linear(2, 2, device="meta")).is_meta


def test_losses_by_hand_that_nobody_collects_are_told_once(caplog):
    layer = build(aux_loss="manual", name="layer 7")
    with caplog.at_level(logging.WARNING, logger="fmoe"):
        for _ in range(2):
            layer(tokens(4)).sum().backward()
    assert sum("layer 7" in r.message and "collect_losses" in r.message for r in caplog.records) == 1


def test_losses_by_hand_without_gradients_need_no_collection(caplog):
    layer = build(aux_loss="manual").requires_grad_(False)
    with caplog.at_level(logging.WARNING, logger="fmoe"):
        layer(tokens(4).detach())
    assert not caplog.records and fmoe.collect_losses(layer) > 0


def test_expert_dropout_is_the_same_wherever_the_token_lies():
    layer = build(expert_options={"dropout": 0.5}, gate="naive")
    x = tokens(6, 5).detach()
    fmoe.random.set_position(1, 0)
    whole = layer(x)
    parts = []
    for i in range(3):
        fmoe.random.set_position(1, 0, first_token=i * 2 * 5)
        parts.append(layer(x[2 * i : 2 * i + 2]))
    assert_close(torch.cat(parts), whole, 1e-6, "output")
    fmoe.random.set_position(1, 1)
    assert not torch.allclose(layer(x), whole)
    layer.eval()
    plain = build(gate="naive").eval()
    assert_close(layer(x), plain(x), 1e-6, "evaluation")


def test_copies_keep_what_they_are():
    layer = build()
    twin = copy.deepcopy(layer)
    assert all(is_expert(p) for p in twin.experts.parameters())
    fmoe.set_loss_scale(7.0)
    try:
        (twin(tokens(4)).sum() * 0).backward()
    finally:
        fmoe.set_loss_scale(1.0)
    (layer(tokens(4)).sum() * 0).backward()
    assert_close(twin.gate.weight.grad, 7 * layer.gate.weight.grad, 1e-5, "scaled loss")


def round_trip(how, layer, fresh):
    if how == "deepcopy":
        return copy.deepcopy(layer)
    if how == "pickle":
        return pickle.loads(pickle.dumps(layer))  # noqa: S301 - our own
    file = io.BytesIO()
    if how == "save":
        torch.save(layer, file)
        file.seek(0)
        return torch.load(file, weights_only=False)
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


@pytest.mark.cover(1)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save", "state_dict"])
@pytest.mark.parametrize("gate", sorted(GATES))
def test_a_layer_with_losses_that_wait_can_be_copied_and_saved(gate, how):
    """They belong to the graph of the original: the copy has none, the original keeps them."""
    layer, x = build(gate=gate, aux_loss="manual", seed=3), tokens(4)
    ids = {"token_ids": torch.arange(4)}
    fmoe.random.set_position(seed=1, step=2)
    layer(x, **ids)
    twin = round_trip(how, layer, build(gate=gate, aux_loss="manual", seed=3))
    assert twin.collect_losses() is None
    waiting = layer.collect_losses()
    assert (waiting is None) == (gate in ("zero", "random", "base", "hash"))  # those that have no loss
    if waiting is not None:
        waiting.backward()
        assert layer.gate.weight.grad is not None
    assert twin.gate is not layer.gate
    assert all(is_expert(p) for p in twin.experts.parameters())
    outputs = []
    for each in (layer, twin):
        fmoe.random.set_position(seed=1, step=3)
        outputs.append(each(x, **ids))
        loss = each.collect_losses()
        outputs.append(torch.zeros(()) if loss is None else loss)
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


def copied_with_groups():
    group = torch.distributed.group.WORLD
    layer = build(moe_group=group, aux_loss="manual")
    layer(tokens(4))  # a loss that waits
    twin = copy.deepcopy(layer)
    same = torch.equal(twin(tokens(4)), layer(tokens(4)))
    return same, twin.moe_group is group, all(is_expert(p) for p in twin.experts.parameters())


def test_a_layer_over_workers_can_be_copied(two_ranks):
    assert two_ranks.run(copied_with_groups) == [(True, True, True)] * 2


def of_one_kind(kind, others=Block):
    return build(expert=[kind, others, others, others])(tokens(40))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: build(expert=[Block, Block]), ["2 entries", "4 experts"]),
        (lambda: build(expert=Block(D)), ["Block"]),
        (lambda: build(expert=Block, expert_options={"bias": True}), ["expert_options"]),
        (lambda: of_one_kind(lambda d: nn.Linear(d, d + 1)), ["local expert 0", "(9,)", "(8,)"]),
        (lambda: of_one_kind(Paired), ["local expert 0", "((8,),)", "(8,)"]),
        (lambda: build(gate=lambda x: (torch.full((len(x), 1), 9), torch.ones(len(x), 1)))(tokens(3)), ["expert 9"]),
        (lambda: build(gate=lambda x: x)(tokens(3)), ["Tensor"]),
        (lambda: build(gate=lambda x: (torch.zeros(2).long(), torch.zeros(3)))(tokens(3)), ["3 tokens"]),
        (lambda: build(check=True, name="layer 3")(tokens(3) * float("nan")), ["layer 3", "finite"]),
    ],
)
def test_invalid_experts_and_decisions(make, says):
    with pytest.raises(fmoe.UserError) as error:
        make()
    assert all(part in str(error.value) for part in says) and "\n" not in str(error.value)


def test_truncated_normal_is_cut_and_scaled():
    weight = torch.empty(400, 1000)
    fmoe.experts.truncated_normal_(weight)
    std = (0.1 / 1000) ** 0.5
    assert weight.abs().max() <= 2 * std
    assert weight.std().item() == pytest.approx(0.88 * std, rel=0.02)  # of a normal cut at two standard deviations


def test_evaluation_is_counted_where_it_is_wanted():
    """And nothing of it is left in the figures of training, nor in a gate that learns from them."""
    layer = build(gate="sigmoid", top_k=2, gate_options={"eval_capacity_factor": 0.5})
    layer(tokens(2, 8)).sum().backward()
    before = fmoe.metrics(layer)[""]
    bias = layer.gate.expert_bias_E.clone()
    layer.eval()
    layer(tokens(3, 8))
    assert fmoe.metrics(layer)[""] == before
    with fmoe.metrics.counting(layer):
        assert fmoe.metrics(layer)[""].tokens == 0
        layer(tokens(3, 8))
        with torch.no_grad():
            layer(tokens(1, 8))
        found = fmoe.metrics(layer)[""]
    assert found.tokens == 32 and found.drop_rate > 0.3 and not found.losses
    assert fmoe.metrics(layer)[""] == before and before.tokens == 16
    layer(tokens(3, 8))
    assert fmoe.metrics(layer)[""] == before
    fmoe.end_step(layer)
    once = build(gate="sigmoid", top_k=2, gate_options={"eval_capacity_factor": 0.5})
    once(tokens(2, 8)).sum().backward()
    fmoe.end_step(once)
    assert torch.equal(layer.gate.expert_bias_E, once.gate.expert_bias_E)
    assert not torch.equal(layer.gate.expert_bias_E, bias)


@pytest.mark.parametrize(
    "make",
    [
        lambda: build(shared_expert=8),
        lambda: fmoe.FMoETransformerMLP(num_expert=E, d_model=D, d_hidden=16),
        lambda: fmoe.SoftMoE(D, E),
        lambda: fmoe.MMoE(D, E, 2),
    ],
    ids=["layer", "fastmoe", "soft", "mmoe"],
)
def test_autocast_casts_no_float64(make):
    layer, x = make().double().eval(), torch.randn(3, 5, D, dtype=torch.float64)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    assert pytree.tree_all(lambda y: y.dtype == torch.float64, found)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("weights", "tokens"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_autocast_mixes_no_float64(weights, tokens):
    layer = build().to(weights)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(fmoe.UserError, match=r"input .* is torch.*experts are"):
        layer(torch.randn(5, D, dtype=tokens))


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_full_backward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
    ],
)
@pytest.mark.filterwarnings("ignore:For backward hooks to be called")  # torch's, about the gate
def test_global_hooks_see_the_experts(register, backend):
    layer, seen = build(backend=backend), []
    handle = register(lambda module, *_: seen.append(module))
    try:
        layer(tokens(5)).sum().backward()
    finally:
        handle.remove()
    assert layer.experts in seen


def test_two_backward_passes_through_one_forward_pass_add_losses_by_hand_once():
    """The way around in docs/losses.md: one of the losses gets the auxiliary ones."""
    layer = build(gate="switch", gate_options={"jitter": 0}, aux_loss="manual")
    x = tokens(6)
    y = layer(x)
    (y.sum() + fmoe.collect_losses(layer)).backward(retain_graph=True)
    (2 * y.sum()).backward()
    found = layer.gate.weight.grad.clone()
    layer.zero_grad()
    (3 * layer(x).sum() + fmoe.collect_losses(layer)).backward()
    assert_close(found, layer.gate.weight.grad, 1e-5, "gradient of the router")
