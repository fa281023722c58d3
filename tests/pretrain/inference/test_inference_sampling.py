"""Sampling against loops that are obviously right."""

import math

import pytest
import torch

from fmoe import UserError
from pretrain.inference.sampling import Sampling, distribution, draw

VOCAB = 12


def reference(logits, temperature, top_k, top_p):
    """Probabilities of the next token, a token at a time in float64."""
    best_first = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return [float(i == best_first[0]) for i in range(len(logits))]
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    kept = best_first if top_k is None else best_first[:top_k]
    if top_p is not None:
        total, mass, nucleus = sum(weights[i] for i in kept), 0.0, []
        for i in kept:
            nucleus.append(i)
            mass += weights[i] / total
            if mass >= top_p:
                break
        kept = nucleus
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 4, VOCAB, 100])
@pytest.mark.parametrize("top_p", [None, 1e-9, 0.35, 0.9, 1.0])
def test_the_distribution_is_that_of_a_loop(temperature, top_k, top_p):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, VOCAB, generator=generator) * 2
    logits[3] = logits[3].round()  # some are equal
    logits[4, 7] = -float("inf")
    found = distribution(logits, Sampling(temperature, top_k, top_p))
    for row, probs in zip(logits.double().tolist(), found.tolist(), strict=True):
        assert probs == pytest.approx(reference(row, temperature, top_k, top_p), rel=1e-12, abs=1e-15)
    assert found.dtype == torch.float64


def test_tokens_are_drawn_as_often_as_they_are_probable():
    probs = torch.tensor([[0.5, 0.0, 0.25, 0.25, 0.0], [0.0, 0.01, 0.99, 0.0, 0.0]], dtype=torch.float64)
    generators, counts, draws = Sampling(seed=5).generators(2), torch.zeros(2, 5), 2000
    for _ in range(draws):
        for row, token in enumerate(draw(probs, generators)):
            counts[row, token] += 1
    assert not counts[probs == 0].any()
    # Five standard deviations of a binomial.
    assert ((counts / draws - probs).abs() <= 5 * (probs * (1 - probs) / draws).sqrt()).all()


def test_a_sample_draws_the_same_however_many_there_are():
    probs = torch.full((1, VOCAB), 1 / VOCAB, dtype=torch.float64)

    def drawn(count, seed=1):
        generators = Sampling(seed=seed).generators(count)
        return list(zip(*(draw(probs.expand(count, -1), generators) for _ in range(20)), strict=True))

    assert drawn(4)[:2] == drawn(2) and drawn(4) == drawn(4)
    assert len(set(drawn(4))) == 4 and drawn(1, seed=2) != drawn(1)


def test_the_largest_number_still_draws_a_token_that_can_be(monkeypatch):
    probs = torch.tensor([[0.3, 0.7, 0.0]], dtype=torch.float64) / 3  # whose sum is rounded
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(1 - 2**-53, dtype=torch.float64))
    assert draw(probs, [None]) == [1]
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(0.0, dtype=torch.float64))
    assert draw(probs.flip(1), [None]) == [1]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be a finite number"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"top_p": 0.0}, "top_p=0.0 must be more than 0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_p": math.nan}, "top_p=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 1 << 63}, "seed="),
    ],
)
def test_what_cannot_be_drawn_with(values, says):
    with pytest.raises(UserError, match=says):
        Sampling(**values)
