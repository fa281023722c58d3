"""Auxiliary losses and statistics of a layer: added to its backward pass, or collected, and counted once.

Shape letters: T tokens, E experts, K experts per token.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fmoe import recording
from fmoe.errors import UserError
from fmoe.losses import DEFAULT_LOSS_WEIGHTS
from fmoe.metrics import LayerMetrics, lock
from fmoe.routing import Routing

logger = logging.getLogger(__name__)

Observer = Callable[[Routing], None]  # a gate's `record`

_default_scale: float | Tensor = 1.0
_MAX_FACTORS = 16  # gradients of losses that a layer keeps


def set_loss_scale(value: float | Tensor) -> None:
    """Set the factor of auxiliary losses in the backward pass, for layers without the option ``loss_scale``.

    It must equal the factor of the training loss: (loss scale of fp16) / (micro batches per step). The default, 1, is
    right for plain ``loss.backward()``.
    """
    global _default_scale
    _default_scale = value


def loss_scale() -> float | Tensor:
    """Return the factor set by `set_loss_scale`, 1 by default."""
    return _default_scale


class AuxLosses:
    """Auxiliary losses and routing statistics of one layer.

    Args:
        num_experts: E.
        weights: factor of each loss by name; missing names keep their defaults.
        is_manual: whether `collect_losses` returns the losses. Otherwise the backward pass adds their gradients.
        scale: function that returns the losses' factor in the backward pass; None for the value of `set_loss_scale`.
        name: the layer's name in errors and warnings.

    Attributes:
        metrics: statistics since they were last reset.
        counts_evaluation: whether forward passes in evaluation mode are counted too (`fmoe.metrics.counting`).
        observer: the gate's ``record``, called with each routing that is counted in training; None if absent. Under
            torch.compile only the losses and statistics of that routing are valid.
    """

    counts_evaluation = False

    def __init__(
        self,
        num_experts: int,
        weights: Mapping[str, float] | None = None,
        *,
        is_manual: bool = False,
        scale: Callable[[], float | Tensor] | None = None,
        name: str = "MoE",
    ):
        self.weights = {**DEFAULT_LOSS_WEIGHTS, **(weights or {})}
        self.is_manual = is_manual
        self.loss_scale = scale
        self.name = name
        self.metrics = LayerMetrics(num_experts, tuple(self.weights))
        self.observer: Observer | None = None
        self.pending: list[Tensor] = []
        self._has_warned = False
        self._has_offered = False
        self._factors: dict[Any, Tensor] = {}
        self._number = recording.register(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pending": [], "_factors": {}}  # pending losses belong to the graph of the original

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._number = recording.register(self)

    def scale(self) -> float | Tensor:
        """Return the current factor of the losses in the backward pass."""
        return (self.loss_scale or loss_scale)()

    def attach(self, routing: Routing, share: float | Tensor, training: bool) -> Tensor:
        """Return the combine weights, whose backward pass also adds the gradients of the losses.

        With ``is_manual``, the losses wait for `collect` instead. Without ``training`` or under ``torch.no_grad()``,
        the losses are ignored.

        Args:
            share: factor of the losses on this rank (``loss_share`` of `fmoe.layout.LocalTokens`).

        Raises:
            UserError: the gate returned a loss that has no entry in the weights.
        """
        weight_TK = routing.weight_TK
        if not (training and torch.is_grad_enabled()):
            return weight_TK
        unknown = routing.losses.keys() - self.weights.keys()
        if unknown:
            names = f"{sorted(unknown)}, which the gate returns"
            raise UserError(f"loss_weights of {self.name} has no entry for {names}: add a weight")
        losses = {name: loss for name, loss in routing.losses.items() if self.weights[name]}
        if self.is_manual:
            if losses:
                self._offer(self._total(losses, share))
            losses = {}
        losses = {name: loss for name, loss in losses.items() if loss.requires_grad}
        if torch.compiler.is_compiling():
            if losses or weight_TK.requires_grad:
                total = self._total(losses, share) if losses else None
                return recording.attach(weight_TK, routing, total, self._number)
        elif losses:
            weights = tuple(self.weights[name] for name in losses)
            return _AttachLosses.apply(weight_TK, self, weights, share, *losses.values())
        return weight_TK

    def _total(self, losses: Mapping[str, Tensor], share: float | Tensor) -> Tensor:
        """Return the weighted sum of the losses, times ``share``."""
        first, *others = [self.weights[name] * loss for name, loss in losses.items()]
        total = sum(others, first)
        return total * share if isinstance(share, Tensor) or share != 1 else total

    def gradients(
        self, weights: tuple[float, ...], share: float | Tensor, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """Return the gradient of each loss: ``scale() * share``, times the loss's entry of ``weights``."""
        # As one vector, mostly a constant one: every operation on a scalar would be a kernel launch on a GPU.
        scale = self.scale()
        if isinstance(scale, Tensor):
            factor = scale.to(device, dtype).reshape(())
            factor = factor * share if isinstance(share, Tensor) or share != 1 else factor
        elif isinstance(share, Tensor):
            factor = share.to(device, dtype) * scale
        else:
            if share != 1:  # rounded like a product of tensors
                scale = _rounded(scale, dtype) * _rounded(share, dtype)
            return self._constant(weights, scale, device, dtype)
        return self._constant(weights, 1.0, device, dtype) * factor

    def _constant(self, weights: tuple[float, ...], factor: float, device: torch.device, dtype: torch.dtype) -> Tensor:
        key = (weights, factor, device, dtype)
        if (vector := self._factors.get(key)) is not None:
            return vector
        # Filled on the device: a copy would synchronize.
        vector = torch.stack([torch.full((), weight, dtype=dtype, device=device) for weight in weights]) * factor
        # Not cached while a CUDA graph is captured, because the graph owns memory allocated then. Entries are never
        # freed, because a graph captured later may read them; their number is limited, as scales may change.
        if len(self._factors) < _MAX_FACTORS and not (
            device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        ):
            self._factors[key] = vector
        return vector

    def count(
        self, routing: Routing, weight_TK: Tensor, outputs: list[Tensor], training: bool, observer: Observer | None
    ) -> list[Tensor]:
        """Count the routing statistics of this forward pass once, and return the outputs to use from now on.

        They are counted at these times:

        * ``training`` under ``torch.no_grad()``: never.
        * Other ``training``, if an output requires a gradient: in the backward pass, because activation checkpoints
          repeat the forward pass.
        * Other ``training``, if no output requires a gradient: in this call.
        * Evaluation: in this call if ``counts_evaluation`` is set, else never.

        Args:
            weight_TK: result of `attach`.
            observer: observer of this forward pass; None for the attribute ``observer``.
        """
        if not training:
            if self.counts_evaluation:
                self.metrics.add(routing.stats, {})
            return outputs
        if not torch.is_grad_enabled():
            return outputs
        trained = [index for index, out in enumerate(outputs) if out.requires_grad]
        if not trained:
            if not recording.is_recomputation():
                self.record(routing, observer)
        elif not torch.compiler.is_compiling():
            recording.call_on_backward([outputs[index] for index in trained], lambda: self.record(routing, observer))
        elif not weight_TK.requires_grad:  # otherwise the result of `attach` counts
            outputs = [*outputs]
            outputs[trained[0]] = recording.attach(outputs[trained[0]], routing, None, self._number)
        return outputs

    def record(self, routing: Routing, observer: Observer | None = None) -> None:
        """Add the routing's statistics to ``metrics``, and call ``observer``, by default the attribute ``observer``."""
        if routing.stats is not None:
            self.metrics.add(routing.stats, routing.losses)
        observer = observer or self.observer
        if observer is not None:
            with lock():  # replicas of nn.DataParallel run their backward passes in separate threads
                observer(routing)
        if any(loss.requires_grad for loss in self.pending):
            self._warn("were not collected before the backward pass: add fmoe.collect_losses(model) to the loss")

    def collect(self) -> Tensor | None:
        """Return the sum of the weighted losses of all training passes since the last call; None if there are none."""
        pending = self.pending
        self.pending = []
        return _sum(pending) if pending else None

    def _offer(self, total: Tensor) -> None:
        """Queue ``total`` for `collect`, except while an activation checkpoint recomputes."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            self.pending.append(total)
            self._has_offered = True
        elif not self._has_offered:  # the first pass ran without gradients
            self._warn("cannot be collected inside a reentrant checkpoint: checkpoint with use_reentrant=False")

    def _warn(self, problem: str) -> None:
        """Log once that losses of ``aux_loss="manual"`` are missing from the training loss."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the auxiliary losses of %s (aux_loss='manual') %s, or use aux_loss='auto'", self.name, problem
            )


def collect_losses(model: nn.Module) -> Tensor:
    """Return the sum of the weighted auxiliary losses of all layers with ``aux_loss="manual"``, since the last call.

    Add this scalar to the training loss. It is zero if there are no losses.
    """
    losses = []
    for module in model.modules():
        aux = getattr(module, "aux", None)
        loss = aux.collect() if isinstance(aux, AuxLosses) else None
        if loss is not None:
            losses.append(loss)
    if losses:
        return _sum(losses)
    parameter = next(model.parameters(), None)
    return torch.zeros((), device=None if parameter is None else parameter.device, dtype=torch.float32)


def _sum(losses: list[Tensor]) -> Tensor:
    """Return the sum of scalars on the device of the first one; the others may be on other devices."""
    return sum((loss.to(losses[0].device) for loss in losses[1:]), losses[0])


def _rounded(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=dtype, device="cpu").item()


class _AttachLosses(torch.autograd.Function):
    """Return ``x``, whose backward pass also gives each loss its gradient (`AuxLosses.gradients`).

    The effect is that of adding the weighted losses to the training loss. An activation checkpoint runs the forward
    pass twice, but only one of the two graphs has a backward pass, so the gradient is added once.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, aux: AuxLosses, weights: tuple[float, ...], share: float | Tensor, *losses: Tensor
    ) -> Tensor:
        ctx.aux = aux
        ctx.arguments = (weights, share, losses[0].device, losses[0].dtype)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor | None, ...]:
        return grad_x, None, None, None, *ctx.aux.gradients(*ctx.arguments).unbind()
