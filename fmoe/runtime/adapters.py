"""Adapters of PEFT: modules that replace a gate or experts, and hold them."""

from typing import Any


def adapted(module: Any) -> Any:
    """Return the gate or the experts inside of PEFT's adapters; without one, ``module`` itself.

    Attributes and classes of a gate or of experts are read from the result. Calls go to ``module``, which adds the
    adapter. LoRA (``target_parameters``) holds the adapted module as its base layer; ``modules_to_save`` holds a copy
    for each adapter.
    """
    if (get_base_layer := getattr(module, "get_base_layer", None)) is not None:
        return get_base_layer()
    children = getattr(module, "_modules", {})
    if "modules_to_save" not in children or "original_module" not in children:
        return module
    names = [] if module.disable_adapters else module.active_adapters
    return next((children["modules_to_save"][name] for name in names), children["original_module"])
