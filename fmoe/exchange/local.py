"""The exchange of a single rank: it owns all experts, and nothing is sent.

Shape letters: see `fmoe.exchange.base`.
"""

from typing import Any

from torch import Tensor

from fmoe.exchange.monitor import Traffic
from fmoe.experts.call import ExpertCall
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import Routing


class LocalExchange:
    """Exchange of a single rank, which owns all experts; nothing is sent.

    Args:
        num_experts: number of experts.
    """

    ep_rank = 0
    ep_size = 1
    group = None

    def __init__(self, num_experts: int):
        self.num_experts = self.num_local_experts = num_experts
        self.traffic = Traffic()

    def session(self, *_arguments: Any) -> "LocalSession":
        """Open a forward pass, as `fmoe.exchange.base.Exchange.session` does."""
        return LocalSession(self.num_experts)


# A plain class, not a generator: torch.compile traces ``with`` over an object that the traced code constructs.
class LocalSession:
    """A forward pass of a layer on one rank."""

    def __init__(self, num_experts: int):
        self._num_experts = num_experts

    def __enter__(self) -> "LocalSession":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, routing: Routing, weight_TK: Tensor, inputs: list[Tensor], experts: ExpertCall) -> list[Tensor]:
        """Permute, compute and combine, in one operation if a backend has it (`Session.run`)."""
        return experts.combined(inputs, weight_TK, DispatchPlan.from_routing(routing, self._num_experts))
