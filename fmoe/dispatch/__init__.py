"""From a routing to rows grouped by expert and back: plan (integers), exchange (between workers)."""

from fmoe.dispatch.exchange import AllToAllExchange, Exchange, LocalExchange, build_exchange
from fmoe.dispatch.plan import DispatchPlan

__all__ = ["AllToAllExchange", "DispatchPlan", "Exchange", "LocalExchange", "build_exchange"]
