"""Buckets of gradients: tensors that share one collective."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.runtime import collectives

_BUCKET_BYTES = 25 << 20  # as in torch's DDP: large enough for the bandwidth, small enough to start early


def buckets_of(tensors: Iterable[Tensor], max_bytes: int = _BUCKET_BYTES) -> list[list[Tensor]]:
    """Group adjacent tensors of one dtype and device into buckets of at most ``max_bytes``.

    A larger tensor gets its own bucket.
    """
    buckets: list[list[Tensor]] = []
    kind, filled = None, 0
    for tensor in tensors:
        if (tensor.dtype, tensor.device) != kind or filled + tensor.nbytes > max_bytes:
            buckets.append([])
            kind, filled = (tensor.dtype, tensor.device), 0
        buckets[-1].append(tensor)
        filled += tensor.nbytes
    return buckets


class Reduction:
    """Asynchronous sum of gradients over a group. Missing gradients become zeros.

    Construct it on every rank of the group, for the same parameters in the same order. Include the parameters of
    experts that got no tokens on this rank.
    """

    def __init__(self, parameters: list[Tensor], group: dist.ProcessGroup):
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        alone = len(parameters) == 1 and self._gradients[0].is_contiguous()
        self._sum = (
            self._gradients[0].detach() if alone else torch.cat([g.detach().reshape(-1) for g in self._gradients])
        )
        self._is_copy, self._work = not alone, None
        if group.size() > 1:
            self._work = collectives.start(dist.all_reduce, self._sum, group=group)

    @torch.no_grad()
    def finish(self, divisor: int) -> None:
        """Wait for the sum, divide it by ``divisor``, and write it into the gradients."""
        if self._work is not None:
            self._work.wait()
        if divisor != 1:
            self._sum.div_(divisor)
        if self._is_copy:
            copy_back(self._sum, self._gradients)


def copy_back(flat: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy consecutive slices of ``flat`` into ``targets``."""
    for target, part in zip(targets, flat.split([t.numel() for t in targets]), strict=True):
        target.copy_(part.view_as(target))


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite every tensor with its value on the first rank of the group."""
    if group.size() == 1:
        return
    source = dist.get_global_rank(group, 0)
    for bucket in buckets_of(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        collectives.run(dist.broadcast, flat, source, group=group)
        copy_back(flat, bucket)
