"""Routing statistics over all layers and ranks, as a single process would count them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from fmoe.losses import DEFAULT_LOSS_WEIGHTS
from fmoe.metrics import LayerMetrics, LayerReport
from fmoe.routing import sum_dtype
from pretrain.config import ModelConfig
from pretrain.config.layer import loss_weights


@dataclass(frozen=True)
class StepReport(LayerReport):
    """Routing report of one layer.

    Attributes:
        exchange_bytes: bytes that a rank sent in the layer's token exchange, averaged over data parallel ranks: token
            rows and their counts, in the forward and backward passes and in recomputation.
    """

    exchange_bytes: float


class RoutingReports:
    """Routing statistics of the MoE layers, summed over data parallel ranks and pipeline stages.

    Tensor and context parallel ranks count the same tokens, so nothing is summed over them.

    Args:
        layers: the MoE layers on this rank, with their ``layer_number``.
        num_layers: number of layers of the whole model; they are numbered from 1.
        num_experts: number of routed experts in each MoE layer; 0 for a model without MoE layers.
        loss_names: names of the auxiliary losses, in the layers' order.
        data_group: ranks with different sequences.
        device: device for the reductions.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_layers: int,
        num_experts: int,
        loss_names: Sequence[str],
        data_group: dist.ProcessGroup,
        device: torch.device,
    ):
        self._layers = layers
        self._num_layers = num_layers
        self._num_experts = num_experts
        self._loss_names = tuple(loss_names)
        self._data_group = data_group
        self._device = device
        self._width = len(LayerMetrics(num_experts, self._loss_names).sums())
        self._stages = parallel_state.get_pipeline_model_parallel_group()
        self.begin()

    @classmethod
    def of(cls, layers: Sequence[Any], model: ModelConfig, device: torch.device) -> Self:
        """Return the reports of the MoE layers that this rank has of a model."""
        return cls(
            layers,
            num_layers=len(model.layer_numbers),
            num_experts=model.routed_experts if model.layers_with_experts else 0,
            loss_names=tuple(DEFAULT_LOSS_WEIGHTS | loss_weights(model)),
            data_group=parallel_state.get_data_parallel_group(),
            device=device,
        )

    def begin(self) -> None:
        """Start counting exchanged bytes for the next report."""
        self._sent = [layer.exchange.traffic.sent for layer in self._layers]

    def collect(self) -> dict[int, StepReport]:
        """Return the statistics since the last call, by layer number. Collective.

        They are equal on every rank, except for the bytes exchanged. These bytes are counted from `begin` on, and
        averaged over this rank's data parallel group.
        """
        if not self._num_experts:
            return {}
        # After a layer's sums: a flag for each of its losses, the bytes sent, and the number of ranks with the layer.
        width = self._width + len(self._loss_names) + 2
        rows = torch.zeros(self._num_layers, width, dtype=sum_dtype(self._device), device=self._device)
        counts = torch.zeros(self._num_layers, width - self._width, dtype=rows.dtype, device="cpu")
        for layer, sent in zip(self._layers, self._sent, strict=True):
            number = (layer.layer_number or 1) - 1
            rows[number, : self._width] = layer.metrics.sums(self._device)
            counts[number, :-2] = counts.new_tensor([name in layer.metrics.seen for name in self._loss_names])
            counts[number, -2] = layer.exchange.traffic.sent - sent
            counts[number, -1] = 1
            layer.metrics.reset()
        rows[:, self._width :] = counts  # one copy to the device for all layers
        dist.all_reduce(rows, group=self._data_group)
        if self._stages.size() > 1:
            dist.all_reduce(rows, group=self._stages)
        reports = {}
        for number, row in enumerate(rows.cpu(), start=1):
            *has_loss, sent, num_ranks = row[self._width :].tolist()
            if num_ranks:
                metrics = LayerMetrics(self._num_experts, self._loss_names)
                metrics.seen.update(compress(self._loss_names, has_loss))
                report = metrics.report(row[: self._width])
                reports[number] = StepReport(**vars(report), exchange_bytes=sent / num_ranks)
        return reports
