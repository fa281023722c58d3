"""One fp16 loss scale for all optimizers of a `ChainedOptimizer`."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.grad_scaler import DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor


class SharedGradScaler(MegatronGradScaler):
    """A loss scaler that several optimizers share, and that is updated once per step.

    Args:
        scaler: scaler of Megatron-core, dynamic or constant.

    Attributes:
        skipped: number of steps with an overflow.
    """

    def __init__(self, scaler: MegatronGradScaler):  # does not call the parent's, which allocates a scale
        self.scaler = scaler
        self.skipped = 0

    @property
    def scale(self) -> Tensor:
        """Factor of the loss, fp32 [1]."""
        return self.scaler.scale

    @property
    def inv_scale(self) -> Tensor:
        """Factor that unscales the gradients, fp32 [1]."""
        return self.scaler.inv_scale

    @property
    def can_fall(self) -> bool:
        """True if further overflows can lower the scale."""
        return isinstance(self.scaler, DynamicGradScaler) and bool(self.scale > self.scaler.min_scale)

    def update(self, found_inf: bool) -> None:
        """Do nothing. Each optimizer calls this method with its own overflow only; `settle` updates the scale."""

    def settle(self, found_inf: bool) -> None:
        """Update the scale; call it once per step.

        Args:
            found_inf: True if gradients of any optimizer overflowed, on any rank.
        """
        self.skipped += found_inf
        self.scaler.update(found_inf)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers.

        They are ``skipped`` and, for a dynamic scale, ``scale``, ``growth_tracker`` and ``hysteresis_tracker``.
        """
        state = {name: float(v) if torch.is_tensor(v) else v for name, v in self.scaler.state_dict().items()}
        return state | {"skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of this class or of Megatron's scaler.

        A constant scale does not change. A dynamic scale keeps its value if the state has none.
        """
        self.skipped = state.get("skipped", 0)
        if isinstance(self.scaler, DynamicGradScaler) and "scale" in state:
            scale = torch.full_like(self.scaler.scale, float(state["scale"]))
            self.scaler.load_state_dict({**state, "scale": scale})


def grad_scaler(optimizer: MegatronOptimizer) -> SharedGradScaler | None:
    """Return the scaler that all inner optimizers share; None if losses are not scaled."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        scaler = getattr(part, "grad_scaler", None)
        if isinstance(scaler, SharedGradScaler):
            return scaler
    return None


def share(init: Callable) -> Callable:
    """Wrap ``ChainedOptimizer.__init__`` so that all optimizers use the scaler of the first, which scales the loss."""

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
    """Wrap ``ChainedOptimizer.prepare_grads`` so that all ranks agree on overflows, and update the scale once."""

    @functools.wraps(prepare)
    @torch.no_grad()
    def wrapped(self):
        found_inf = prepare(self)
        scaler = grad_scaler(self)
        if scaler is None:
            return found_inf
        # Each optimizer has reduced its overflow over the ranks that split its parameters, but not over replicas.
        on_any_rank = torch.full_like(scaler.scale, float(found_inf))
        dist.all_reduce(on_any_rank, dist.ReduceOp.MAX)
        found_inf = bool(on_any_rank)
        scaler.settle(found_inf)
        return found_inf

    return wrapped
