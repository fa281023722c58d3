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


def newton_schulz(matrix, steps=5):
    """Jordan et al. 2024, https://kellerjordan.github.io/posts/muon: the iteration of one matrix in float64."""
    x = matrix.double() / (norm(matrix.double()) + 1e-7)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if transposed else x


def muon(weight, gradients, *, lr, momentum, weight_decay, nesterov=True, scale="rms", steps=5):
    """The steps of one matrix, scaled as in equation 4 of arXiv 2502.16982, or as by Jordan."""
    rows, columns = weight.shape
    factor = 0.2 * math.sqrt(max(rows, columns)) if scale == "rms" else math.sqrt(max(1, rows / columns))
    w, m = weight.double().clone(), 0.0
    for gradient in gradients:
        g = gradient.double()
        m = momentum * m + (1 - momentum) * g
        update = momentum * m + (1 - momentum) * g if nesterov else m
        w = w - lr * (weight_decay * w + factor * newton_schulz(update, steps))
    return w
