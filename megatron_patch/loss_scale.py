"""One loss scale for all parts of an optimizer."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.grad_scaler import DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor


class SharedGradScaler(MegatronGradScaler):
    """A scaler of Megatron-core that several optimizers have between them, and that moves once a step.

    Args:
        scaler: Megatron's, dynamic or constant.

    Attributes:
        skipped: steps that had an overflow so far.
    """

    def __init__(self, scaler: MegatronGradScaler):  # not the parent's, which makes a scale
        self.scaler, self.skipped = scaler, 0

    @property
    def scale(self) -> Tensor:
        """What the loss is multiplied by, fp32 [1]."""
        return self.scaler.scale

    @property
    def inv_scale(self) -> Tensor:
        """What gradients are multiplied by, fp32 [1]."""
        return self.scaler.inv_scale

    @property
    def can_fall(self) -> bool:
        """Whether a lower scale is still to come, should there be an overflow."""
        return isinstance(self.scaler, DynamicGradScaler) and bool(self.scale > self.scaler.min_scale)

    def update(self, found_inf: bool) -> None:
        """Nothing: this is what one of the optimizers found. See `settle`."""

    def settle(self, found_inf: bool) -> None:
        """Ends a step, of which all optimizers of all ranks know together whether there was an overflow."""
        self.skipped += found_inf
        self.scaler.update(found_inf)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: ``skipped``; of a dynamic scale ``scale``, ``growth_tracker``, ``hysteresis_tracker``."""
        state = {name: float(v) if torch.is_tensor(v) else v for name, v in self.scaler.state_dict().items()}
        return state | {"skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict`, or that of Megatron's scaler, gave. A constant scale stays what it is, and a
        dynamic one begins anew after a constant one."""
        self.skipped = state.get("skipped", 0)
        if isinstance(self.scaler, DynamicGradScaler) and "scale" in state:
            scale = torch.full_like(self.scaler.scale, float(state["scale"]))
            self.scaler.load_state_dict({**state, "scale": scale})


def grad_scaler(optimizer: MegatronOptimizer) -> SharedGradScaler | None:
    """That of an optimizer built by Megatron-core; None where losses are not scaled."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(scaler := getattr(part, "grad_scaler", None), SharedGradScaler):
            return scaler
    return None


def share(init: Callable) -> Callable:
    """``ChainedOptimizer.__init__`` that gives all parts the scaler of the first one, which scales the loss."""

    @functools.wraps(init)
    def wrapped(self, chained_optimizers, *args, **kwargs):
        init(self, chained_optimizers, *args, **kwargs)
        parts = [part for part in chained_optimizers if getattr(part, "grad_scaler", None) is not None]
        if parts:
            shared = SharedGradScaler(parts[0].grad_scaler)
            for part in parts:
                part.grad_scaler = shared

    return wrapped


def settle_together(prepare: Callable) -> Callable:
    """``ChainedOptimizer.prepare_grads`` that says the same on every rank, and moves the scale once."""

    @functools.wraps(prepare)
    @torch.no_grad()
    def wrapped(self):
        found_inf = prepare(self)
        scaler = grad_scaler(self)
        if scaler is None:
            return found_inf
        # Each part has asked the ranks that hold other parameters of its kind, not those that hold copies.
        found = torch.full_like(scaler.scale, float(found_inf))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        found_inf = bool(found)
        scaler.settle(found_inf)
        return found_inf

    return wrapped
