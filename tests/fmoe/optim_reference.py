"""LAMB and LARS from the papers' algorithms, a tensor at a time, in float64, with plain loops."""

import math


def norm(tensor):
    return math.sqrt(sum(value * value for value in tensor.flatten().tolist()))


def lamb(weight, gradients, *, lr, betas, eps, weight_decay, is_matrix, max_trust=None):
    """Algorithm 2 of arXiv 1904.00962 over the gradients of some steps; (weight, last trust ratio)."""
    x = weight.double().clone()
    m = v = 0.0
    ratio = 1.0
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.double()
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        r = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)) ** 0.5 + eps)
        if is_matrix:
            r = r + weight_decay * x
            ratio = norm(x) / norm(r) if norm(x) > 0 and norm(r) > 0 else 1.0
            ratio = ratio if max_trust is None else min(ratio, max_trust)
        x = x - lr * ratio * r
    return x, ratio


def lars(weight, gradients, *, lr, momentum, weight_decay, trust_coefficient, is_matrix):
    """Algorithm 1 of arXiv 1708.03888; the same."""
    w = weight.double().clone()
    velocity = 0.0
    ratio = 1.0
    for gradient in gradients:
        g = gradient.double()
        decay = weight_decay if is_matrix else 0.0
        if is_matrix:
            ratio = trust_coefficient * norm(w) / (norm(g) + decay * norm(w)) if norm(w) > 0 and norm(g) > 0 else 1.0
        velocity = momentum * velocity + lr * ratio * (g + decay * w)
        w = w - velocity
    return w, ratio
