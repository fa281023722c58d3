"""Marks that modules set on the parameters they own.

Optimizers, Megatron and gradient reductions see parameters without their modules. A module therefore marks its
parameters by attributes of the tensors: ``allreduce``, ``is_stacked``, ``dp_comm``. A parameter that replaced another
lacks the marks, for example after ``load_state_dict(assign=True)`` or a parametrization. Call `refresh` before reading
a mark.
"""

import weakref
from typing import Any

from torch import nn

_owners: "weakref.WeakSet[Any]" = weakref.WeakSet()  # modules with a method `_mark_parameters`


def enrol(module: nn.Module) -> None:
    """Register a module: `refresh` then calls its ``_mark_parameters``."""
    _owners.add(module)


def refresh() -> None:
    """Set the attributes that mark parameters, such as ``allreduce``, on the parameters of all registered modules."""
    for module in list(_owners):
        module._mark_parameters()
