"""The exchange of a single rank: it owns all experts, and nothing is sent.

Shape letters: see `fmoe.exchange.base`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fmoe.exchange.collectives import Traffic
from fmoe.experts.call import ExpertCall
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import Routing


class LocalExchange:
    """See the module.

    Args:
        num_experts: E.
    """

    ep_rank, ep_size, group = 0, 1, None

    def __init__(self, num_experts: int):
        self.num_experts = self.num_local_experts = num_experts
        self.traffic = Traffic()

    def session(
        self,
        name: str,
        facts: Callable[[Any], dict[str, object]],
        experts: nn.Module,
        x: Any,
        gate_runs_collectives: bool = False,
    ) -> "LocalSession":
        """Open a forward pass (`fmoe.exchange.base.Exchange.session`)."""
        return LocalSession(self.num_experts)


class LocalSession:
    """A forward pass whose errors concern no other rank.

    A plain object, not a generator: ``torch.compile(fullgraph=True)`` traces ``with`` over an object that the traced
    code constructs.
    """

    def __init__(self, num_experts: int):
        self._num_experts = num_experts

    def __enter__(self) -> "LocalSession":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, routing: Routing, weight_TK: Tensor, inputs: list[Tensor], experts: ExpertCall) -> list[Tensor]:
        """Permute, compute, combine; in one operation if the experts have one."""
        plan = DispatchPlan.from_routing(routing, self._num_experts)
        if (outputs := experts.fused(inputs, weight_TK, plan)) is not None:
            return outputs
        counts = plan.counts  # the only synchronization with the device
        rows = [plan.permute(x, sum(counts)) for x in inputs]
        return [plan.combine(y, weight_TK) for y in experts(rows, counts)]
