"""Exchanges, which send tokens to the ranks of their experts, and return the outputs (`fmoe.exchange.base`)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from fmoe.errors import UserError, add_name, check_options, known_names
from fmoe.exchange.all_gather import AllGatherExchange
from fmoe.exchange.all_to_all import AllToAllExchange
from fmoe.exchange.base import Exchange, GroupExchange
from fmoe.exchange.deepep import DeepEPExchange
from fmoe.exchange.hierarchical import HierarchicalExchange
from fmoe.exchange.local import LocalExchange
from fmoe.exchange.monitor import PeerError
from fmoe.exchange.padded import PaddedExchange
from fmoe.exchange.shadow import Cost
from fmoe.exchange.symmetric import SymmetricExchange

EXCHANGES: dict[str, Callable[..., GroupExchange]] = {
    "all_to_all": AllToAllExchange,
    "padded": PaddedExchange,
    "all_gather": AllGatherExchange,
    "hierarchical": HierarchicalExchange,
    "deepep": DeepEPExchange,
    "symmetric": SymmetricExchange,
}
"""Factories of exchanges by name, called as ``(group, num_experts, **exchange_options)``."""


def register_exchange(name: str, factory: Callable[..., GroupExchange]) -> None:
    """Register an exchange (token dispatcher) under a new name.

    The name is then valid for the option ``exchange`` of a layer, and for ``parallel.exchange`` of a recipe.

    Args:
        factory: function or class, called as ``factory(group, num_experts, **exchange_options)``.

    Raises:
        UserError: the name is empty or belongs to another exchange.
    """
    add_name(EXCHANGES, "exchange", name, factory)


def build_exchange(
    group: dist.ProcessGroup | None,
    num_experts: int,
    exchange: str = "all_to_all",
    options: Mapping[str, Any] | None = None,
) -> Exchange:
    """Build the exchange (token dispatcher) of an expert parallel group.

    Without a group, or for a group of one rank, return a `LocalExchange`.

    Args:
        exchange: a name in `EXCHANGES`.
        options: options of the exchange.

    Raises:
        UserError: the name or an option is unknown, or an option has a wrong type. A group of several ranks also raises
            if an option's value is invalid, or the number of ranks does not divide ``num_experts``.
    """
    if exchange not in EXCHANGES:
        raise UserError(f"exchange={exchange!r} is not known; {known_names(exchange, sorted(EXCHANGES))}")
    check_options("exchange_options", EXCHANGES[exchange], options or {}, exchange, ("group", "num_experts"))
    if group is None or group.size() == 1:
        return LocalExchange(num_experts)
    if num_experts % group.size():
        raise UserError(f"num_experts={num_experts} is not divisible by the {group.size()} ranks of moe_group")
    return EXCHANGES[exchange](group, num_experts, **(options or {}))


__all__ = [
    "EXCHANGES",
    "AllGatherExchange",
    "AllToAllExchange",
    "Cost",
    "DeepEPExchange",
    "Exchange",
    "GroupExchange",
    "HierarchicalExchange",
    "LocalExchange",
    "PaddedExchange",
    "PeerError",
    "SymmetricExchange",
    "build_exchange",
    "register_exchange",
]
