"""Buckets of gradients: tensors that share one collective."""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.errors import UserError
from fmoe.runtime import collectives

_BUCKET_BYTES = 25 << 20  # as in torch's DDP: large enough for the bandwidth, small enough to start early


def buckets_of(tensors: Iterable[Tensor], max_bytes: int = _BUCKET_BYTES) -> list[list[Tensor]]:
    """Group adjacent tensors of one dtype and device into buckets of at most ``max_bytes``.

    A larger tensor gets its own bucket.
    """
    buckets: list[list[Tensor]] = []
    kind = None
    filled = 0
    for tensor in tensors:
        if (tensor.dtype, tensor.device) != kind or filled + tensor.nbytes > max_bytes:
            buckets.append([])
            kind = (tensor.dtype, tensor.device)
            filled = 0
        buckets[-1].append(tensor)
        filled += tensor.nbytes
    return buckets


def on_any_rank(flags: Iterable[bool], group: dist.ProcessGroup, device: torch.device | str) -> list[bool]:
    """Return for each flag whether it is True on any rank of the group. Collective; waits for the device."""
    on_any = torch.tensor(list(flags), dtype=torch.uint8, device=device)
    collectives.run(dist.all_reduce, on_any, dist.ReduceOp.MAX, group=group)
    return on_any.bool().tolist()


def refuse_difference(
    attribute: str, parameters: Mapping[str, Tensor], group: dist.ProcessGroup, device: torch.device | str
) -> None:
    """Raise if an attribute of a parameter differs between the ranks of the group. Collective.

    Args:
        attribute: a name such as "requires_grad", whose values are True and False.
        parameters: parameters by name, the same on all ranks of the group.
        device: device of the group's collectives.

    Raises:
        UserError: the attribute differs; raised on all ranks.
    """
    if not parameters or group.size() == 1:
        return
    values = [getattr(p, attribute) for p in parameters.values()]
    flags = on_any_rank(values + [not value for value in values], group, device)
    for name, is_true, is_false in zip(parameters, flags, flags[len(parameters) :], strict=False):
        if is_true and is_false:
            raise UserError(f"{attribute} of {name} differs between ranks: it must be equal on all that hold {name}")


def with_gradients(parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return the parameters that have a gradient on any rank of the group. Collective.

    A gradient that only other ranks have becomes zeros here.

    Args:
        parameters: parameters by name, the same on all ranks of the group.

    Raises:
        UserError: a parameter is frozen on some ranks of the group only; raised on all of them.
    """
    flags = [p.requires_grad and p.grad is not None for p in parameters.values()]
    if parameters and group.size() > 1:
        device = next(iter(parameters.values())).device
        refuse_difference("requires_grad", parameters, group, device)
        flags = on_any_rank(flags, group, device)
    trained = [p for p, has_gradient in zip(parameters.values(), flags, strict=True) if has_gradient]
    fill_gradients(trained)
    return trained


def fill_gradients(parameters: Iterable[Tensor]) -> None:
    """Set missing gradients to zeros."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


class Reduction:
    """Asynchronous sum of gradients over a group. Missing gradients become zeros.

    Construct it on every rank of the group, for the same parameters in the same order. Include the parameters of
    experts that got no tokens on this rank. A parameter that is frozen by now counts as zeros, and its gradient stays.
    """

    def __init__(self, parameters: list[Tensor], group: dist.ProcessGroup):
        fill_gradients(p for p in parameters if p.requires_grad)
        self._gradients = [
            p.grad if p.requires_grad and p.grad is not None else torch.zeros_like(p) for p in parameters
        ]
        self._is_copy = len(parameters) > 1 or not self._gradients[0].is_contiguous()
        self._sum = self._gradients[0].detach()
        if self._is_copy:
            self._sum = torch.cat([g.detach().reshape(-1) for g in self._gradients])
        self._work = None
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
