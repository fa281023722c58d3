"""The router's kernels against the gates: the same experts, equal among equals too; weights, statistics, gradients."""

import random
from typing import NamedTuple

import geometry
import pytest
import torch
from compare import assert_close
from emulator import Output
from kernel_list import NAMES, ROUTE_ITEMS
from torch import Tensor

from fmoe.gates import GShardRouter, NaiveRouter, SigmoidRouter, SwitchRouter
from fmoe.gates.router import Scores
from fmoe.routing import RoutingGroups

FLOAT, INT64 = torch.float32, torch.int64


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
        t, e, k = self.tokens, self.experts, self.top_k
        outputs = [Output((t, e), FLOAT), Output((t,), FLOAT), Output((t,), FLOAT), Output((e,), INT64, zeroed=True)]
        return launch(
            f"fmoe::route<{self.name}, {self.items}>", geometry.route(t, e, k, self.groups, self.items), self.logits,
            self.bias_E, self.mask_T, t, e, k, *self.how, self.scale, self.groups, self.kept_groups, self.best_of,
            Output((t, k), INT64), Output((t, k), FLOAT), *(outputs if wants_all else [None] * 4),
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(72))
def test_route(launch, seed):
    case = Case(seed)
    wants_all = seed % 9 != 0
    expert_TK, weight_TK, *found = case.route(launch, wants_all)
    score_TE, scores = case.scores()
    choice = case.gate.choose(scores, RoutingGroups(1, case.tokens))
    expected_TK = choice.expert_TK
    if case.mask_T is not None:
        expected_TK = torch.where(case.mask_T.unsqueeze(1), expected_TK, -1)
    assert torch.equal(expert_TK, expected_TK)
    assert_close(weight_TK, choice.weight_TK, 1e-5, "weights")
    if wants_all:
        score, logsumexp, entropy, count = found
        assert_close(score, score_TE, 1e-5, "scores")
        assert_close(logsumexp, scores.logsumexp_T, 1e-5, "logsumexp")
        assert_close(entropy, torch.special.entr(scores.probs_TE).sum(-1), 1e-5, "entropy")
        assert torch.equal(count, torch.bincount(expected_TK[expected_TK >= 0], minlength=case.experts))


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
        0, 0, 1, Output((6, 7), INT64), Output((6, 7), FLOAT), *[None] * 4,
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
    (found,) = launch(
        f"fmoe::route_backward<{case.name}>", geometry.route_backward(t, e), case.logits, expert_TK,
        logsumexp.detach().float() if not is_sigmoid or wants[2] else None, *gradients, t, e, k, is_sigmoid, normalize,
        case.scale, Output((t, e), case.logits.dtype),
    )  # fmt: skip
    limit = {FLOAT: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[case.logits.dtype]
    assert_close(found, x.grad, limit, "d_logits")


def test_scores_that_vanish(launch):
    """Sigmoids whose sum is below what it is divided by: weights are zero, gradients finite."""
    logits = torch.full((1, 4), -200.0)
    expert_TK, weight_TK = launch(
        "fmoe::route<float, 1>", geometry.route(1, 4, 2, 0, 1), logits, None, None, 1, 4, 2, 1, 0, 1, 1.0, 0, 0, 1,
        Output((1, 2), INT64), Output((1, 2), FLOAT), *[None] * 4,
    )  # fmt: skip
    assert expert_TK.tolist() == [[0, 1]] and not weight_TK.any()
    (d_logits,) = launch(
        "fmoe::route_backward<float>", geometry.route_backward(1, 4), logits, expert_TK, None, torch.ones(1, 2), None,
        None, 1, 4, 2, 1, 1, 1.0, Output((1, 4), FLOAT),
    )  # fmt: skip
    assert not d_logits.any()
