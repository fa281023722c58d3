"""The router's kernels against the gates: the same experts, equal among equals too; weights, statistics, gradients."""

import random
from typing import NamedTuple

import geometry
import pytest
import torch
from compare import assert_close
from emulator import InOut, Output
from kernel_list import NAMES, ROUTE_ITEMS
from torch import Tensor

from fmoe.gates import GShardRouter, NaiveRouter, SigmoidRouter, SwitchRouter
from fmoe.gates.capacity import count_by_group, drop_over_capacity
from fmoe.gates.router import Scores
from fmoe.kernels.gates import memory_shape
from fmoe.losses import load_balancing_loss, router_z_loss
from fmoe.routing import RoutingGroups

FLOAT, INT64, INT32 = torch.float32, torch.int64, torch.int32


class Top(NamedTuple):
    values: Tensor
    indices: Tensor


@pytest.fixture(autouse=True)
def lowest_index_first(monkeypatch):
    """torch.topk leaves open which of equals it takes."""

    def topk(x, k, dim=-1):
        values, indices = x.sort(dim=dim, descending=True, stable=True)
        return Top(values.narrow(dim, 0, k), indices.narrow(dim, 0, k))

    monkeypatch.setattr(Tensor, "topk", topk)


class Case:
    """Logits with many equal ones, whose scores lie apart or are equal in any arithmetic; a gate."""

    def __init__(self, seed):
        self.draw, self.g = random.Random(seed), torch.Generator().manual_seed(seed)
        draw = self.draw
        self.experts = draw.choice([1, 3, 8, 16, 31, 33, 64, 100, 260])
        self.tokens = draw.choice([0, 1, 7, 20])
        self.top_k = self.experts if seed % 11 == 0 and self.experts < 40 else draw.randint(1, min(9, self.experts))
        dtype = list(NAMES)[seed // 4 % 3]
        self.logits = ((torch.randn(self.tokens, self.experts, generator=self.g) * 64).round() / 32).to(dtype)
        self.name = NAMES[dtype]
        self.items = draw.choice([i for i in ROUTE_ITEMS[self.name] if i == 0 or 32 * i >= self.experts])
        self.mask_T = torch.rand(self.tokens, generator=self.g) < 0.7 if draw.random() < 0.4 else None
        self.bias_E = None
        self.scale = 1.0
        # By which the gates tell themselves apart: is_sigmoid, by_logits, normalize.
        groups, kept = self._groups() if draw.random() < 0.4 else (0, 0)
        limits = {"expert_groups": groups, "kept_groups": kept} if groups else {}
        kind = seed % 4
        if kind == 0:
            normalize = draw.random() < 0.5
            self.gate = NaiveRouter(1, self.experts, self.top_k, normalize=normalize, **limits)
            self.how, self.best_of = (False, True, normalize), 1
        elif kind == 1:
            groups = kept = 0
            self.gate, self.how = SwitchRouter(1, self.experts, self.top_k), (False, False, False)
        elif kind == 2:
            groups = kept = 0
            self.gate, self.how = GShardRouter(1, self.experts, self.top_k), (False, False, True)
        else:
            normalize, self.scale = draw.random() < 0.5, draw.choice([1.0, 2.5])
            self.gate = SigmoidRouter(
                1, self.experts, self.top_k, normalize=normalize, routed_scale=self.scale, **limits
            )  # fmt: skip
            self.bias_E = torch.randint(-1, 2, (self.experts,), generator=self.g).float()
            self.gate.expert_bias_E.copy_(self.bias_E)
            self.how, self.best_of = (True, False, normalize and self.top_k > 1), 2
        self.groups, self.kept_groups = groups, kept
        self.best_of = getattr(self, "best_of", 1)
        self.gate.eval()

    def _groups(self):
        for groups in (8, 4, 2, 3, 1):
            kept = self.draw.randint(1, groups)
            if self.experts % groups == 0 and kept * (self.experts // groups) >= self.top_k:
                return groups, kept
        return 0, 0

    def scores(self, dtype=FLOAT):
        x = self.logits.to(dtype)
        logsumexp_T = x.logsumexp(-1)
        if self.how[0]:
            score = x.sigmoid()
            return score, Scores(x, x, score / score.sum(-1, keepdim=True).clamp(min=1e-20), logsumexp_T)
        score = (x - logsumexp_T.unsqueeze(-1)).exp()
        return score, Scores(x, x, score, logsumexp_T)

    def route(self, launch, wants_all=True):
        """Choices and weights; then scores, logsumexp and entropy, or None."""
        t, e, k = self.tokens, self.experts, self.top_k
        tile = self.draw.choice([1, 8, 40])
        outputs = [Output((t, e), FLOAT), Output((t,), FLOAT), Output((t,), FLOAT)]
        return launch(
            f"fmoe::route<{self.name}, {self.items}>",
            geometry.route(t, e, k, self.groups, self.items, geometry.tiles(t, max(t, 1), tile)), *self.inputs(),
            max(t, 1), 1, 1, tile, 0, *self.outputs(), *(outputs if wants_all else [None] * 3), *[None] * 4,
        )  # fmt: skip

    def inputs(self):
        flags = (*self.how, self.scale, self.groups, self.kept_groups, self.best_of)
        return self.logits, self.bias_E, self.mask_T, self.tokens, self.experts, self.top_k, *flags

    def outputs(self):
        return Output((self.tokens, self.top_k), INT64), Output((self.tokens, self.top_k), FLOAT)

    def expected(self):
        """Scores, the gate's own, its choices."""
        score_TE, scores = self.scores()
        choice = self.gate.choose(scores, RoutingGroups(1, self.tokens))
        expert_TK = choice.expert_TK
        if self.mask_T is not None:
            expert_TK = torch.where(self.mask_T.unsqueeze(1), expert_TK, -1)
        return score_TE, scores, expert_TK, choice.weight_TK


@pytest.mark.parametrize("seed", range(72))
def test_route(launch, seed):
    case = Case(seed)
    wants_all = seed % 9 != 0
    expert_TK, weight_TK, *found = case.route(launch, wants_all)
    score_TE, scores, expected_TK, expected_weight_TK = case.expected()
    assert torch.equal(expert_TK, expected_TK)
    assert_close(weight_TK, expected_weight_TK, 1e-5, "weights")
    if wants_all:
        score, logsumexp, entropy = found
        assert_close(score, score_TE, 1e-5, "scores")
        assert_close(logsumexp, scores.logsumexp_T, 1e-5, "logsumexp")
        assert_close(entropy, torch.special.entr(scores.probs_TE).sum(-1), 1e-5, "entropy")


@pytest.mark.parametrize("seed", range(48))
def test_counts_and_sums_by_tile(launch, seed):
    """What `queue` continues from; and for softmax its losses and statistics."""
    case = Case(seed)
    t, e, k, mask_T = case.tokens, case.experts, case.top_k, case.mask_T
    size, tile, by_choice = case.draw.choice([max(t, 1), 7, 64]), case.draw.choice([1, 8]), case.draw.random() < 0.5
    groups = RoutingGroups(4, t // 4, size=size, sequence_first=True) if t == 20 else RoutingGroups(1, t, size=size)
    per_group, tiles, choices = -(-size // tile), geometry.tiles(t, size, tile), k if by_choice else 1
    sequences, length = memory_shape(groups)
    expert_TK, _, _, count, sums, sums3, ticket = launch(
        f"fmoe::route<{case.name}, {case.items}>", geometry.route(t, e, k, case.groups, case.items, tiles, choices),
        *case.inputs(), size, sequences, max(length, 1), tile, by_choice, *case.outputs(), None, Output((t,), FLOAT),
        None, Output((tiles, choices, e), INT32), Output((tiles, e), FLOAT), Output((tiles, 3), FLOAT),
        Output((1,), INT32),
    )  # fmt: skip
    _, scores, expected_TK, _ = case.expected()
    assert torch.equal(expert_TK, expected_TK)
    valid_T = torch.ones(t) if mask_T is None else mask_T.float()
    squares, entropies = scores.logsumexp_T.square(), torch.special.entr(scores.probs_TE).sum(-1)

    def by_tile(x_TX):
        x_GSX = groups.split(x_TX.double())
        x_GSX = torch.cat([x_GSX, x_GSX.new_zeros(len(x_GSX), -x_GSX.shape[1] % tile, *x_GSX.shape[2:])], 1)
        x_BX = x_GSX.reshape(-1, tile, *x_TX.shape[1:]).sum(1)
        return x_BX if len(x_BX) else x_BX.new_zeros(tiles, *x_TX.shape[1:])

    hits_TKE = torch.nn.functional.one_hot(expected_TK + 1, e + 1)[..., 1:]
    assert torch.equal(count.double(), by_tile(hits_TKE if by_choice else hits_TKE.sum(1, keepdim=True)))
    assert_close(sums, by_tile(scores.probs_TE * valid_T.unsqueeze(1)), 1e-5, "sums of probabilities")
    assert_close(
        sums3, by_tile(torch.stack([squares, entropies, torch.ones(t)], 1) * valid_T.unsqueeze(1)), 1e-5, "sums"
    )
    assert not ticket.any()
    if case.how[0]:
        return
    num_groups, chunks, factor = max(1, groups.count), -(-e // 32), case.draw.choice([0.5, 1.25]) if by_choice else 0.0
    _, _, fraction, _, _, _, stats, balance, z = launch(
        "fmoe::queue", geometry.queue(groups.count, e), InOut(count), sums, sums3, num_groups, per_group, choices, e, k,
        factor, Output((num_groups,), INT64), None, 0, Output((num_groups, e), FLOAT), Output((num_groups, e), INT64),
        Output((num_groups, chunks, 2), torch.float64), InOut(ticket), Output((e + 5,), FLOAT), Output((), FLOAT),
        Output((), FLOAT),
    )  # fmt: skip
    groups.mask_T = mask_T
    kept_TK = drop_over_capacity(expected_TK, groups, e, factor) if factor else expected_TK
    load_GE = count_by_group(expected_TK, groups, e).double()
    valid_GS = groups.valid_or_none(torch.device("cpu"))
    expected_balance = load_balancing_loss(groups.split(scores.probs_TE.double()), load_GE, valid_GS)
    expected_z, tokens = router_z_loss(scores.logsumexp_T.double(), mask_T), valid_T.sum()
    assert_close(balance, expected_balance, 1e-5, "balance")
    assert_close(z, expected_z, 1e-5, "z")
    load_E, dropped = (
        torch.bincount(kept_TK[kept_TK >= 0], minlength=e),
        (expected_TK >= 0).sum() - (kept_TK >= 0).sum(),
    )
    rest = [dropped, (entropies * valid_T).sum(), tokens, expected_balance * tokens, expected_z * tokens]
    assert_close(stats, torch.cat([load_E.double(), torch.tensor(rest, dtype=torch.float64)]), 1e-5, "statistics")
    if t:
        assert_close(fraction, load_GE / load_GE.sum(1, keepdim=True).clamp(min=1), 1e-5, "fractions")


@pytest.mark.parametrize("items", ROUTE_ITEMS["float"])
def test_route_of_odd_numbers(launch, items):
    """NaN first, as torch.topk; -0 equals 0; a row of -inf has experts too, and none twice."""
    logits = torch.zeros(6, 20)
    logits[0, 7] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3] = -0.0
    logits[3, 5:] = -torch.inf
    logits[4, 9] = torch.inf
    logits[5] = torch.nan
    expert_TK, weight_TK = launch(
        f"fmoe::route<float, {items}>", geometry.route(6, 20, 7, 0, items), logits, None, None, 6, 20, 7, 0, 1, 1, 1.0,
        0, 0, 1, 6, 1, 1, 8, 0, Output((6, 7), INT64), Output((6, 7), FLOAT), *[None] * 7,
    )  # fmt: skip
    expected = logits.topk(7)
    assert torch.equal(expert_TK, expected.indices)
    torch.testing.assert_close(weight_TK, expected.values.softmax(-1), equal_nan=True)


@pytest.mark.parametrize("seed", range(48))
def test_route_backward(launch, seed):
    case = Case(seed)
    is_sigmoid, _, normalize = case.how
    expert_TK = case.route(launch, False)[0]
    t, e, k = case.tokens, case.experts, case.top_k
    d_weight, d_score = (torch.randn(t, n, generator=case.g) for n in (k, e))
    d_logsumexp = torch.randn(t, generator=case.g)
    wants = [seed % 5 != 1, seed % 5 != 2, seed % 5 != 3]
    x = case.logits.double().requires_grad_()
    logsumexp = x.logsumexp(-1)
    score = x.sigmoid() if is_sigmoid else (x - logsumexp.unsqueeze(1)).exp()
    chosen = score.gather(1, expert_TK.clamp(min=0))
    weight = chosen / chosen.sum(-1, keepdim=True) if normalize else chosen
    total = sum(
        (value * grad).sum()
        for value, grad, is_wanted in (
            (weight, torch.where(expert_TK < 0, 0, d_weight) * case.scale, wants[0]),
            (score, d_score, wants[1]),
            (logsumexp, d_logsumexp, wants[2]),
        )
        if is_wanted
    )
    total.backward()
    gradients = [g if w else None for g, w in zip((d_weight, d_score, d_logsumexp), wants, strict=True)]
    out = case.draw.choice([case.logits.dtype, torch.bfloat16])
    (found,) = launch(
        f"fmoe::route_backward<{case.name}, {NAMES[out]}>", geometry.route_backward(t, e), case.logits, expert_TK,
        logsumexp.detach().float() if not is_sigmoid or wants[2] else None, *gradients, *[None] * 5, t, e, k,
        is_sigmoid, normalize, case.scale, max(t, 1), 1, 1, Output((t, e), out),
    )  # fmt: skip
    limit = {FLOAT: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[out]
    assert_close(found, x.grad, limit, "d_logits")


def test_scores_that_vanish(launch):
    """Sigmoids whose sum is below what it is divided by: weights are zero, gradients finite."""
    logits = torch.full((1, 4), -200.0)
    expert_TK, weight_TK = launch(
        "fmoe::route<float, 1>", geometry.route(1, 4, 2, 0, 1), logits, None, None, 1, 4, 2, 1, 0, 1, 1.0, 0, 0, 1,
        1, 1, 1, 8, 0, Output((1, 2), INT64), Output((1, 2), FLOAT), *[None] * 7,
    )  # fmt: skip
    assert expert_TK.tolist() == [[0, 1]] and not weight_TK.any()
    (d_logits,) = launch(
        "fmoe::route_backward<float, float>", geometry.route_backward(1, 4), logits, expert_TK, None, torch.ones(1, 2),
        *[None] * 7, 1, 4, 2, 1, 1, 1.0, 1, 1, 1, Output((1, 4), FLOAT),
    )  # fmt: skip
    assert not d_logits.any()
