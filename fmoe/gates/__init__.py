"""Gates: callables ``gate(x_TD, groups) -> Routing``. `register_gate` adds one.

The option ``gate`` of a layer takes a name in `GATES`, a class or a ready instance. A class is called as
``cls(d_model, num_experts, top_k, **options)``.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fmoe.errors import UserError, add_name, check_options, known_names
from fmoe.gates.base_layers import BaseRouter
from fmoe.gates.expert_choice import ExpertChoiceRouter
from fmoe.gates.fixed import HashRouter, RandomRouter, ZeroRouter
from fmoe.gates.gshard import GShardRouter
from fmoe.gates.naive import NaiveRouter
from fmoe.gates.noisy import NoisyRouter
from fmoe.gates.router import Choice, FixedRouter, Router, Scores, TopKRouter
from fmoe.gates.sigmoid import SigmoidRouter
from fmoe.gates.sinkhorn import SinkhornRouter
from fmoe.gates.sparsemixer import SparseMixerRouter
from fmoe.gates.swipe import SwipeRouter
from fmoe.gates.switch import SwitchRouter
from fmoe.gates.topology import TopologyRouter
from fmoe.routing import Routing, RoutingGroups

Gate = Callable[[Tensor, RoutingGroups], Routing]
"""Signature of a gate: ``gate(x_TD, groups) -> Routing``."""

GATES: dict[str, type[nn.Module] | Gate] = {
    "naive": NaiveRouter,
    "noisy": NoisyRouter,
    "switch": SwitchRouter,
    "gshard": GShardRouter,
    "swipe": SwipeRouter,
    "zero": ZeroRouter,
    "random": RandomRouter,
    "base": BaseRouter,
    "hash": HashRouter,
    "expert_choice": ExpertChoiceRouter,
    "sinkhorn": SinkhornRouter,
    "sigmoid": SigmoidRouter,
    "topology": TopologyRouter,
    "sparsemixer": SparseMixerRouter,
}
"""Gates by name; `register_gate` adds one."""


def register_gate(name: str, gate: type[nn.Module] | Gate) -> None:
    """Register a gate class or function under a new name.

    The name is then valid for the option ``gate`` of a layer, and for ``moe.gate`` of a recipe.

    Raises:
        UserError: the name is not a string, is empty, or belongs to another gate.
    """
    add_name(GATES, "gate", name, gate)


def build_gate(
    gate: str | type[nn.Module] | Gate, d_model: int, num_experts: int, top_k: int | None, **options: Any
) -> Gate:
    """Build a gate from its name or class, or return a function or ready instance unchanged.

    Raises:
        UserError: the name is unknown; the object is not callable; an option is invalid; options are given for a
            function or instance; an instance has another ``num_experts`` or ``top_k``.
    """
    name = getattr(gate, "__name__", "the gate")
    if isinstance(gate, str):
        if gate not in GATES:
            raise UserError(f"gate={gate!r} is not known; {known_names(gate, sorted(GATES))}")
        name = gate
        gate = GATES[gate]
    if isinstance(gate, type):
        check_options("gate_options", gate, options, name, ("d_model", "num_experts", "top_k"))
        return gate(d_model, num_experts, top_k, **options)
    if not callable(gate):
        raise UserError(f"gate={gate!r} must be a name, a class, a module or a function")
    if options:
        raise UserError(
            f"gate_options={options!r} need a gate class or the name of one, but the gate has type "
            f"{type(gate).__name__}: set its options where you make it"
        )
    for name, value in (("num_experts", num_experts), ("top_k", top_k)):
        value_of_gate = getattr(gate, name, value)
        if value is not None and value_of_gate != value:
            raise UserError(f"gate.{name}={value_of_gate} differs from {name}={value}")
    return gate


def end_step(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Update the balancing biases of all gates of ``model`` that have them, such as `SigmoidRouter`.

    This calls ``end_step(group)`` of every gate that has the methods ``end_step`` and ``record``. Call it once per
    optimizer step, not per micro batch: after the last backward pass of the step, before or after ``optimizer.step()``.

    Args:
        group: the ranks that see different tokens of the batch. Loads are summed over them, so that biases stay equal
            on all ranks. None for a job of one process.
    """
    module: Any  # the type nn.Module lacks these methods
    for module in model.modules():
        # Gates also have `record`; modules of other libraries may have a method end_step.
        if hasattr(module, "end_step") and hasattr(module, "record"):
            module.end_step(group)


def skip_step(model: nn.Module) -> None:
    """Discard the loads that gates counted for an optimizer step that is skipped. Call this instead of `end_step`."""
    module: Any  # the type nn.Module lacks these methods
    for module in model.modules():
        if hasattr(module, "skip_step") and hasattr(module, "record"):
            module.skip_step()


def attach_end_step(optimizer: Optimizer, model: nn.Module, group: dist.ProcessGroup | None = None) -> RemovableHandle:
    """Call ``end_step(model, group)`` at the end of every ``optimizer.step()``.

    Attach only one optimizer per model: two would call `end_step` twice per step.

    Returns:
        A handle whose ``remove()`` undoes this.
    """
    return optimizer.register_step_post_hook(lambda *_: end_step(model, group))


__all__ = [
    "GATES",
    "BaseRouter",
    "Choice",
    "ExpertChoiceRouter",
    "FixedRouter",
    "GShardRouter",
    "Gate",
    "HashRouter",
    "NaiveRouter",
    "NoisyRouter",
    "RandomRouter",
    "Router",
    "Scores",
    "SigmoidRouter",
    "SinkhornRouter",
    "SparseMixerRouter",
    "SwipeRouter",
    "SwitchRouter",
    "TopKRouter",
    "TopologyRouter",
    "ZeroRouter",
    "attach_end_step",
    "build_gate",
    "end_step",
    "register_gate",
    "skip_step",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a gate or a module of FastMoE's API, which `fmoe.fastmoe` adds to this package."""
        if name.endswith(("Gate", "_gate")) or name == "utils":
            importlib.import_module("fmoe.fastmoe")
        if name in globals():
            return globals()[name]
        raise AttributeError(f"module 'fmoe.gates' has no attribute {name!r}", name=name)
