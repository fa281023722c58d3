"""Gradients of a model whose experts are spread over workers.

Dense parameters are replicated on all ranks of the data parallel group. An expert lives on the ranks of its expert
data parallel group alone (one rank, if expert parallelism spans the data parallel group) and its gradient there already
holds the tokens of every rank that sent it some. A mean over the data parallel group is then the sum over the expert
data parallel group, divided by the size of the whole data parallel group.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_expert(parameter: Tensor) -> bool:
    """Whether the parameter belongs to an expert, and so is not replicated over the data parallel group."""
    return not getattr(parameter, "allreduce", True)


def average_gradients(
    model: nn.Module, group: dist.ProcessGroup, expert_data_group: dist.ProcessGroup | None = None
) -> None:
    """Turns each rank's gradients (of a mean over its own tokens) into those of the mean over all ranks' tokens.

    Args:
        group: the data parallel group.
        expert_data_group: ranks that hold the same experts; None if no two do.
    """
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        reduce_over = expert_data_group if is_expert(parameter) else group
        if reduce_over is not None and reduce_over.size() > 1:
            dist.all_reduce(parameter.grad, group=reduce_over)
        parameter.grad.div_(group.size())


@torch.no_grad()
def grad_norm(parameters: Iterable[Tensor], moe_group: dist.ProcessGroup | None = None) -> Tensor:
    """2-norm of the gradients of the whole model: dense parameters once, every expert once.

    Args:
        moe_group: the expert parallel group, over which the squares of expert gradients are summed.
    """
    gradients = [(is_expert(p), p.grad) for p in parameters if p.grad is not None]
    device = gradients[0][1].device if gradients else torch.device("cpu")

    def squares(expert: bool) -> Tensor:
        norms = [g.norm(dtype=torch.promote_types(g.dtype, torch.float32)) for e, g in gradients if e == expert]
        return torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)

    expert_squares = squares(True)
    if moe_group is not None and moe_group.size() > 1:
        dist.all_reduce(expert_squares, group=moe_group)
    return (squares(False) + expert_squares).sqrt()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, moe_group: dist.ProcessGroup | None = None
) -> Tensor:
    """Scales all gradients so that `grad_norm` is at most ``max_norm``; returns the norm before."""
    parameters = list(parameters)
    norm = grad_norm(parameters, moe_group)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    return norm
