"""LAMB, arXiv 1904.00962."""

import math
from typing import Any

import torch
from torch import Tensor

from fmoe.optim.checks import check
from fmoe.optim.trust import Slot, TrustOptimizer, floats, write_back, zeros_like


class Lamb(TrustOptimizer):
    """Adam's direction with decoupled weight decay, scaled for each tensor to the norm of its weights (algorithm 2)::

        r = m_hat / (sqrt(v_hat) + eps) + weight_decay * w
        w = w - lr * |w| / |r| * r                     the ratio is 1 where either norm is 0

    Each expert of a stacked weight is a tensor of its own, so that a stack is stepped as its experts would be one by
    one. Vectors (biases, norms, biases of stacked experts) have ratio 1 and no decay, whatever their group says.

    Args:
        params: parameters or groups of them.
        max_trust: highest trust ratio (LAMBC, arXiv 2011.13584); None for no bound.

    Raises:
        UserError: a number is out of range.
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_trust: float | None = None,
    ):
        check(lr=lr, eps=eps, weight_decay=weight_decay, betas=betas, max_trust=max_trust)
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "max_trust": max_trust}
        )

    def _advance(self, slots: list[Slot]) -> None:
        beta1, beta2 = slots[0].group["betas"]
        gradients = floats([slot.tensor.grad for slot in slots])
        states = []
        for slot in slots:
            state = self.state[slot.tensor]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = zeros_like(slot.tensor), zeros_like(slot.tensor)
            state["step"] += 1
            states.append(state)
        torch._foreach_lerp_([state["exp_avg"] for state in states], gradients, 1 - beta1)
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)

    def _updates(self, slots: list[Slot], weights: list[Tensor]) -> list[Tensor]:
        group = slots[0].group
        beta1, beta2 = group["betas"]
        states = [self.state[slot.tensor] for slot in slots]
        steps = [float(state["step"]) for state in states]
        updates = torch._foreach_sqrt([state["exp_avg_sq"] for state in states])
        torch._foreach_div_(updates, [math.sqrt(1 - beta2**step) for step in steps])
        torch._foreach_add_(updates, group["eps"])
        # (1 / x) * m, in place of m / x, which has no form that writes into x.
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, [state["exp_avg"] for state in states])
        torch._foreach_div_(updates, [1 - beta1**step for step in steps])
        if group["weight_decay"] and slots[0].rows:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        return updates

    def _ratio(self, weight_norms: Tensor, compared_norms: Tensor, group: dict[str, Any]) -> Tensor:
        ratio = weight_norms / compared_norms
        ratio = torch.where((weight_norms > 0) & (compared_norms > 0), ratio, 1.0)
        return ratio if group["max_trust"] is None else ratio.clamp(max=group["max_trust"])

    def _move(self, slots: list[Slot], weights: list[Tensor], updates: list[Tensor]) -> None:
        torch._foreach_add_(weights, updates, alpha=-float(slots[0].group["lr"]))
        write_back(slots, weights)
