"""Names of megatron-core that are replaced: tables of `Patch`, and the one way in which they are put in.

There are two tables: `megatron_patch.cpu.PATCHES`, for machines without a GPU, and `megatron_patch.adapter.PATCHES`,
for FMoE layers on any device.
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fmoe.errors import UserError


@dataclass(frozen=True)
class Patch:
    """One name that is replaced.

    Attributes:
        module, name: where it lives; ``module:Class`` for a method.
        make: called with the present value, returns the new one.
        reason: what fails without it, with a place in megatron-core 0.16.1.
        required: whether the name has to be there (a name may be missing by mistake in 0.16.1).
    """

    module: str
    name: str
    make: Callable[[Any], Any]
    reason: str
    required: bool = True

    def holder(self) -> Any:
        """The module or class that has the name."""
        module, _, owner = self.module.partition(":")
        imported = importlib.import_module(module)
        return getattr(imported, owner) if owner else imported


def apply(patches: Iterable[Patch], version: str) -> None:
    """Puts all of them in, or none.

    Raises:
        UserError: a name has moved.
    """
    found = []
    for patch in patches:
        try:
            holder = patch.holder()
        except (ModuleNotFoundError, AttributeError):
            holder = None
        if holder is None or (patch.required and not hasattr(holder, patch.name)):
            raise UserError(
                f"megatron-core {version} has no {patch.module}.{patch.name}, which megatron_patch replaces"
            )
        found.append((holder, patch))
    for holder, patch in found:
        setattr(holder, patch.name, patch.make(getattr(holder, patch.name, None)))
