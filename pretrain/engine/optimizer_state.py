"""State of an optimizer as tensors laid out like the parameters."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fmoe.optim import Adafactor, AdamW8bit, Lars, Muon, OneBitLamb, is_matrix
from megatron_patch.optimizer import Shard
from pretrain.checkpoint.geometry import Shape


@dataclass(frozen=True)
class StateTensor:
    """A tensor of an optimizer's state.

    Attributes:
        name: key of the tensor in the state.
        axes: the parameter's axes along which this tensor has size 1, counted from the end; () if it has the
            parameter's shape.
    """

    name: str
    axes: Shape = ()

    def along(self, values: Sequence[int], value: int) -> Shape:
        """Return ``values`` (one per axis of a parameter) with ``value`` at the indices `axes`."""
        changed = list(values)
        for axis in self.axes:
            changed[axis] = value
        return tuple(changed)

    def shape(self, shard: Shard) -> Shape:
        """Return the shape for a shard: that of its own range, or of the whole parameter if there are axes."""
        return self.along(shard.parameter.shape, 1) if self.axes else tuple(shard.main.shape)


def state_tensors(shard: Shard) -> tuple[StateTensor, ...]:
    """Return names and axes of the tensors that the optimizer keeps for a shard, without the step count."""
    optimizer = shard.optimizer
    names = getattr(optimizer, "state_names", None)
    if isinstance(names, tuple):
        tensors = tuple(map(StateTensor, names))
        if isinstance(optimizer, OneBitLamb) and is_matrix(shard.parameter):
            tensors += tuple(StateTensor(name, (-2, -1)) for name in optimizer.block_state_names)
        return tensors
    if isinstance(optimizer, Muon) and optimizer.matrices_of(shard.parameter) is not None:
        return (StateTensor("momentum_buffer"),)
    if isinstance(optimizer, torch.optim.SGD):
        return (StateTensor("momentum_buffer"),) if optimizer.defaults["momentum"] else ()
    if isinstance(optimizer, Adafactor):
        if not is_matrix(shard.parameter):
            return (StateTensor("variance"),)
        return (
            (StateTensor("row_var", (-1,)), StateTensor("col_var", (-2,)))
            if optimizer.keeps_factors(shard.main)
            else ()
        )
    return (StateTensor("exp_avg"), StateTensor("exp_avg_sq"))


def saved_state(shard: Shard) -> Iterator[tuple[StateTensor, Tensor]]:
    """Yield the state of a shard as plain tensors: zeros if no step was made, or all were skipped."""
    state = shard.optimizer.state.get(shard.main) or {}
    for entry in state_tensors(shard):
        value = state.get(entry.name)
        if value is None:
            value = torch.zeros(entry.shape(shard), device=shard.main.device, dtype=torch.float32)
        # 8-bit codes are saved as the values they represent, from which they are recomputed.
        yield entry, value.dequantize() if is_8_bit(shard.optimizer) else value


def restored_state(shard: Shard, step: float, read: Callable[[StateTensor], Tensor]) -> dict[str, Tensor]:
    """Build the state of a shard from saved tensors.

    Args:
        step: number of steps that the optimizer has made.
        read: function that returns the saved values of a `StateTensor`, in any shape.
    """
    optimizer: Any = shard.optimizer
    main = shard.main
    state = {}
    for entry in state_tensors(shard):
        value = read(entry).to(main.device).view(entry.shape(shard)).clone()
        state[entry.name] = optimizer.moment_of(main, entry.name, value) if is_8_bit(optimizer) else value
    if "step" in optimizer.param_groups[0]:
        optimizer.param_groups[0]["step"] = int(step)  # where Transformer Engine and apex keep it
    elif not isinstance(optimizer, Lars | torch.optim.SGD):
        # Each parameter has its own step tensor: torch's optimizers advance it in place, fused ones on the device.
        device = main.device if optimizer.defaults.get("fused") else "cpu"
        state["step"] = torch.full((), float(step), dtype=torch.float32, device=device)
    return state


def is_8_bit(optimizer: Optimizer) -> bool:
    """Return whether the optimizer keeps its moments as 8-bit codes."""
    return isinstance(optimizer, AdamW8bit)
