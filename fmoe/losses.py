"""Auxiliary losses: the formulas, and `AuxLosses`, which adds a layer's losses to its backward pass.

Each loss is computed within each routing group (`fmoe.routing.RoutingGroups`). The result is the mean over groups,
weighted by their number of tokens. It does not depend on how the batch is split over micro batches and ranks, if these
hold whole groups and equally many tokens.

Shape letters: G groups, S positions of a group, E experts, T tokens, K experts per token.
"""

import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, List, Optional, Tuple  # noqa: UP035 - torch reads schemas of operations from these

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from fmoe.errors import UserError
from fmoe.metrics import LayerMetrics, lock
from fmoe.routing import Routing, RoutingStats

logger = logging.getLogger(__name__)

# Default weights: balance as in Switch (section 2.2), z as in ST-MoE, importance and load as in arXiv 1701.06538,
# sequence balance as in DeepSeek-V3.
DEFAULT_LOSS_WEIGHTS = {"balance": 1e-2, "z": 1e-3, "importance": 1e-1, "load": 1e-1, "sequence_balance": 1e-4}


def load_balancing_loss(probs_GSE: Tensor, load_GE: Tensor, valid_GS: Tensor | None = None) -> Tensor:
    """Return ``E * sum_e f_e P_e``, which is 1 for balanced routing (Switch, arXiv 2101.03961 equations 4-6).

    E is the number of experts on all ranks, f_e an expert's share of the choices, and P_e its mean probability. The
    ``l_aux`` of GShard (arXiv 2006.16668 algorithm 1) is the same up to a constant.

    Args:
        probs_GSE: the router's probabilities, differentiable.
        load_GE: number of choices of each expert in each group, before the capacity limit.
        valid_GS: bool, True for positions that hold a token; None for all.

    Returns:
        A scalar; 0 when there is no token.
    """
    num_groups, size, num_experts = probs_GSE.shape
    load_GE = load_GE.to(torch.promote_types(probs_GSE.dtype, torch.float32))
    fraction_GE = load_GE / load_GE.sum(1, keepdim=True).clamp(min=1)
    if valid_GS is None:
        per_group_G = (fraction_GE * probs_GSE.mean(1)).sum(1)
        return num_experts * (per_group_G.mean() if num_groups and size else probs_GSE.sum())
    valid_GS = valid_GS.to(probs_GSE.dtype)
    tokens_G = valid_GS.sum(1)
    mean_GE = (probs_GSE * valid_GS.unsqueeze(-1)).sum(1) / tokens_G.clamp(min=1).unsqueeze(1)
    per_group_G = (fraction_GE * mean_GE).sum(1)
    return num_experts * (per_group_G * tokens_G).sum() / tokens_G.sum().clamp(min=1)


def sequence_balance_loss(scores_GSE: Tensor, load_GE: Tensor, valid_GS: Tensor | None = None) -> Tensor:
    """Scale each token's scores to sum to one, and return their `load_balancing_loss`.

    This is the sequence-wise loss of DeepSeek-V3 (arXiv 2412.19437 equations 17-20), with routing groups in place of
    sequences.

    Args:
        scores_GSE: positive affinities of each token to all experts, differentiable; they need not sum to one.
        load_GE: number of the group's tokens that have the expert among their K best scores.
        valid_GS: bool, True for positions that hold a token; None for all.
    """
    return load_balancing_loss(scores_GSE / scores_GSE.sum(-1, keepdim=True).clamp(min=1e-20), load_GE, valid_GS)


def importance_loss(gates_GSE: Tensor, valid_GS: Tensor | None = None) -> Tensor:
    """Return ``CV(Importance)^2``, a squared coefficient of variation over experts.

    The Importance of an expert is the sum of its gate values over the group's tokens (Shazeer et al., arXiv 1701.06538
    equations 6-7).

    Args:
        gates_GSE: combine weight of each expert, 0 where it was not chosen; differentiable.
        valid_GS: bool, True for positions that hold a token; None for all.

    Returns:
        A scalar; 0 when there is no token.
    """
    return _squared_variation(gates_GSE, valid_GS)


def load_loss(chosen_GSE: Tensor, valid_GS: Tensor | None = None) -> Tensor:
    """Return ``CV(Load)^2``, a squared coefficient of variation over experts.

    The Load of an expert is a smooth estimate of the number of the group's tokens that choose it (Shazeer et al., arXiv
    1701.06538 equations 10-11).

    Args:
        chosen_GSE: probability P(x, i) that token x chooses expert i if only the noise of that expert's logit is drawn
            again (equation 9).
        valid_GS: bool, True for positions that hold a token; None for all.

    Returns:
        A scalar; 0 when there is no token.
    """
    return _squared_variation(chosen_GSE, valid_GS)


def _squared_variation(value_GSE: Tensor, valid_GS: Tensor | None) -> Tensor:
    """Sum the values of each group by expert, and return the squared coefficient of variation of the sums over experts.

    The result is the mean over groups, weighted by their numbers of tokens.
    """
    if valid_GS is None:
        valid_GS = value_GSE.new_ones(value_GSE.shape[:2])
    valid_GS = valid_GS.to(value_GSE.dtype)
    total_GE = (value_GSE * valid_GS.unsqueeze(-1)).sum(1)
    mean_G1 = total_GE.mean(1, keepdim=True)
    square_G = (total_GE - mean_G1).square().mean(1) / mean_G1.square().squeeze(1).clamp(min=1e-20)
    tokens_G = valid_GS.sum(1)
    return (square_G * tokens_G).sum() / tokens_G.sum().clamp(min=1)


def router_z_loss(logsumexp_T: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """Return the mean over tokens of ``logsumexp(logits)^2`` (ST-MoE, arXiv 2202.08906 equation 5).

    This loss keeps the router's logits small.

    Args:
        logsumexp_T: logsumexp of each token's logits, differentiable.
        mask_T: bool, True for tokens that are routed; None for all.
    """
    square_T = logsumexp_T.square()
    if mask_T is None:
        return square_T.mean() if square_T.numel() else square_T.sum()
    mask_T = mask_T.to(square_T.dtype)
    return (square_T * mask_T).sum() / mask_T.sum().clamp(min=1)


Observer = Callable[[Routing], None]  # a gate's `record`

_default_scale: float | Tensor = 1.0


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
        self.is_manual, self.loss_scale, self.name = is_manual, scale, name
        self.metrics = LayerMetrics(num_experts, tuple(self.weights))
        self.observer: Observer | None = None
        self.pending: list[Tensor] = []
        self._warned = self._has_offered = False
        self._factors: dict[tuple[torch.device, tuple[float, ...]], Tensor] = {}
        self._number = _register(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pending": [], "_factors": {}}  # pending losses belong to the graph of the original

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._number = _register(self)

    def scale(self) -> float | Tensor:
        """Return the current factor of the losses in the backward pass."""
        return (self.loss_scale or loss_scale)()

    def total(self, routing: Routing) -> Tensor | None:
        """Return the weighted sum of a routing's losses; None if no loss has a weight other than 0.

        Raises:
            UserError: the gate returned a loss that has no entry in the weights.
        """
        if unknown := routing.losses.keys() - self.weights.keys():
            names = f"{sorted(unknown)}, which the gate returns"
            raise UserError(f"loss_weights of {self.name} has no entry for {names}: add a weight")
        weighted = [self.weights[name] * loss for name, loss in routing.losses.items() if self.weights[name]]
        return sum(weighted[1:], weighted[0]) if weighted else None

    def attach(self, routing: Routing, share: float | Tensor, training: bool) -> Tensor:
        """Return the combine weights, whose backward pass also adds the gradients of the losses.

        With ``is_manual``, the losses wait for `collect` instead. Without ``training`` or under ``torch.no_grad()``,
        the losses are ignored.

        Args:
            share: factor of the losses on this rank (``loss_share`` of `fmoe.layout.LocalTokens`).
        """
        if not (training and torch.is_grad_enabled()):
            return routing.weight_TK
        if routing.is_fused and not self.is_manual and not torch.compiler.is_compiling():
            return self._attach_each(routing, share)
        if (total := self.total(routing)) is not None:
            total = total * share if isinstance(share, Tensor) or share != 1 else total
            if self.is_manual:
                self._offer(total)
            total = total if total.requires_grad and not self.is_manual else None
        if torch.compiler.is_compiling() and (total is not None or routing.weight_TK.requires_grad):
            return _attach_opaque(routing.weight_TK, routing, total, self._number)
        return routing.weight_TK if total is None else attach_loss(routing.weight_TK, total, self.scale)

    def _attach_each(self, routing: Routing, share: float | Tensor) -> Tensor:
        """Return the combine weights with every loss attached (`_AttachEach`)."""
        # A weighted sum of the losses would take several kernel launches on a GPU.
        if not routing.losses.keys() <= self.weights.keys():  # a wrapper of the gate added one
            self.total(routing)  # raises
        losses = {name: x for name, x in routing.losses.items() if self.weights[name] and x.requires_grad}
        if not losses:
            return routing.weight_TK
        more, known = (share, 1.0) if isinstance(share, Tensor) else (None, share)
        factors = tuple(self.weights[name] * known for name in losses)
        return _AttachEach.apply(routing.weight_TK, self, factors, more, *losses.values())

    def gradients(self, factors: tuple[float, ...], more: Tensor | None, device: torch.device) -> Tensor:
        """Return each loss's gradient, float32: ``scale()`` times its entry of ``factors``, times ``more`` if given."""
        scale = self.scale()
        if not isinstance(scale, Tensor):
            factors = tuple(factor * scale for factor in factors)
        key = (device, factors)
        found = self._factors.get(key)
        if found is None:
            # Filled on the device: a copy would synchronize.
            found = torch.stack([torch.full((), factor, dtype=torch.float32, device=device) for factor in factors])
            # Not cached while a CUDA graph is captured, because the graph owns memory allocated then. Entries are never
            # freed, because a graph captured later may read them; their number is limited, as scales may change.
            if len(self._factors) < 16 and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                self._factors[key] = found
        if isinstance(scale, Tensor):
            found = found * scale.to(device, found.dtype)
        return found if more is None else found * more

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
            if not _is_recomputation():
                self.record(routing, observer)
        elif not torch.compiler.is_compiling():
            _call_on_backward([outputs[index] for index in trained], lambda: self.record(routing, observer))
        elif not weight_TK.requires_grad:  # otherwise the result of `attach` counts
            outputs = [*outputs]
            outputs[trained[0]] = _attach_opaque(outputs[trained[0]], routing, None, self._number)
        return outputs

    def record(self, routing: Routing, observer: Observer | None = None) -> None:
        """Add the routing's statistics to ``metrics``, and call ``observer``, by default the attribute ``observer``."""
        if routing.stats is not None:
            self.metrics.add(routing.stats, routing.losses)
        observer = observer or self.observer
        if observer is not None:
            with lock():  # replicas of nn.DataParallel run their backward passes in separate threads
                observer(routing)
        if not self._warned and any(loss.requires_grad for loss in self.pending):
            self._warned = True
            logger.warning(
                "the auxiliary losses of %s (aux_loss='manual') were not collected before the backward pass: add "
                "fmoe.collect_losses(model) to the loss, or use aux_loss='auto'",
                self.name,
            )

    def collect(self) -> Tensor | None:
        """Return the sum of the weighted losses of all training passes since the last call; None if there are none."""
        pending, self.pending = self.pending, []
        return _sum(pending) if pending else None

    def _offer(self, total: Tensor) -> None:
        """Queue ``total`` for `collect`, except while an activation checkpoint recomputes."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            self.pending.append(total)
            self._has_offered = True
        elif not self._has_offered and not self._warned:  # the first pass ran without gradients
            self._warned = True
            logger.warning(
                "the auxiliary losses of %s (aux_loss='manual') cannot be collected inside a reentrant "
                "checkpoint: checkpoint with use_reentrant=False, or use aux_loss='auto'",
                self.name,
            )


def collect_losses(model: nn.Module) -> Tensor:
    """Return the sum of the weighted auxiliary losses of all layers with ``aux_loss="manual"``, since the last call.

    Add this scalar to the training loss. It is zero if there are no losses.
    """
    layers = [aux for m in model.modules() if isinstance(aux := getattr(m, "aux", None), AuxLosses)]
    found = [loss for aux in layers if (loss := aux.collect()) is not None]
    if found:
        return _sum(found)
    parameter = next(model.parameters(), None)
    return torch.zeros((), device=None if parameter is None else parameter.device, dtype=torch.float32)


def _sum(losses: list[Tensor]) -> Tensor:
    """Return the sum of scalars on the device of the first one; the others may be on other devices."""
    return sum((loss.to(losses[0].device) for loss in losses[1:]), losses[0])


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Callable[[], float | Tensor]) -> Tensor:
        ctx.scale, ctx.dtype, ctx.device = scale, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad_x, _scalar(ctx.scale(), ctx.dtype, ctx.device), None


class _AttachEach(torch.autograd.Function):
    """Return ``x``, whose backward pass also gives each loss its gradient (`AuxLosses.gradients`)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, aux: AuxLosses, factors: tuple[float, ...], more: Tensor | None, *losses: Tensor
    ) -> Tensor:
        ctx.aux, ctx.factors, ctx.more, ctx.device = aux, factors, more, losses[0].device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor | None, ...]:
        return grad_x, None, None, None, *ctx.aux.gradients(ctx.factors, ctx.more, ctx.device).unbind()


def _scalar(value: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device, dtype).reshape(())
    return torch.full((), value, dtype=dtype, device=device)  # filled on the device: a copy would synchronize


def attach_loss(x: Tensor, loss: Tensor, scale: Callable[[], float | Tensor]) -> Tensor:
    """Return ``x``, whose backward pass also gives ``loss`` the gradient ``scale()``.

    The effect is that of adding ``scale() * loss`` to the training loss. The result is a view that an autograd function
    returns, so it must not be changed in place.
    """
    return _AttachLoss.apply(x, loss, scale)


def _call_on_backward(outputs: list[Tensor], function: Callable[[], None]) -> None:
    """Call ``function`` once, when the first gradient of the outputs arrives."""
    waiting = [function]

    def run(_grad: Tensor) -> None:
        if waiting:
            waiting.pop()()

    for out in outputs:
        # A view leaves the graph if it is changed in place; its base does not.
        (out if out._base is None else out._base).register_hook(run)


def _is_recomputation() -> bool:
    """Return whether an activation checkpoint is repeating a forward pass that ran with gradients enabled before."""
    # Reentrant checkpoints run the first pass without gradients, so their second pass must count. Torch has no API for
    # the kind of checkpoint, so the stack is searched.
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "recompute_fn" and frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


# torch.compile cannot trace into `AuxLosses.record` and `scale`: statistics are state, and the scale is a number that
# changes. So compiled code refers to an `AuxLosses` by number and passes statistics as tensors to two operations that
# are opaque to it. They return copies, because operations must not return their inputs.

_registered: "weakref.WeakValueDictionary[int, AuxLosses]" = weakref.WeakValueDictionary()
_numbers = itertools.count()
_tickets = itertools.count()  # of forward passes
_counted: dict[int, None] = {}  # the latest tickets whose statistics are counted
_MAX_COUNTED = 4096


def _register(aux: AuxLosses) -> Tensor:
    number = next(_numbers)
    _registered[number] = aux
    # As a tensor, so that layers of equal shape share compiled code.
    return torch.tensor(number, dtype=torch.int64, device="cpu")


def _attach_opaque(x: Tensor, routing: Routing, total: Tensor | None, number: Tensor) -> Tensor:
    """Return ``x``; its backward pass adds the scaled gradient of ``total``, if any, and counts the statistics."""
    stats = routing.stats
    sums = [] if stats is None else [stats.load_E, stats.dropped, stats.entropy, stats.tokens]
    values = [value.detach() for value in (*sums, *routing.losses.values())]
    attached, _ticket = _attach(x, total, number, values, ",".join(routing.losses), stats is not None)
    return attached


@torch.library.custom_op("fmoe::attach", mutates_args=())
def _attach(
    weight: Tensor,
    total: Optional[Tensor],  # noqa: UP045
    number: Tensor,
    values: List[Tensor],  # noqa: UP006
    names: str,
    has_stats: bool,
) -> Tuple[Tensor, Tensor]:  # noqa: UP006
    """Return a copy of ``weight``, and a ticket: a new id for this forward pass."""
    return weight.clone(), torch.tensor(next(_tickets), dtype=torch.int64, device="cpu")


@_attach.register_fake
def _(
    weight: Tensor, total: Tensor | None, number: Tensor, values: list[Tensor], names: str, has_stats: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight), torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("fmoe::record", mutates_args=())
def _record(
    grad: Tensor,
    number: Tensor,
    ticket: Tensor,
    values: List[Tensor],  # noqa: UP006
    names: str,
    has_stats: bool,
) -> Tuple[Tensor, Tensor]:  # noqa: UP006
    """Count the statistics once per ticket. Return a copy of ``grad``, and the current factor of the losses."""
    # The backward pass uses the result, so that no compiler removes the operation.
    layer = _registered.get(int(number))
    scale: float | Tensor = 1.0
    if layer is not None:
        if int(ticket) not in _counted:  # otherwise the backward pass runs again (retain_graph)
            _counted[int(ticket)] = None
            if len(_counted) > _MAX_COUNTED:
                _counted.pop(next(iter(_counted)), None)
            stats = RoutingStats(values[0], values[1], values[2], values[3]) if has_stats else None
            losses = dict(zip(filter(None, names.split(",")), values[4 * has_stats :], strict=True))
            layer.record(Routing(grad.new_empty(0, dtype=torch.int64), grad, losses, stats))
        scale = layer.scale()
    return grad.clone(), _scalar(scale, torch.float32, grad.device).clone()


@_record.register_fake
def _(
    grad: Tensor, number: Tensor, ticket: Tensor, values: list[Tensor], names: str, has_stats: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad), grad.new_empty((), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _weight, total, number, values, ctx.names, ctx.has_stats = inputs
    ctx.dtype = None if total is None else total.dtype
    ctx.num_values = len(values)
    ctx.save_for_backward(number, output[1], *values)


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Any, ...]:
    number, ticket, *values = ctx.saved_tensors
    grad, scale = _record(grad, number, ticket, values, ctx.names, ctx.has_stats)
    return grad, None if ctx.dtype is None else scale.to(ctx.dtype), None, [None] * ctx.num_values, None, None


_attach.register_autograd(_backward, setup_context=_keep)
