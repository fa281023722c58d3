"""LAMB, arXiv 1904.00962."""

import math

import torch
from torch import Tensor

from fmoe.kernels import fused_lamb
from fmoe.optim.checks import check
from fmoe.optim.layout import Group, State
from fmoe.optim.trust import Plan, Slot, TrustOptimizer


class Lamb(TrustOptimizer):
    """Adam's direction with decoupled weight decay, scaled for each tensor to the norm of its weights.

    This is algorithm 2 of arXiv 1904.00962::

        r = m_hat / (sqrt(v_hat) + eps) + weight_decay * w
        w = w - lr * |w| / |r| * r                     the ratio is 1 if either norm is 0

    Each expert of a stacked weight is a separate tensor. Vectors (biases, norms, biases of stacked experts) have
    ratio 1 and no decay, regardless of their group's options.

    Args:
        params: parameters or parameter groups.
        max_trust: upper bound on the ratio (LAMBC, arXiv 2011.13584); None for no bound.

    Raises:
        UserError: a number is out of range.
    """

    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    _fused: fused_lamb.FusedLamb | None = None  # made by the first step that the kernels support

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

    def _at_once(self, slots: list[Slot], plan: Plan) -> bool:
        if plan.ratios.dtype != torch.float32 or not fused_lamb.takes(slots, self.state):
            return False
        if self._fused is None:
            self._fused = fused_lamb.FusedLamb()
        self._fused.step(slots, self.state, plan.squares, plan.ratios, lambda: self._reduce(plan))
        return True

    def _begin(self, tensor: Tensor, state: State) -> None:
        super()._begin(tensor, state)
        state.setdefault("step", torch.tensor(0.0, dtype=torch.float32, device="cpu"))
        state["step"] += 1

    def _advance(self, slots: list[Slot], gradients: list[Tensor]) -> None:
        beta1, beta2 = slots[0].group["betas"]
        torch._foreach_lerp_(self._states(slots, "exp_avg"), gradients, 1 - beta1)
        squares = self._states(slots, "exp_avg_sq")
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)

    def _square_step(self, slot: Slot) -> float:
        """Return the number of steps that the second moment averages."""
        return float(self.state[slot.tensor]["step"])

    def _updates(self, slots: list[Slot], weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        group = slots[0].group
        beta1, beta2 = group["betas"]
        steps = [float(self.state[slot.tensor]["step"]) for slot in slots]
        # m_hat / (sqrt(v_hat) + eps) with both bias corrections as scalar factors.
        roots = [math.sqrt(1 - beta2 ** self._square_step(slot)) for slot in slots]
        denominators = torch._foreach_sqrt(self._states(slots, "exp_avg_sq"))
        torch._foreach_add_(denominators, [group["eps"] * root for root in roots])
        updates = torch._foreach_mul(weights, group["weight_decay"] if slots[0].part.count else 0.0)
        factors = [root / (1 - beta1**step) for root, step in zip(roots, steps, strict=True)]
        torch._foreach_addcdiv_(updates, self._states(slots, "exp_avg"), denominators, factors)
        return list(updates)

    def _ratio(self, weight_norms: Tensor, compared_norms: Tensor, group: Group) -> Tensor:
        return weight_norms / compared_norms

    def _move(self, slots: list[Slot], weights: list[Tensor], updates: list[Tensor]) -> None:
        torch._foreach_add_(weights, updates, alpha=-float(slots[0].group["lr"]))
