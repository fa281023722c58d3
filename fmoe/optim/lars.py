"""LARS, arXiv 1708.03888."""

import torch
from torch import Tensor

from fmoe.optim.checks import check
from fmoe.optim.layout import Group
from fmoe.optim.trust import Slot, TrustOptimizer


class Lars(TrustOptimizer):
    """SGD with momentum, and with a separate learning rate for each tensor.

    This is algorithm 1 of arXiv 1708.03888::

        ratio = trust_coefficient * |w| / (|g| + weight_decay * |w|)       1 if |w| or |g| is 0
        v = momentum * v + lr * ratio * (g + weight_decay * w)
        w = w - v

    Each expert of a stacked weight is a separate tensor. Vectors (biases, norms, biases of stacked experts) have
    ratio 1 and no decay, so the full ``lr`` applies to them.

    Args:
        params: parameters or parameter groups.
        max_trust: upper bound on the ratio; None for no bound.

    Raises:
        UserError: a number is out of range.
    """

    state_names = ("momentum_buffer",)
    _compares_gradients = True

    def __init__(
        self,
        params,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust_coefficient: float = 1e-3,
        max_trust: float | None = None,
    ):
        check(lr=lr, momentum=momentum, weight_decay=weight_decay, max_trust=max_trust)
        check(positive={"trust_coefficient": trust_coefficient})
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"trust_coefficient": trust_coefficient, "max_trust": max_trust})

    def _advance(self, slots: list[Slot], gradients: list[Tensor]) -> None:
        pass  # the momentum accumulates scaled updates, in `_move`

    def _updates(self, slots: list[Slot], weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        decay = slots[0].group["weight_decay"] if slots[0].part.count else 0.0
        return list(torch._foreach_add(gradients, weights, alpha=decay))

    def _ratio(self, weight_norms: Tensor, compared_norms: Tensor, group: Group) -> Tensor:
        return group["trust_coefficient"] * weight_norms / (compared_norms + group["weight_decay"] * weight_norms)

    def _move(self, slots: list[Slot], weights: list[Tensor], updates: list[Tensor]) -> None:
        group = slots[0].group
        velocities = self._states(slots, "momentum_buffer")
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, updates, alpha=float(group["lr"]))
        torch._foreach_sub_(weights, velocities)
