"""Optimizers of tables of which a step touches few rows (`fmoe.parallel.ShardedEmbedding`)."""

from collections.abc import Callable
from typing import Any

import torch

from fmoe.optim.checks import check
from fmoe.optim.layout import Group, loss_of
from fmoe.optim.trust import WideOptimizer, stepped_dtype


class RowAdagrad(WideOptimizer):
    """Adagrad on the rows with a gradient, with one accumulator per row, as in FBGEMM and torchrec.

    The formula for row r::

        sum[r] = sum[r] + mean(g[r]^2)
        w[r] = w[r] - lr * g[r] / (sqrt(sum[r]) + eps)

    Other rows and their accumulators stay as they are. Gradients must be sparse tensors. Accumulators are in at least
    float32.

    Raises:
        UserError: an argument is out of range.
        RuntimeError: from ``step``, a gradient is not sparse.
    """

    def __init__(self, params: Any, lr: float = 0.01, eps: float = 1e-8):
        check(lr=lr, eps=eps)
        super().__init__(params, {"lr": lr, "eps": eps})

    def add_param_group(self, param_group: Group) -> None:
        """Add tables, with their state."""
        super().add_param_group(param_group)
        for weight in self.param_groups[-1]["params"]:
            self.state[weight] = {"sum": weight.new_zeros(len(weight), dtype=stepped_dtype(weight))}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the rows that have a gradient."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                gradient = weight.grad.coalesce()
                rows = gradient.indices()[0]
                sums = self.state[weight]["sum"]
                values = gradient.values().to(sums.dtype)
                sums.index_add_(0, rows, values.square().mean(1))
                scale = sums[rows].sqrt() + group["eps"]
                weight.index_add_(0, rows, (values / scale[:, None]).to(weight.dtype), alpha=-group["lr"])
        return loss


class RowAdam(torch.optim.SparseAdam):
    """torch's SparseAdam, Adam on the rows with a gradient, with a state that exists before the first step.

    Moments of other rows do not decay. The bias correction counts all steps of the table.
    """

    def add_param_group(self, param_group: Group) -> None:
        """Add tables, with their state."""
        super().add_param_group(param_group)
        for weight in self.param_groups[-1]["params"]:
            moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            self.state[weight] = moments | {"step": torch.zeros((), dtype=torch.float64, device="cpu")}
