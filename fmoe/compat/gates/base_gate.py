"""What FastMoE's gates share: numbers of experts, and a loss that is kept until it is asked for."""

from typing import Any

from torch import Tensor, nn

from fmoe.errors import UserError


class BaseGate(nn.Module):
    """A gate of ``num_expert`` experts on each of ``world_size`` workers; ``forward(x)`` gives (index, score).

    Attributes:
        tot_expert: E.
        default_top_k: K of layers that are given none.
        runs_collectives: whether `forward` exchanges counts between workers.
    """

    default_top_k = 2
    runs_collectives = False

    def __init__(self, num_expert: int, world_size: int):
        super().__init__()
        self.world_size, self.num_expert = world_size, num_expert
        self.tot_expert = world_size * num_expert
        self.loss: Tensor | None = None

    def forward(self, x: Tensor):
        raise NotImplementedError("a gate implements forward(x) -> (index, score)")

    def set_loss(self, loss: Tensor) -> None:
        """Keeps the loss of this forward pass."""
        self.loss = loss

    def get_loss(self, clear: bool = True) -> Tensor | None:
        """The loss that was kept, to be added to the training loss; None if there is none."""
        loss = self.loss
        if clear:
            self.loss = None
        return loss

    @property
    def has_loss(self) -> bool:
        """Whether a loss is kept."""
        return self.loss is not None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"loss": None}  # a loss belongs to a graph, which cannot be copied


def check_top_k(top_k: int, num_expert: int, world_size: int) -> None:
    """Raises UserError where there are not so many experts."""
    if not 1 <= top_k <= num_expert * world_size:
        raise UserError(f"top_k={top_k} is not between 1 and num_expert={num_expert} * world_size={world_size}")
