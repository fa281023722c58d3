"""The balanced assignment against the Hungarian method, and where it could go wrong: ties, holes, hard shapes."""

import gate_loops
import pytest
import torch

from fmoe.gates.assignment import balanced_assignment


def problem(seed):
    """Scores [1, S, E] with skew, ties or forbidden places, valid places, loads."""
    g = torch.Generator().manual_seed(seed)
    size, experts = (int(torch.randint(1, n, (), generator=g)) for n in (14, 6))
    scores = torch.randn(1, size, experts, generator=g, dtype=torch.float64)
    scores += 3 * torch.randn(experts, generator=g)
    if seed % 4 == 0:
        scores = scores.round()
    if seed % 4 == 1 and experts > 2:
        scores = scores.masked_fill(torch.rand(scores.shape, generator=g) < 0.3, -torch.inf)
        scores[..., 0] = scores[..., 0].nan_to_num(neginf=0.0)
    valid = torch.rand(1, size, generator=g) < 0.8
    load = (
        torch.randint(0, 4, (1, experts), generator=g) if seed % 3 == 0 else torch.zeros(1, experts, dtype=torch.int64)
    )
    return scores, valid, load


@pytest.mark.by_default(*map(str, range(40)))
@pytest.mark.parametrize("seed", range(120))
def test_it_is_optimal(seed):
    scores, valid, load = problem(seed)
    expert = balanced_assignment(scores, valid, load)[0]
    rows = scores[0][valid[0]]
    taken = [[e for e, v in enumerate(row) if v == -torch.inf] for row in rows.tolist()]
    finite = rows.nan_to_num(neginf=0.0).tolist()
    expected = gate_loops.matching(finite, taken, load[0].tolist())
    got = expert[valid[0]].tolist()
    assert (expert[~valid[0]] == -1).all()
    assert all(e not in has for e, has in zip(got, taken, strict=True))

    def value(picks):
        counts = load[0] + torch.bincount(torch.tensor(picks, dtype=torch.int64), minlength=load.shape[1])
        return int((counts**2).sum()), sum(row[e] for row, e in zip(finite, picks, strict=True))

    assert value(got)[0] == value(expected)[0], "evenness"
    assert value(got)[1] == pytest.approx(value(expected)[1], abs=1e-6), "score"
    if seed % 4 == 2:
        assert got == expected


@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", ["plain", "common", "few factors", "all equal", "copies", "strong", "one wins"])
@pytest.mark.parametrize(("size", "experts"), [(256, 16), (160, 64), (40, 64)], ids=str)
def test_loads_are_even_whatever_the_scores(kind, size, experts):
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(2, size, experts, generator=g)
    if kind == "common":
        scores += torch.linspace(3, 0, experts)
    if kind == "few factors":
        scores = torch.randn(2, size, 3, generator=g) @ torch.randn(3, experts, generator=g)
    if kind == "all equal":
        scores = torch.zeros_like(scores)
    if kind == "copies":
        scores = scores[:, : size // 8].repeat(1, 8, 1)
    if kind == "strong":
        scores += torch.linspace(1000, 0, experts)
    if kind == "one wins":
        scores = torch.zeros_like(scores)
        scores[..., 3] = 1
    expert = balanced_assignment(scores, torch.ones(2, size, dtype=torch.bool))
    loads = torch.stack([torch.bincount(row, minlength=experts) for row in expert])
    assert (loads.amax(1) - loads.amin(1)).max() <= (1 if size % experts else 0)
    alone = balanced_assignment(scores[1:], torch.ones(1, size, dtype=torch.bool))
    assert torch.equal(alone[0], expert[1]), "groups do not see each other"


def test_scores_that_are_no_numbers_end_too():
    scores = torch.tensor([[[float("nan"), float("inf"), 1.0]] * 6])
    expert = balanced_assignment(scores, torch.ones(1, 6, dtype=torch.bool))
    assert ((expert >= 0) & (expert < 3)).all()
