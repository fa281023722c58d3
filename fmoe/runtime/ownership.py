"""Marks on parameters, derived again from the modules that own them.

Optimizers, Megatron and gradient reductions see parameters without their modules, so a module marks its parameters
(``allreduce``, ``is_stacked``, ``dp_comm``) by attributes of the tensors. A parameter that replaces another, by
``load_state_dict(assign=True)``, by ``module._parameters``, by a parametrization, lacks the marks. So a reader of a
mark calls `refresh` first.
"""

import weakref
from typing import Any

from torch import nn

_owners: "weakref.WeakSet[Any]" = weakref.WeakSet()  # modules with a method `_mark_parameters`


def enrol(module: nn.Module) -> None:
    """Have `refresh` call the module's ``_mark_parameters``."""
    _owners.add(module)


def refresh() -> None:
    """Mark the parameters that modules own now."""
    for module in list(_owners):
        module._mark_parameters()
