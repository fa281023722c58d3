"""Routing statistics of a layer, summed on its device with no host sync until they are read."""

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fmoe.routing import RoutingStats, sum_dtype

# After the E loads: the scalars of RoutingStats, then each loss times tokens.
_SCALARS = ("dropped", "entropy", "tokens")

# Threads add to one layer's sums (nn.DataParallel's replicas, backward passes at once). One lock for all layers: a lock
# of the layer's own could be neither copied nor pickled with it.
_lock = threading.Lock()


def _after_fork() -> None:
    """Another thread of the parent may hold the lock, and the child has no such thread to release it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class LayerReport:
    """Routing of one layer over the steps since the last reset.

    Attributes:
        load: each expert's share of the assignments that were kept; sums to 1.
        drop_rate: dropped assignments / all assignments.
        entropy: mean entropy of the router's probabilities, nats.
        losses: mean of each unscaled auxiliary loss that the gate has.
        tokens: tokens routed.
    """

    load: list[float]
    drop_rate: float
    entropy: float
    losses: dict[str, float]
    tokens: int

    @property
    def load_cv(self) -> float:
        """Coefficient of variation of the load: 0 is balanced."""
        mean = sum(self.load) / len(self.load)
        return (sum((x - mean) ** 2 for x in self.load) / len(self.load)) ** 0.5 / mean if mean else 0.0

    @property
    def dead_experts(self) -> int:
        """Experts that no token reached."""
        return sum(x == 0 for x in self.load)


class LayerMetrics:
    """Sums of `RoutingStats` in one vector, which `sums` hands out for reduction over ranks.

    Attributes:
        seen: names of the losses that were ever added.
    """

    def __init__(self, num_experts: int, loss_names: tuple[str, ...]):
        self.num_experts = num_experts
        self.loss_names = loss_names
        self._sums: Tensor | None = None
        self.seen: set[str] = set()

    def add(self, stats: RoutingStats | None, losses: Mapping[str, Tensor]) -> None:
        """Adds one micro batch. Called from the backward pass, so that recomputation counts nothing twice."""
        if stats is None:
            return
        scalars = [stats.dropped, stats.entropy, stats.tokens]
        scalars += [
            losses[name].detach() * stats.tokens if name in losses else torch.zeros_like(stats.tokens)
            for name in self.loss_names
        ]
        sums = torch.cat([stats.load_E, torch.stack(scalars)]).to(sum_dtype(stats.load_E.device))
        with _lock:
            self.seen.update(losses)
            self._sums = sums if self._sums is None else self._sums + sums

    def sums(self, device: torch.device | str = "cpu") -> Tensor:
        """[E + 3 + number of losses], `sum_dtype`: sums over all passes added, which ranks can add up."""
        size = self.num_experts + len(_SCALARS) + len(self.loss_names)
        if self._sums is None:
            return torch.zeros(size, dtype=sum_dtype(torch.device(device)), device=device)
        return self._sums.clone()

    def report(self, sums: Tensor | None = None) -> LayerReport:
        """Turns sums (own, or reduced over ranks) into means. Reads them on the host."""
        values = (self.sums() if sums is None else sums).tolist()
        load, rest = values[: self.num_experts], values[self.num_experts :]
        dropped, entropy, tokens = rest[: len(_SCALARS)]
        kept = sum(load)
        return LayerReport(
            load=[x / kept if kept else 0.0 for x in load],
            drop_rate=dropped / (kept + dropped) if kept + dropped else 0.0,
            entropy=entropy / tokens if tokens else 0.0,
            losses={
                name: total / tokens if tokens else 0.0
                for name, total in zip(self.loss_names, rest[len(_SCALARS) :], strict=True)
                if name in self.seen
            },
            tokens=int(tokens),
        )

    def take(self) -> LayerReport:
        """`report` and `reset` in one, between which no other thread adds."""
        with _lock:
            sums = self.sums()
            self._sums = None
        return self.report(sums)

    def reset(self) -> None:
        """Forgets what was added."""
        self._sums = None


@contextlib.contextmanager
def counting(model: nn.Module) -> Iterator[None]:
    """Within, passes in evaluation are counted in the metrics of ``model``'s layers: loads, drops and entropy, since a
    gate has no losses then. What was counted before is put aside meanwhile."""
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
    """The routing report of every MoE layer of ``model`` by module name, of this rank's tokens.

    Args:
        reset: start counting anew afterwards.
    """
    reports = {}
    for name, module in model.named_modules():
        if isinstance(found := getattr(module, "metrics", None), LayerMetrics):
            reports[name] = found.take() if reset else found.report()
    return reports


metrics.counting = counting  # type: ignore[attr-defined]  # `fmoe.metrics` is the function, which hides this module
