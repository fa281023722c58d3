"""The router's kernels against the gates: the same experts, equal among equals too; weights, statistics, gradients."""

import random
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from compare import assert_close
from torch import Tensor

from fmoe.gates import GShardRouter, NaiveRouter, SigmoidRouter, SwitchRouter
from fmoe.gates.capacity import count_by_group, drop_over_capacity
from fmoe.gates.router import Scores
from fmoe.kernels.cuda import calls
from fmoe.kernels.cuda.calls import Rule, TokenTiles
from fmoe.kernels.gates import memory_shape
from fmoe.losses import load_balancing_loss, router_z_loss
from fmoe.routing import RoutingGroups


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

    def __init__(self, seed, kinds=("naive", "switch", "gshard", "sigmoid")):
        self.draw = draw = random.Random(seed)
        self.g = torch.Generator().manual_seed(seed)
        self.experts = draw.choice([1, 3, 8, 16, 31, 33, 64, 100, 150, 260])
        self.tokens = draw.choice([0, 1, 7, 20])
        self.top_k = self.experts if seed % 11 == 0 and self.experts < 40 else draw.randint(1, min(9, self.experts))
        self.logits = (torch.randn(self.tokens, self.experts, generator=self.g) * 64).round() / 32
        self.mask_T = torch.rand(self.tokens, generator=self.g) < 0.7 if draw.random() < 0.4 else None
        self.bias_E = None
        kind = kinds[seed % len(kinds)]
        normalize = draw.random() < 0.5
        limits = self._groups() if kind in ("naive", "sigmoid") and draw.random() < 0.4 else {}
        sizes = (1, self.experts, self.top_k)
        rule = Rule(
            is_sigmoid=kind == "sigmoid",
            by_logits=kind == "naive",
            normalize={"switch": False, "gshard": True}.get(kind, normalize),
            groups=limits.get("expert_groups", 0),
            kept_groups=limits.get("kept_groups", 0),
        )
        if kind == "naive":
            self.gate = NaiveRouter(*sizes, normalize=normalize, **limits)
        elif kind == "sigmoid":
            scale = draw.choice([1.0, 2.5])
            rule = replace(rule, normalize=normalize and self.top_k > 1, scale=scale, best_of=2)
            self.gate = SigmoidRouter(*sizes, normalize=normalize, routed_scale=scale, **limits)
            self.bias_E = torch.randint(-1, 2, (self.experts,), generator=self.g).float()
            self.gate.expert_bias_E.copy_(self.bias_E)
        else:
            self.gate = {"switch": SwitchRouter, "gshard": GShardRouter}[kind](*sizes)
        self.rule = rule
        self.gate.eval()

    def _groups(self):
        for groups in (8, 4, 2, 3, 1):
            kept = self.draw.randint(1, groups)
            if self.experts % groups == 0 and kept * (self.experts // groups) >= self.top_k:
                return {"expert_groups": groups, "kept_groups": kept}
        return {}

    def route(self, launch):
        """Return choices, weights, scores, logsumexp and entropy."""
        return launch(calls.route, self.logits, self.bias_E, self.mask_T, self.top_k, self.rule)

    def expected(self):
        """Return the scores, the gate's `Scores`, its choices and weights."""
        logsumexp_T = self.logits.logsumexp(-1)
        score_TE = self.logits.sigmoid() if self.rule.is_sigmoid else (self.logits - logsumexp_T.unsqueeze(-1)).exp()
        prob_TE = score_TE / score_TE.sum(-1, keepdim=True).clamp(min=1e-20) if self.rule.is_sigmoid else score_TE
        scores = Scores(self.logits, self.logits, prob_TE, logsumexp_T)
        choice = self.gate.choose(scores, RoutingGroups(1, self.tokens))
        expert_TK = choice.expert_TK
        if self.mask_T is not None:
            expert_TK = torch.where(self.mask_T.unsqueeze(1), expert_TK, -1)
        return score_TE, scores, expert_TK, choice.weight_TK


@pytest.mark.parametrize("seed", range(72))
def test_route(launch, seed):
    case = Case(seed)
    expert_TK, weight_TK, score_TE, logsumexp_T, entropy_T = case.route(launch)
    expected_TE, scores, expected_TK, expected_weight_TK = case.expected()
    assert torch.equal(expert_TK, expected_TK)
    assert_close(weight_TK, expected_weight_TK, 1e-5, "weights")
    assert_close(logsumexp_T, scores.logsumexp_T, 1e-5, "logsumexp")
    assert_close(entropy_T, torch.special.entr(scores.probs_TE).sum(-1), 1e-5, "entropy")
    assert_close(score_TE, expected_TE, 1e-5, "scores")


@pytest.mark.parametrize("seed", range(48))
def test_counts_and_sums(launch, seed):
    """By tile, and what `queue` makes of them: losses and statistics."""
    case = Case(seed, kinds=("naive", "switch", "gshard"))
    t = case.tokens
    e = case.experts
    k = case.top_k
    mask_T = case.mask_T
    size = case.draw.choice([max(t, 1), min(7, max(t, 1))])
    by_choice = case.draw.random() < 0.5
    factor = case.draw.choice([0.5, 1.25]) if by_choice else 0.0
    groups = RoutingGroups(4, t // 4, size=size, sequence_first=True) if t == 20 else RoutingGroups(1, t, size=size)
    sequences, length = memory_shape(groups)
    tiles = TokenTiles(t, size, sequences, max(length, 1))

    def run():
        expert_TK, _, _, counted = calls.route_counted(case.logits, mask_T, k, case.rule, tiles, by_choice=by_choice)
        count_BCE = counted.count_BCE.clone()  # `queue` overwrites it
        return expert_TK, count_BCE, counted, calls.queue(counted, k, factor).sums

    expert_TK, count_BCE, counted, sums = launch(run)
    _, scores, expected_TK, _ = case.expected()
    assert torch.equal(expert_TK, expected_TK)
    valid_T = torch.ones(t) if mask_T is None else mask_T.float()
    squares = scores.logsumexp_T.square()
    entropies = torch.special.entr(scores.probs_TE).sum(-1)

    def by_tile(x_TX):
        x_GSX = groups.split(x_TX.double())
        x_GSX = torch.cat([x_GSX, x_GSX.new_zeros(len(x_GSX), -x_GSX.shape[1] % tiles.tile, *x_GSX.shape[2:])], 1)
        x_BX = x_GSX.reshape(-1, tiles.tile, *x_TX.shape[1:]).sum(1)
        return x_BX if len(x_BX) else x_BX.new_zeros(tiles.count, *x_TX.shape[1:])

    hits_TKE = torch.nn.functional.one_hot(expected_TK + 1, e + 1)[..., 1:]
    assert torch.equal(count_BCE.double(), by_tile(hits_TKE if by_choice else hits_TKE.sum(1, keepdim=True)))
    assert_close(counted.sum_BE, by_tile(scores.probs_TE * valid_T.unsqueeze(1)), 1e-5, "sums of probabilities")
    sum_T3 = torch.stack([squares, entropies, torch.ones(t)], 1) * valid_T.unsqueeze(1)
    assert_close(counted.sum_B3, by_tile(sum_T3), 1e-5, "sums")
    groups.mask_T = mask_T
    kept_TK = drop_over_capacity(expected_TK, groups, e, factor) if factor else expected_TK
    load_GE = count_by_group(expected_TK, groups, e).double()
    valid_GS = groups.valid_or_none(torch.device("cpu"))
    balance = load_balancing_loss(groups.split(scores.probs_TE.double()), load_GE, valid_GS)
    z = router_z_loss(scores.logsumexp_T.double(), mask_T)
    tokens = valid_T.sum()
    assert_close(sums.balance, balance, 1e-5, "balance")
    assert_close(sums.z, z, 1e-5, "z")
    load_E = torch.bincount(kept_TK[kept_TK >= 0], minlength=e)
    dropped = (expected_TK >= 0).sum() - (kept_TK >= 0).sum()
    others = [dropped, (entropies * valid_T).sum(), tokens, balance * tokens, z * tokens]
    expected = torch.cat([load_E.double(), torch.tensor(others, dtype=torch.float64)])
    assert_close(sums.stats, expected, 1e-5, "statistics")
    if t:
        assert_close(sums.fraction_GE, load_GE / load_GE.sum(1, keepdim=True).clamp(min=1), 1e-5, "fractions")


@pytest.mark.parametrize("experts", [20, 40, 100, 200, 300])
def test_route_of_odd_numbers(launch, experts):
    """NaN first, as torch.topk; -0 equals 0; a row of -inf has experts too, and none twice."""
    logits = torch.zeros(6, experts)
    logits[0, 7] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3] = -0.0
    logits[3, 5:] = -torch.inf
    logits[4, 9] = torch.inf
    logits[5] = torch.nan
    expert_TK, weight_TK, *_ = launch(calls.route, logits, None, None, 7, Rule(by_logits=True))
    expected = logits.topk(7)
    assert torch.equal(expert_TK, expected.indices)
    torch.testing.assert_close(weight_TK, expected.values.softmax(-1), equal_nan=True)


@pytest.mark.parametrize("seed", range(48))
def test_route_backward(launch, seed):
    case = Case(seed)
    expert_TK, _, _, logsumexp_T, _ = case.route(launch)
    d_weight, d_score = (torch.randn(case.tokens, n, generator=case.g) for n in (case.top_k, case.experts))
    d_logsumexp = torch.randn(case.tokens, generator=case.g)
    x = case.logits.double().requires_grad_()
    logsumexp = x.logsumexp(-1)
    score = x.sigmoid() if case.rule.is_sigmoid else (x - logsumexp.unsqueeze(1)).exp()
    chosen = score.gather(1, expert_TK.clamp(min=0))
    weight = chosen / chosen.sum(-1, keepdim=True) if case.rule.normalize else chosen
    scaled = torch.where(expert_TK < 0, 0, d_weight) * case.rule.scale
    gradients = []
    total = 0.0
    for number, (value, gradient, mine) in enumerate(
        ((weight, scaled, d_weight), (score, d_score, d_score), (logsumexp, d_logsumexp, d_logsumexp)), 1
    ):
        is_given = seed % 5 != number
        gradients.append(mine if is_given else None)
        total = total + is_given * (value * gradient).sum()
    total.backward()
    rule = {"is_sigmoid": case.rule.is_sigmoid, "normalize": case.rule.normalize, "scale": case.rule.scale}
    dtype = case.draw.choice([torch.float32, torch.bfloat16])
    found = launch(calls.route_backward, case.logits, expert_TK, logsumexp_T, *gradients, **rule, dtype=dtype)
    assert_close(found, x.grad, 1e-5 if dtype == torch.float32 else 1e-2, "d_logits")


def test_scores_that_vanish(launch):
    """Sigmoids whose sum is below what it is divided by: weights are zero, gradients finite."""
    logits = torch.full((1, 4), -200.0)
    expert_TK, weight_TK, _, logsumexp_T, _ = launch(calls.route, logits, None, None, 2, Rule(is_sigmoid=True))
    assert expert_TK.tolist() == [[0, 1]] and not weight_TK.any()
    gradients = (torch.ones(1, 2), None, None)
    rule = {"is_sigmoid": True, "normalize": True, "scale": 1.0}
    assert not launch(calls.route_backward, logits, expert_TK, logsumexp_T, *gradients, **rule).any()
