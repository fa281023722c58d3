"""Adapters of PEFT: modules that take the place of a gate or of experts, and contain them."""

import sys
from typing import Any


def adapted(module: Any) -> Any:
    """Return the gate or the experts inside PEFT's adapters, or ``module`` itself if it is not an adapter.

    Read attributes and classes from the result, but call ``module``, which applies the adapter. With LoRA
    (``target_parameters``), the result is the base layer. With ``modules_to_save``, it is the copy of the first active
    adapter, or the original if none is active.
    """
    if (layers := sys.modules.get("peft.tuners.tuners_utils")) is None:  # nothing is adapted before PEFT is imported
        return module
    if isinstance(module, layers.BaseTunerLayer):
        return module.get_base_layer()
    if not isinstance(module, sys.modules["peft.utils.other"].ModulesToSaveWrapper):
        return module
    names = [] if module.disable_adapters else module.active_adapters
    return next((module.modules_to_save[name] for name in names), module.original_module)
