"""What gates do once an optimizer step, outside the gradient."""

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def end_step(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Calls ``end_step(group)`` of every gate of ``model`` that has one (`fmoe.gates.SigmoidRouter`).

    Call it once an optimizer step, after the last backward pass of the step: before or after ``optimizer.step()``, but
    not once a micro batch.

    Args:
        group: the ranks that see different tokens of the batch, over which loads are summed; None for one process.
            Without it, ranks of a data parallel job would come to different biases.
    """
    for module in model.modules():
        # `record` too: other libraries may call something end_step.
        if hasattr(module, "end_step") and hasattr(module, "record"):
            module.end_step(group)


def skip_step(model: nn.Module) -> None:
    """In place of `end_step` for an optimizer step that is not made: what its micro batches counted is dropped."""
    for module in model.modules():
        if hasattr(module, "skip_step") and hasattr(module, "record"):
            module.skip_step()


def attach_end_step(optimizer: Optimizer, model: nn.Module, group: dist.ProcessGroup | None = None) -> RemovableHandle:
    """Has every ``optimizer.step()`` end with ``end_step(model, group)``.

    Returns:
        A handle whose ``remove()`` ends that. One optimizer a model: two would count a step twice.
    """
    return optimizer.register_step_post_hook(lambda *_: end_step(model, group))
