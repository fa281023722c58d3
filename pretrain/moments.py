"""The state of each kind of optimizer, as tensors that lie like the parameter they are of."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from fmoe.optim import Adafactor, AdamW8bit, Lars, is_matrix
from fmoe.optim.trust import TrustOptimizer
from megatron_patch.optimizer import Shard


@dataclass(frozen=True)
class Moment:
    """A tensor of an optimizer's state.

    Attributes:
        name: its key in the state.
        axis: along which it has one element where the parameter has many; None where it has the parameter's shape.
    """

    name: str
    axis: int | None = None

    def along(self, values: Sequence[int], value: int) -> tuple[int, ...]:
        """A parameter's shape or offset with ``value`` along the axis."""
        if self.axis is None:
            return tuple(values)
        axis = self.axis % len(values)
        return (*values[:axis], value, *values[axis + 1 :])


def moments(shard: Shard) -> tuple[Moment, ...]:
    """What the optimizer keeps for a shard, the number of steps aside."""
    optimizer = shard.optimizer
    if isinstance(optimizer, TrustOptimizer):
        return tuple(map(Moment, optimizer.state_names))
    if isinstance(optimizer, torch.optim.SGD):
        return (Moment("momentum_buffer"),) if optimizer.defaults["momentum"] else ()
    if isinstance(optimizer, Adafactor):
        is_factored = is_matrix(shard.parameter)
        return (Moment("row_var", -1), Moment("col_var", -2)) if is_factored else (Moment("variance"),)
    return (Moment("exp_avg"), Moment("exp_avg_sq"))


def saved(shard: Shard) -> Iterator[tuple[Moment, Tensor]]:
    """The state of a shard as plain tensors; zeros where no step was made, or all of them were skipped."""
    state = shard.optimizer.state.get(shard.main) or {}
    for moment in moments(shard):
        value = state.get(moment.name)
        if value is None:
            value = torch.zeros(moment.along(shard.main.shape, 1), device=shard.main.device, dtype=torch.float32)
        # 8-bit codes travel as the numbers they stand for: they are found again from them.
        yield moment, value.dequantize() if hasattr(value, "codes") else value


def restored(shard: Shard, step: float, read: Callable[[Moment], Tensor]) -> dict[str, Tensor]:
    """The state of a shard from what `saved` gave, which ``read`` gets, flat."""
    optimizer, main = shard.optimizer, shard.main
    state = {}
    for moment in moments(shard):
        value = read(moment).to(main.device).view(moment.along(main.shape, 1)).clone()
        state[moment.name] = optimizer.moment_of(main, moment.name, value) if is_8_bit(optimizer) else value
    if "step" in optimizer.param_groups[0]:
        optimizer.param_groups[0]["step"] = int(step)  # Transformer Engine's and apex's
    elif not isinstance(optimizer, Lars | torch.optim.SGD):
        # Each parameter has its own step tensor: torch's optimizers advance it in place.
        state["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
    return state


def is_8_bit(optimizer: Optimizer) -> bool:
    """Whether moments are codes."""
    return isinstance(optimizer, AdamW8bit)
