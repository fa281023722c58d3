"""Routing statistics of a layer, summed on its device. Only reading them synchronizes with the device."""

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fmoe.routing import RoutingStats, sum_dtype

# Layout of the sums: E loads, these scalars of RoutingStats, then each loss times tokens.
_SCALARS = ("dropped", "entropy", "tokens")

# Several threads may add to one layer's sums (nn.DataParallel, concurrent backward passes). The lock is global because
# a layer with a lock could be neither copied nor pickled.
_lock = threading.RLock()
_MAX_PENDING = 64  # maximum number of vectors that wait to be added in one operation


def _after_fork() -> None:
    """Replace the lock in a forked child: a thread that exists only in the parent may hold it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def lock() -> threading.RLock:
    """Return the lock that a thread holds while it counts statistics."""
    return _lock


def coefficient_of_variation(load: Sequence[float]) -> float:
    """Return standard deviation / mean of the loads; 0 if all loads are 0."""
    mean = sum(load) / len(load)
    return (sum((x - mean) ** 2 for x in load) / len(load)) ** 0.5 / mean if mean else 0.0


@dataclass(frozen=True)
class LayerReport:
    """Routing of one layer since the last reset.

    Attributes:
        load: each expert's share of the kept assignments; sums to 1, or to 0 without assignments.
        drop_rate: dropped assignments / all assignments.
        entropy: mean entropy of the router's probabilities, nats per token.
        losses: each auxiliary loss of the gate, not scaled by its loss weight: the mean over micro batches, weighted by
            their tokens.
        tokens: number of routed tokens.
    """

    load: list[float]
    drop_rate: float
    entropy: float
    losses: dict[str, float]
    tokens: int

    @property
    def load_cv(self) -> float:
        """Coefficient of variation of the load; 0 is balanced."""
        return coefficient_of_variation(self.load)

    @property
    def dead_experts(self) -> int:
        """Number of experts without a kept assignment."""
        return sum(x == 0 for x in self.load)


class LayerMetrics:
    """Sums of `RoutingStats` and of losses in one vector, which can be summed over ranks.

    Attributes:
        seen: names of the losses added so far.
    """

    def __init__(self, num_experts: int, loss_names: tuple[str, ...]):
        self.num_experts = num_experts
        self.loss_names = loss_names
        self._sums: Tensor | None = None
        self._pending: list[Tensor] = []  # vectors that still have to be added to the sums
        self.seen: set[str] = set()

    def add(self, stats: RoutingStats | None, losses: Mapping[str, Tensor]) -> None:
        """Add the statistics and losses of one micro batch; ``stats=None`` adds nothing."""
        if stats is None:
            return
        sums = stats.sums
        is_prefix = sums is not None and stats.loss_names == self.loss_names[: len(stats.loss_names)]
        if sums is None or not is_prefix:
            scalars = [stats.dropped, stats.entropy, stats.tokens]
            scalars += [
                losses[name].detach() * stats.tokens if name in losses else torch.zeros_like(stats.tokens)
                for name in self.loss_names
            ]
            sums = torch.cat([stats.load_E, torch.stack(scalars)]).to(sum_dtype(stats.load_E.device))
        # A CUDA graph repeats kernels but not this code, so vectors made during capture cannot wait to be added.
        is_captured = sums.is_cuda and torch.cuda.is_current_stream_capturing()
        with _lock:
            self.seen.update(losses)
            buffer = self._buffer(sums.device)
            if is_captured or not is_prefix:
                buffer[: len(sums)].add_(sums)
            else:  # added later, many at once: on a GPU each addition is a kernel launch
                if self._pending and (len(self._pending[0]), self._pending[0].device) != (len(sums), sums.device):
                    self._add_pending()  # lengths differ: vectors of evaluation have no losses
                self._pending.append(sums)
                if len(self._pending) >= _MAX_PENDING:
                    self._add_pending()

    def _buffer(self, device: torch.device) -> Tensor:
        with torch.inference_mode(False):  # a tensor made in inference mode could not be updated outside of it
            if self._sums is None:
                self._sums = self._zeros(device)
            elif self._sums.device != device:  # the layer has moved
                self._sums = self._sums.to(device, sum_dtype(device))
        return self._sums

    def _zeros(self, device: torch.device) -> Tensor:
        size = self.num_experts + len(_SCALARS) + len(self.loss_names)
        return torch.zeros(size, dtype=sum_dtype(device), device=device)

    def _add_pending(self) -> None:
        pending = self._pending
        self._pending = []
        if not pending:
            return
        total = pending[0] if len(pending) == 1 else torch.stack(pending).sum(0, dtype=sum_dtype(pending[0].device))
        self._buffer(total.device)[: len(total)].add_(total)

    def _total(self, device: torch.device | str = "cpu") -> Tensor:
        self._add_pending()
        return self._zeros(torch.device(device)) if self._sums is None else self._sums.clone()

    def sums(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the sums so far, [E + 3 + number of losses], in the dtype `fmoe.routing.sum_dtype`.

        They are the kept assignments of each of the E experts, then dropped assignments, entropy, tokens and losses.
        Sums of ranks whose gates see different tokens may be added.

        Args:
            device: device of the zeros to return if nothing has been counted.
        """
        with _lock:
            return self._total(device)

    def report(self, sums: Tensor | None = None) -> LayerReport:
        """Return the report of ``sums``, for example sums over ranks; None for the current sums of this rank.

        Synchronizes with the device.
        """
        values = (self.sums() if sums is None else sums).tolist()
        load = values[: self.num_experts]
        dropped, entropy, tokens, *losses = values[self.num_experts :]
        kept = sum(load)
        return LayerReport(
            load=[x / kept if kept else 0.0 for x in load],
            drop_rate=dropped / (kept + dropped) if kept + dropped else 0.0,
            entropy=entropy / tokens if tokens else 0.0,
            losses={
                name: total / tokens if tokens else 0.0
                for name, total in zip(self.loss_names, losses, strict=True)
                if name in self.seen
            },
            tokens=int(tokens),
        )

    def take(self) -> LayerReport:
        """Return the report, and reset the sums in the same atomic step."""
        with _lock:
            sums = self._total()
            self._clear()
        return self.report(sums)

    def reset(self) -> None:
        """Reset the sums."""
        with _lock:
            self._clear()

    def _clear(self) -> None:
        self._pending = []
        if self._sums is not None:  # zeroed in place on a GPU, where a CUDA graph may add to this memory
            self._sums = self._sums.zero_() if self._sums.is_cuda else None


@contextlib.contextmanager
def counting(model: nn.Module) -> Iterator[None]:
    """Make the MoE layers of ``model`` collect metrics in evaluation mode, within this context.

    Evaluation adds loads, drops and entropy, but no losses. The metrics start at zero. Read them inside the context:
    its end restores the metrics from before it.
    """
    layers: list[Any] = [
        m.aux for m in model.modules() if isinstance(getattr(getattr(m, "aux", None), "metrics", None), LayerMetrics)
    ]
    aside = [layer.metrics for layer in layers]
    for layer in layers:
        layer.metrics = LayerMetrics(layer.metrics.num_experts, layer.metrics.loss_names)
        layer.counts_evaluation = True
    try:
        yield
    finally:
        for layer, before in zip(layers, aside, strict=True):
            layer.metrics = before
            layer.counts_evaluation = False


def metrics(model: nn.Module, *, reset: bool = False) -> dict[str, LayerReport]:
    """Return the routing report of every MoE layer of ``model``, keyed by module name.

    A report covers the tokens that this rank's gate routes. If a layer has a ``slice_group`` or a
    ``sequence_group``, these are the tokens of all ranks of that group.

    Args:
        reset: reset the counts afterwards.
    """
    reports = {}
    for name, module in model.named_modules():
        layer_metrics = getattr(module, "metrics", None)
        if isinstance(layer_metrics, LayerMetrics):
            reports[name] = layer_metrics.take() if reset else layer_metrics.report()
    return reports


metrics.counting = counting  # type: ignore[attr-defined]  # `fmoe.metrics` is the function, which hides this module
