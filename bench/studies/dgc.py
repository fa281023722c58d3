"""Deep Gradient Compression (Lin et al., arXiv 1712.01887) as a communication hook of torch's DDP: an example.

From algorithm 1 and section 3, the hook has top-k sparsification per parameter, accumulation of what is not sent (error
feedback), momentum correction, momentum factor masking, and the warm-up of the density. It has no local clipping, and
chooses the k largest elements exactly instead of from a sample. Momentum is in the hook: the optimizer is plain SGD.

    model = fmoe.parallel.DistributedDataParallel(module, groups)
    model.register_comm_hook(DGCState(groups.data_group, density=0.001, warmup=100), dgc_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn


class DGCState:
    """State of `dgc_hook`.

    Args:
        group: process group of the data parallel ranks.
        density: share of a parameter's elements that a rank sends per step (at least one element).
        momentum: coefficient of the local momentum.
        warmup: number of steps in which the share falls exponentially from 1/4 to ``density``.
    """

    def __init__(self, group: dist.ProcessGroup, density: float = 0.001, momentum: float = 0.9, warmup: int = 0):
        self.group = group
        self.density = density
        self.momentum = momentum
        self.warmup = warmup
        self.step = 0
        # By parameter, not by bucket: DDP arranges its buckets anew after the first step.
        self.velocity: dict[nn.Parameter, Tensor] = {}
        self.unsent: dict[nn.Parameter, Tensor] = {}

    @property
    def current_density(self) -> float:
        """Share of the elements in this step."""
        left = max(0.0, 1 - self.step / self.warmup) if self.warmup else 0.0
        return self.density * (0.25 / self.density) ** left

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Accumulate a gradient; return values and flat indices of the elements to send, and reset these."""
        if parameter not in self.velocity:
            self.velocity[parameter] = torch.zeros_like(gradient)
            self.unsent[parameter] = torch.zeros_like(gradient)
        u = self.velocity[parameter].view(-1)
        v = self.unsent[parameter].view(-1)
        u.mul_(self.momentum).add_(gradient.view(-1))
        v.add_(u)
        count = min(v.numel(), math.ceil(self.current_density * v.numel()))
        indices = v.abs().topk(count, sorted=False).indices
        values = v[indices]
        u[indices] = v[indices] = 0.0
        return values, indices


def dgc_hook(state: DGCState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Replace a bucket by the mean over the ranks of their largest accumulated elements."""
    buffer = bucket.buffer()
    size = state.group.size()
    offset = 0
    values = []
    indices = []
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        own, where = state.take(parameter, gradient)
        values.append(own)
        indices.append(where + offset)
        offset += gradient.numel()
    own = torch.cat(values)
    where = torch.cat(indices).int()
    all_values = own.new_empty(size * own.numel())
    all_indices = where.new_empty(size * own.numel())
    dist.all_gather_into_tensor(all_values, own, group=state.group)
    dist.all_gather_into_tensor(all_indices, where, group=state.group)
    buffer.zero_().index_add_(0, all_indices, all_values, alpha=1 / size)
    if bucket.is_last():
        state.step += 1
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future
