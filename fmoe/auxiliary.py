"""Where a layer's auxiliary losses and routing statistics go: into its backward pass, or to who collects them."""

import logging

import torch
from torch import Tensor, nn

from fmoe import losses, recording
from fmoe.errors import UserError
from fmoe.routing import Routing

logger = logging.getLogger(__name__)


class AuxiliaryLosses:
    """The part of `fmoe.FMoE` that has its ``aux_loss``, ``loss_weights``, ``loss_scale`` and ``metrics``.

    Attributes:
        counts_evaluation: also passes in evaluation are counted in ``metrics`` (`fmoe.metrics.counting`), and by no
            gate.
    """

    counts_evaluation = False

    def total_loss(self, routing: Routing) -> Tensor | None:
        """The auxiliary losses of a routing with their weights, summed; None if there is none."""
        unknown = routing.losses.keys() - self.loss_weights.keys()
        if unknown:
            raise UserError(f"loss_weights of {self.name} has no entry for {sorted(unknown)}, which the gate returns")
        weighted = [self.loss_weights[name] * loss for name, loss in routing.losses.items() if self.loss_weights[name]]
        return sum(weighted) if weighted else None

    def _attach_losses(self, routing: Routing, share: float) -> Tensor:
        """The combine weights, in whose backward pass the losses join.

        Args:
            share: of this rank in the losses' gradients (`fmoe.parallel.slicing.Part`).
        """
        if not (self.training and torch.is_grad_enabled()):
            return routing.weight_TK
        total = self.total_loss(routing)
        total = total if total is None or share == 1 else total * share
        if total is not None and self.aux_loss == "manual":
            self._offer(total)
            total = None
        if total is not None and not total.requires_grad:
            total = None
        if torch.compiler.is_compiling() and (total is not None or routing.weight_TK.requires_grad):
            return recording.attach(routing.weight_TK, routing, total, self._number)
        if total is None:
            return routing.weight_TK
        return losses.attach_loss(routing.weight_TK, total, self.scale)

    def _count(self, routing: Routing, weight_TK: Tensor, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs, in whose backward pass the statistics of a micro batch are counted, once.

        A checkpoint runs a forward pass several times, so the backward pass counts: it reaches the outputs whichever
        of router, experts and input are trained. Where all three are frozen, the forward pass counts.

        Args:
            weight_TK: what `_attach_losses` returned.
        """
        if not self.training:
            if self.counts_evaluation:
                self.metrics.add(routing.stats, {})
            return outputs
        if not torch.is_grad_enabled():
            return outputs
        trained = [place for place, out in enumerate(outputs) if out.requires_grad]
        if not trained:
            if not recording.is_repeated():
                self.record(routing)
        elif not torch.compiler.is_compiling():
            recording.hook([outputs[place] for place in trained], lambda: self.record(routing))
        elif not weight_TK.requires_grad:
            place = trained[0]
            outputs = [*outputs]
            outputs[place] = recording.attach(outputs[place], routing, None, self._number)
        return outputs

    def scale(self) -> float | Tensor:
        """Factor between the auxiliary losses and the backward pass, as it is now."""
        return (self.loss_scale or losses.loss_scale)()

    def _offer(self, total: Tensor) -> None:
        """To `collect_losses`."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            self._pending.append(total)
            self._has_offered = True
        elif not self._has_offered and not self._warned:  # the first pass was without gradients
            self._warned = True
            logger.warning(
                "the auxiliary losses of %s (aux_loss='manual') cannot be collected from within a reentrant "
                "checkpoint: use_reentrant=False, or aux_loss='auto'",
                self.name,
            )

    def record(self, routing: Routing) -> None:
        """Count the statistics of one micro batch; called once, as a rule in its backward pass."""
        if routing.stats is not None:
            self.metrics.add(routing.stats, routing.losses)
        if hasattr(self.gate, "record"):
            self.gate.record(routing)
        if self._pending and not self._warned:
            self._warned = True
            logger.warning(
                "the auxiliary losses of %s (aux_loss='manual') were not collected before the backward pass: add "
                "fmoe.collect_losses(model) to the loss, or use aux_loss='auto'",
                self.name,
            )

    def collect_losses(self) -> Tensor | None:
        """With ``aux_loss="manual"``: the weighted losses of the forward passes since the last call, summed."""
        pending, self._pending = self._pending, []
        return sum(pending) if pending else None


def collect_losses(model: nn.Module) -> Tensor:
    """The auxiliary losses of all layers with ``aux_loss="manual"``, to be added to the training loss.

    Returns:
        A scalar; zero if there is none.
    """
    collected = [m.collect_losses() for m in model.modules() if isinstance(m, AuxiliaryLosses)]
    collected = [loss for loss in collected if loss is not None]
    if collected:
        return sum(collected)
    parameter = next(model.parameters(), None)
    return torch.zeros((), device=None if parameter is None else parameter.device, dtype=torch.float32)
