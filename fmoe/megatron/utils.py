"""Megatron-LM's arguments, where there is one, and names that have no work any more."""

import argparse
import contextlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from fmoe.errors import UserError


def add_fmoe_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """FastMoE's arguments; ``--num-experts`` is left to a parser that has one already."""
    group = parser.add_argument_group("fastmoe")
    taken = "--num-experts" in parser._option_string_actions
    group.add_argument("--fmoefy", action="store_true")
    group.add_argument("--fmoe-num-experts" if taken else "--num-experts", type=int, default=None)
    group.add_argument("--top-k", type=int, default=2)
    group.add_argument("--balance-loss-weight", type=float, default=1)
    group.add_argument("--balance-strategy", type=str, default=None)
    group.add_argument("--hidden-hidden-size", type=int, default=None)
    return parser


def megatron_args() -> Any:
    """What Megatron-LM was started with; None where there is none, or it has not started."""
    for name in ("megatron", "megatron.training"):
        get_args = getattr(sys.modules.get(name), "get_args", None)
        if get_args is not None:
            with contextlib.suppress(AssertionError):  # it has not started
                return get_args()
    return None


def megatron_groups() -> ModuleType | None:
    """The module that holds Megatron's process groups, once there are some. Nothing is imported for it: where Megatron
    is not in use, there are none."""
    for name in ("megatron.mpu", "megatron.core.parallel_state"):
        module = sys.modules.get(name)
        if module is not None and module.model_parallel_is_initialized():
            return module
    return None


def gone(name: str, instead: str) -> Callable[..., NoReturn]:
    """A function that says what to use in its place."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UserError(f"fmoe.megatron.{name} belonged to the training loop of Megatron-LM 2 and 3: {instead}")

    refuse.__name__, refuse.__doc__ = name, f"Says: {instead}."
    return refuse
