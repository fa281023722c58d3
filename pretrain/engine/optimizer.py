"""The recipe's optimizer, and its state as tensors laid out like the parameters."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import optimizer as core
from torch import Tensor
from torch.optim import Optimizer

from fmoe import optim
from fmoe.errors import UserError, add_name, known_names
from fmoe.optim import Adafactor, AdamW8bit, Lars, Muon, is_matrix
from megatron_patch.optimizer import Shard
from pretrain.config import Recipe

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {}
"""Registered optimizers by name."""

SHIPPED = ("adamw", "lamb", "lars", "muon", "adafactor", "adamw8bit", "sgd")


def register_optimizer(name: str, factory: Callable[..., Optimizer]) -> None:
    """Register an optimizer under a new name, for ``optimizer.name`` of a recipe.

    The optimizer needs a tuple ``state_names`` with the names of a parameter's state tensors, each of the parameter's
    shape. An optimizer that counts steps keeps the count as the state ``step``. ``optimizer.distributed`` needs
    ``is_elementwise = True``: no element's update may depend on another element.

    Args:
        factory: called with parameter groups, the recipe and the options ``lr`` and ``weight_decay``; returns the
            optimizer.

    Raises:
        UserError: the name belongs to another optimizer.
    """
    if name in SHIPPED:
        raise UserError(f"optimizer.name={name!r} is registered already, by fmoe")
    add_name(OPTIMIZERS, "optimizer.name", name, factory)


def check_optimizer(recipe: Recipe) -> None:
    """Raise UserError if the optimizer is unknown, or if a registered one lacks an attribute that the recipe needs."""
    own = recipe.optimizer
    if own.name in SHIPPED:
        return
    if own.name not in OPTIMIZERS:
        raise UserError(
            f"optimizer.name={own.name!r} is not known; {known_names(own.name, [*SHIPPED, *sorted(OPTIMIZERS)])}"
        )
    optimizer = _registered(recipe, [{"params": [torch.zeros(2, 2, dtype=torch.float32, device="cpu")]}])
    if not isinstance(getattr(optimizer, "state_names", None), tuple):
        raise UserError(f"optimizer.name={own.name}: checkpoints need the tuple {type(optimizer).__name__}.state_names")
    if own.distributed and not getattr(optimizer, "is_elementwise", False):
        raise UserError(
            f"optimizer.name={own.name} needs optimizer.distributed=false: {type(optimizer).__name__} does not have "
            "is_elementwise = True"
        )


def _registered(recipe: Recipe, groups: list[dict[str, Any]]) -> Optimizer:
    own = recipe.optimizer
    return OPTIMIZERS[own.name](groups, recipe, lr=recipe.max_lr, weight_decay=own.weight_decay)


def make_optimizer(recipe: Recipe) -> Callable[[list[dict[str, Any]]], Optimizer] | None:
    """Return a function from parameter groups to the optimizer; None to let Megatron-core build its AdamW.

    It is None for AdamW with ``cpu_offload``, and for AdamW on a GPU if Transformer Engine's or apex's fused AdamW is
    installed. Otherwise, Megatron-core has only torch's unfused AdamW, slower than the fused one returned here.
    """
    own = recipe.optimizer
    if own.name in OPTIMIZERS:
        return lambda groups: _registered(recipe, groups)
    adam = {"betas": (own.beta1, own.beta2), "eps": own.eps}
    trust = {"max_trust": own.max_trust}
    momentum = {"momentum": own.momentum_value}
    kinds: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
        "adamw": (torch.optim.AdamW, adam | {"fused": True}),
        "lamb": (optim.Lamb, adam | trust),
        "lars": (optim.Lars, trust | momentum | {"trust_coefficient": own.trust_coefficient}),
        "muon": (
            optim.Muon,
            adam | momentum | {"nesterov": own.nesterov, "ns_steps": own.ns_steps, "scale": own.muon_scale},
        ),
        "adafactor": (optim.Adafactor, {"beta2_decay": own.beta2_decay, "d": own.update_clip}),
        "adamw8bit": (optim.AdamW8bit, adam),
        "sgd": (torch.optim.SGD, momentum),
    }
    # torch's unfused AdamW reads and writes each tensor ten times, the fused one once.
    is_fused = torch.cuda.is_available() and core.Adam is not torch.optim.AdamW
    if own.name == "adamw" and (own.cpu_offload or is_fused):
        return None
    kind, options = kinds[own.name]
    return lambda groups: kind(groups, lr=recipe.max_lr, weight_decay=own.weight_decay, **options)


@dataclass(frozen=True)
class StateTensor:
    """A tensor of an optimizer's state.

    Attributes:
        name: key of the tensor in the state.
        axis: the parameter's axis along which this tensor has size 1; None if it has the parameter's shape.
    """

    name: str
    axis: int | None = None

    def along(self, values: Sequence[int], value: int) -> tuple[int, ...]:
        """Return ``values`` (one per axis of a parameter) with ``value`` at index `axis`; unchanged if it is None."""
        if self.axis is None:
            return tuple(values)
        axis = self.axis % len(values)
        return (*values[:axis], value, *values[axis + 1 :])


def state_tensors(shard: Shard) -> tuple[StateTensor, ...]:
    """Return names and axes of the tensors that the optimizer keeps for a shard, without the step count."""
    optimizer = shard.optimizer
    if isinstance(names := getattr(optimizer, "state_names", None), tuple):
        return tuple(map(StateTensor, names))
    if isinstance(optimizer, Muon) and optimizer.matrices_of(shard.parameter) is not None:
        return (StateTensor("momentum_buffer"),)
    if isinstance(optimizer, torch.optim.SGD):
        return (StateTensor("momentum_buffer"),) if optimizer.defaults["momentum"] else ()
    if isinstance(optimizer, Adafactor):
        is_factored = is_matrix(shard.parameter)
        return (StateTensor("row_var", -1), StateTensor("col_var", -2)) if is_factored else (StateTensor("variance"),)
    return (StateTensor("exp_avg"), StateTensor("exp_avg_sq"))


def saved_state(shard: Shard) -> Iterator[tuple[StateTensor, Tensor]]:
    """Yield the state of a shard as plain tensors: zeros if no step was made, or all were skipped."""
    state = shard.optimizer.state.get(shard.main) or {}
    for entry in state_tensors(shard):
        value = state.get(entry.name)
        if value is None:
            value = torch.zeros(entry.along(shard.main.shape, 1), device=shard.main.device, dtype=torch.float32)
        # 8-bit codes are saved as the values they represent, from which they are recomputed.
        yield entry, value.dequantize() if hasattr(value, "codes") else value


def restored_state(shard: Shard, step: float, read: Callable[[StateTensor], Tensor]) -> dict[str, Tensor]:
    """Build the state of a shard from saved tensors.

    Args:
        step: number of steps that the optimizer has made.
        read: function that returns the saved values of a `StateTensor`, in any shape.
    """
    optimizer: Any = shard.optimizer
    main, state = shard.main, {}
    for entry in state_tensors(shard):
        value = read(entry).to(main.device).view(entry.along(main.shape, 1)).clone()
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
