"""The recipe's gate, without megatron-core."""

from typing import Any

from fmoe.gates import GATES
from fmoe.gates.switch import SwitchRouter
from pretrain.config import ModelConfig


def gate_options(model: ModelConfig) -> dict[str, Any]:
    """Keywords of the gate."""
    options: dict[str, Any] = {
        "capacity_factor": model.capacity_factor,
        "eval_capacity_factor": model.eval_capacity_factor,
    }
    if issubclass(GATES.get(model.gate, object), SwitchRouter):
        options["jitter"] = model.jitter
    return options
