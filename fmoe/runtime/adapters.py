"""Adapters of PEFT: modules that replace a gate or experts, and contain them."""

import sys
from typing import Any


def adapted(module: Any) -> Any:
    """Return the gate or the experts inside PEFT's adapters; ``module`` itself if it is not an adapter.

    Read attributes and classes of a gate or experts from the result, but call ``module``, which applies the adapter.
    LoRA (``target_parameters``) holds the adapted module as its base layer; ``modules_to_save`` holds a copy for each
    adapter: the copy of the first active adapter is returned, or the original if none is active.
    """
    if (layers := sys.modules.get("peft.tuners.tuners_utils")) is None:  # nothing is adapted before PEFT is imported
        return module
    if isinstance(module, layers.BaseTunerLayer):
        return module.get_base_layer()
    if not isinstance(module, sys.modules["peft.utils.other"].ModulesToSaveWrapper):
        return module
    names = [] if module.disable_adapters else module.active_adapters
    return next((module.modules_to_save[name] for name in names), module.original_module)
