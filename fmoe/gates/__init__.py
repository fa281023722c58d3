"""Gates: ``gate(x_TD, groups) -> Routing``. One file a gate; a new one is registered by one line.

A gate is any callable with that contract: one of the names below, a class built as ``cls(d_model, num_experts,
top_k, **options)``, or a ready instance.
"""

from collections.abc import Callable

from torch import Tensor, nn

from fmoe.errors import UserError, known_names
from fmoe.gates.base_layers import BaseRouter
from fmoe.gates.expert_choice import ExpertChoiceRouter
from fmoe.gates.gshard import GShardRouter
from fmoe.gates.hash import HashRouter
from fmoe.gates.naive import NaiveRouter
from fmoe.gates.noisy import NoisyRouter
from fmoe.gates.random import RandomRouter
from fmoe.gates.router import Choice, FixedRouter, Router, Scores, TopKRouter
from fmoe.gates.sigmoid import SigmoidRouter
from fmoe.gates.sinkhorn import SinkhornRouter
from fmoe.gates.steps import attach_end_step, end_step, skip_step
from fmoe.gates.swipe import SwipeRouter
from fmoe.gates.switch import SwitchRouter
from fmoe.gates.topology import TopologyRouter
from fmoe.gates.zero import ZeroRouter
from fmoe.routing import Routing, RoutingGroups

Gate = Callable[[Tensor, RoutingGroups], Routing]

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
}


def register_gate(name: str, gate: type[nn.Module] | Gate) -> None:
    """Makes a class or a function known as ``FMoE(gate=name)``."""
    GATES[name] = gate


def build_gate(
    gate: str | type[nn.Module] | Gate, d_model: int, num_experts: int, top_k: int | None, **options
) -> Gate:
    """A gate from its name, its class or a ready instance (whose own settings then hold).

    Raises:
        UserError: unknown name (lists the known ones and the nearest), options beside an instance, an instance for
            another number of experts.
    """
    if isinstance(gate, str):
        if gate not in GATES:
            raise UserError(f"gate={gate!r} is not known; {known_names(gate, sorted(GATES))}")
        gate = GATES[gate]
    if isinstance(gate, type):
        return gate(d_model, num_experts, top_k, **options)
    if options:
        raise UserError(f"gate_options={options!r} beside a ready gate {type(gate).__name__}: set them on the gate")
    if getattr(gate, "num_experts", num_experts) != num_experts:
        raise UserError(f"gate.num_experts={gate.num_experts} differs from num_experts={num_experts}")
    if top_k is not None and getattr(gate, "top_k", top_k) != top_k:
        raise UserError(f"gate.top_k={gate.top_k} differs from top_k={top_k}")
    return gate


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
