"""AdamW and LAMB with second moments that stay as they are after a warm-up, for momenta of one bit per element.

`fmoe.parallel.compression.OneBit` averages signs of momenta. Squares of such gradients would say nothing about the
variance, so both optimizers keep the second moments of step ``freeze_step``. An element whose second moment is zero
then stays as it is, but for weight decay.
"""

from typing import Any

import torch
from torch import Tensor

from fmoe.optim.checks import check
from fmoe.optim.lamb import Lamb
from fmoe.optim.layout import Group, State, gradient_of, is_matrix, loss_of
from fmoe.optim.trust import Plan, Slot, WideOptimizer, floats, stepped_dtype


class OneBitAdam(WideOptimizer):
    """AdamW whose second moments do not change after step ``freeze_step`` (1-bit Adam, arXiv 2102.02888).

    Raises:
        UserError: a number is out of range.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    is_elementwise = True

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        freeze_step: int = 100,
    ):
        check(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, positive={"freeze_step": freeze_step})
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "freeze_step": freeze_step}
        super().__init__(params, {"lr": lr} | options)

    @torch.no_grad()
    def step(self, closure=None) -> Any:
        """Take one step."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    self._step(tensor, group)
        return loss

    def _step(self, tensor: Tensor, group: Group) -> None:
        state = self.state[tensor]
        if not state:
            state |= {name: torch.zeros_like(tensor, dtype=stepped_dtype(tensor)) for name in self.state_names}
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        state["step"] += 1
        step = float(state["step"])
        beta1, beta2 = group["betas"]
        weight, gradient = floats([tensor, gradient_of(tensor)])
        average = state["exp_avg"].lerp_(gradient, 1 - beta1)
        squares = state["exp_avg_sq"]
        is_frozen = step > group["freeze_step"]
        if not is_frozen:
            squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (1 - beta2 ** min(step, group["freeze_step"])) ** 0.5
        update = average / (squares.sqrt() / root + group["eps"])
        if is_frozen:
            update.masked_fill_(squares == 0, 0.0)
        lr = float(group["lr"])
        weight.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr / (1 - beta1**step))
        if weight is not tensor:
            tensor.copy_(weight)


class OneBitLamb(Lamb):
    """LAMB whose second moments do not change after step ``freeze_step`` (1-bit LAMB, arXiv 2104.06069).

    From then on, the trust ratio of a block is its average over the steps before, times the largest ratio of the kept
    second moments' root to that of the gradients received since. The factor changes by at most 10 % per step, within
    0.5 and 4.

    Blocks must be whole: ranges of parameters are not supported.
    """

    state_names = ("exp_avg", "exp_avg_sq", "fresh_sq")
    block_state_names = ("trust_average", "trust_factor")

    def __init__(self, params, *, freeze_step: int = 100, **options: Any):
        check(positive={"freeze_step": freeze_step})
        super().__init__(params, **options)
        for group in self.param_groups:
            group["freeze_step"] = freeze_step

    def _at_once(self, slots: list[Slot], plan: Plan) -> bool:
        return False

    def _begin(self, tensor: Tensor, state: State) -> None:
        is_new = not state
        super()._begin(tensor, state)
        if is_new and is_matrix(tensor):
            shape = (*tensor.shape[:-2], 1, 1)
            state["trust_average"] = torch.zeros(shape, dtype=stepped_dtype(tensor), device=tensor.device)
            state["trust_factor"] = torch.ones(shape, dtype=stepped_dtype(tensor), device=tensor.device)

    def _is_frozen(self, slot: Slot) -> bool:
        return float(self.state[slot.tensor]["step"]) > slot.group["freeze_step"]

    def _advance(self, slots: list[Slot], gradients: list[Tensor]) -> None:
        beta1, beta2 = slots[0].group["betas"]
        torch._foreach_lerp_(self._states(slots, "exp_avg"), gradients, 1 - beta1)
        for slot, gradient in zip(slots, gradients, strict=True):
            fresh = slot.part.of(self.state[slot.tensor]["fresh_sq"])
            fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            if not self._is_frozen(slot):
                slot.part.of(self.state[slot.tensor]["exp_avg_sq"]).copy_(fresh)

    def _square_step(self, slot: Slot) -> float:
        return min(super()._square_step(slot), slot.group["freeze_step"])

    def _updates(self, slots: list[Slot], weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        updates = super()._updates(slots, weights, gradients)
        for slot, weight, update in zip(slots, weights, updates, strict=True):
            if self._is_frozen(slot):
                decay = slot.group["weight_decay"] if slot.part.count else 0.0
                squares = slot.part.of(self.state[slot.tensor]["exp_avg_sq"])
                update.copy_(torch.where(squares == 0, decay * weight, update))
        return updates

    def _scale(self, plan: Plan, slots: list[Slot], updates: list[Tensor]) -> None:
        if not self._is_frozen(slots[0]):
            super()._scale(plan, slots, updates)
        for slot, update in zip(slots, updates, strict=True):
            state = self.state[slot.tensor]
            of = slot.part.of
            average = of(state["trust_average"])
            if not self._is_frozen(slot):
                beta2 = slot.group["betas"][1]
                ratio = plan.ratios[slot.blocks].view(average.shape).to(average.dtype)
                average.lerp_(ratio, 1 - beta2)
                continue
            eps = slot.group["eps"]
            kept = of(state["exp_avg_sq"]).sqrt() + eps
            fresh = of(state["fresh_sq"]).sqrt() + eps
            factor = of(state["trust_factor"])
            factor.masked_fill_(factor == 0, 1.0)  # the state of a checkpoint before the first step
            new = (kept / fresh).amax((-2, -1), keepdim=True).clamp(0.5, 4.0)
            factor.copy_(torch.minimum(torch.maximum(new, 0.9 * factor), 1.1 * factor))
            # The average began with zeros.
            ratio = average * factor / (1 - slot.group["betas"][1] ** slot.group["freeze_step"])
            plan.ratios[slot.blocks] = ratio.view(-1).to(plan.ratios.dtype)
            update.mul_(ratio)
