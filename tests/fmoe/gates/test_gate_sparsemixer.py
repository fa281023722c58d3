"""SparseMixer: transformers' routing of Phi-3.5-MoE, and the estimate of the gradient of the choice."""

import math

import pytest
import torch
from compare import assert_close

from fmoe.gates import build_gate
from fmoe.routing import RoutingGroups

TOKENS, WIDTH, EXPERTS, JITTER = 400, 8, 6, 0.2


def build(top_k=2, dtype=torch.float32, **options):
    gate = build_gate("sparsemixer", WIDTH, EXPERTS, top_k, **options).to(dtype)
    torch.manual_seed(4)
    torch.nn.init.normal_(gate.weight)
    return gate


def tokens(dtype=torch.float32):
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=dtype)


def groups_with(noise):
    """Groups whose noise is given: for each choice a number per expert, and one for the division, [T, K * (E + 1)]."""
    groups = RoutingGroups(1, len(noise))
    groups.uniform = lambda width, purpose, device: noise
    return groups


@pytest.mark.slow
@pytest.mark.parametrize("jitter", [0.0, 0.01, JITTER, 3.0])
@pytest.mark.parametrize("shift", [0.0, -4.0], ids=["", "negative"])
def test_evaluation_is_that_of_transformers(jitter, shift):
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    gate = build(margin=2 * jitter, bias=True).eval()
    with torch.no_grad():
        gate.bias.fill_(shift)
        routing = gate(tokens(), RoutingGroups(1, TOKENS))
        weight_TK, expert_TK = sparsemixer(torch.nn.functional.linear(tokens(), gate.weight, gate.bias), jitter, False)
    assert torch.equal(routing.expert_TK, expert_TK)
    assert torch.equal(routing.weight_TK, weight_TK)
    assert (jitter < 0.1) == bool((weight_TK == 1).all(1).float().mean() > 0.8)


def test_equal_logits_compete():
    gate = build(top_k=3, margin=0.0).eval()
    with torch.no_grad():
        gate.weight.zero_()
        routing = gate(tokens(), RoutingGroups(1, TOKENS))
    assert_close(routing.weight_TK, torch.tensor([1 / 6, 1 / 5, 1 / 4]).expand(TOKENS, 3), 1e-6, "weights")


@pytest.mark.slow
def test_training_is_that_of_transformers(monkeypatch):
    """With the same noise. Its constants 0.3333 and 0.6667 are rounded; gradients do not have them."""
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    noise = torch.rand(TOKENS, 2 * (EXPERTS + 1), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    of_choice = noise.unflatten(1, (2, -1))
    exponentials, divisions = iter((-of_choice[:, :, :-1].log()).unbind(1)), iter(of_choice[:, :, -1:].unbind(1))
    gate, x = build(margin=2 * JITTER, dtype=torch.float64), tokens(torch.float64)
    logits = (x @ gate.weight.t()).detach().requires_grad_()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "exponential_", lambda self: next(exponentials))
        patch.setattr(torch, "rand_like", lambda like: next(divisions))
        patch.setattr(torch.Tensor, "uniform_", lambda self: self)
        weight_TK, expert_TK = sparsemixer(logits, JITTER, True)
    routing = gate(x, groups_with(noise))
    assert torch.equal(routing.expert_TK, expert_TK)
    assert_close(routing.weight_TK, weight_TK, 2e-4, "weights")
    assert 0.1 < (routing.weight_TK < 0.34).double().mean() < 0.9
    grad = torch.randn(TOKENS, 2, dtype=torch.float64)
    (expected,) = torch.autograd.grad((weight_TK * grad).sum(), logits)
    (found,) = torch.autograd.grad((routing.weight_TK * grad).sum(), gate.weight)
    assert_close(found, expected.t() @ x, 1e-12, "gradient")


def test_gradients_by_a_loop():
    """Of the logits in float64: that of the undivided weight of each choice, times the gradient of the divided one."""
    gate, x = build(top_k=3, margin=0.6, dtype=torch.float64), tokens(torch.float64)
    routing = gate(x, RoutingGroups(1, TOKENS, noise_key=lambda: 3))
    grad = torch.randn(TOKENS, 3, dtype=torch.float64)
    (found,) = torch.autograd.grad((routing.weight_TK * grad).sum(), gate.weight)
    expected = torch.zeros(EXPERTS, WIDTH, dtype=torch.float64)
    for t, row in enumerate((x @ gate.weight.t()).tolist()):
        left = list(range(EXPERTS))
        for k, picked in enumerate(routing.expert_TK[t].tolist()):
            top = max(row[e] for e in left)
            near = [e for e in left if (top - row[e]) / max(abs(row[e]), top) <= 0.6]
            total = sum(math.exp(row[e]) for e in near)
            prob = {e: math.exp(row[e]) / total for e in near}
            for e in near:
                expected[e] += grad[t, k] * prob[picked] * ((e == picked) - prob[e]) * x[t]
            left.remove(picked)
    assert_close(found, expected, 1e-12, "gradient")


@pytest.mark.parametrize("picked", range(EXPERTS))
def test_the_estimate_of_a_cubic_loss(picked):
    """The mean over the division is the score-function estimate with the loss of a weight of 0 as its baseline, as the
    quadrature is exact for a cubic loss; for the most probable expert it is the derivative at the weight."""
    gate, x = build(top_k=1, margin=50.0, dtype=torch.float64), tokens(torch.float64)[:1]
    with torch.no_grad():
        gate.weight.mul_(0.2)
    logits = (x @ gate.weight.t()).detach().squeeze(0)
    prob = logits.softmax(0)
    coefficients = torch.randn(3, dtype=torch.float64)

    def loss(weight):
        return sum(c * weight**n for n, c in enumerate(coefficients, 1))

    estimates = []
    for last in (0.5, 0.9):  # divided, not divided
        noise = torch.full((1, EXPERTS + 1), 1e-6, dtype=torch.float64)
        noise[0, picked], noise[0, -1] = 1 - 1e-9, last
        routing = gate(x, groups_with(noise))
        assert routing.expert_TK.item() == picked
        (gradient,) = torch.autograd.grad(loss(routing.weight_TK.squeeze()), gate.weight)
        estimates.append(gradient)
    score = torch.nn.functional.one_hot(torch.tensor(picked), EXPERTS) - prob  # of the logarithm of the probability
    if picked == prob.argmax():
        weight = prob[picked].clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(weight), weight)
        expected = slope * prob[picked] * score
    else:
        expected = loss(prob[picked]) * score
    assert_close(0.75 * estimates[0] + 0.25 * estimates[1], expected.unsqueeze(1) * x, 1e-9, "estimate")


def test_samples_follow_the_probabilities():
    gate = build(top_k=1, margin=10.0)
    x = tokens()[:1].expand(20_000, -1)
    with torch.no_grad():
        gate.weight.mul_(0.3)
        routing = gate(x, RoutingGroups(1, len(x), noise_key=lambda: 9))
        prob = (x[0] @ gate.weight.t()).softmax(0)
    shares = routing.expert_TK.flatten().bincount(minlength=EXPERTS) / len(x)
    assert (shares - prob).abs().max() < 0.012
    is_best = routing.expert_TK == prob.argmax()
    ratio = routing.weight_TK / prob[routing.expert_TK]
    assert_close(ratio[is_best], torch.ones(int(is_best.sum())), 1e-6, "weights of the best")
    assert (ratio[~is_best] < 0.5).float().mean().item() == pytest.approx(0.75, abs=0.02)
