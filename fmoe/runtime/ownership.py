"""Marks that modules set on the parameters they own.

Optimizers, Megatron and gradient reductions see parameters without their modules, so a module marks its parameters
(``allreduce``, ``is_stacked``, ``dp_comm``) by attributes of the tensors. A parameter that replaced another (by
``load_state_dict(assign=True)``, ``module._parameters`` or a parametrization) lacks the marks. Call `refresh` before
reading a mark.
"""

import weakref
from typing import Any

from torch import nn

_owners: "weakref.WeakSet[Any]" = weakref.WeakSet()  # modules with a method `_mark_parameters`


def enrol(module: nn.Module) -> None:
    """Have `refresh` call the module's ``_mark_parameters``."""
    _owners.add(module)


def refresh() -> None:
    """Mark the present parameters of all enrolled modules."""
    for module in list(_owners):
        module._mark_parameters()
