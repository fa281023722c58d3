"""Forward passes of a model that is split over ranks: pipeline stages, and slices of the vocabulary."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn


def run_stages(model: nn.Module, forward: Callable[[Any], Tensor], tokens_NS: Tensor, vocab_size: int) -> Tensor | None:
    """Run a batch through all pipeline stages, in the schedule of training.

    Args:
        model: the stage of this rank, which may be wrapped for training.
        forward: function that runs the stage, given ``model``; on the last stage it returns logits.

    Returns:
        The logits of the whole vocabulary [N, S, vocabulary] on the last stage; None on the others.
    """
    outputs = get_forward_backward_func()(
        forward_step_func=lambda _, stage: (forward(stage), lambda logits, non_loss_data: logits),
        data_iterator=None,
        model=[model],
        num_microbatches=1,  # stages run different batches at a time, because no call waits for the last stage
        seq_length=tokens_NS.shape[1],
        micro_batch_size=tokens_NS.shape[0],
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not outputs:
        return None
    # The output layer may have gathered the slices of tensor parallel ranks itself.
    is_whole = outputs[0].shape[-1] == vocab_size
    return outputs[0] if is_whole else gather_from_tensor_model_parallel_region(outputs[0])


def next_logits(model: Any, tokens_NS: Tensor, forward: Callable[[Any], Tensor]) -> Tensor:
    """Return the logits of the token after ``tokens_NS``, float32 [N, V], equal on every rank. Collective.

    Args:
        model, forward: as for `run_stages`.
    """
    vocab_size = get_attr_wrapped_model(model, "vocab_size")
    logits_NSV = run_stages(model, forward, tokens_NS, vocab_size)
    if logits_NSV is None:
        logits_NV = torch.empty(len(tokens_NS), vocab_size, dtype=torch.float32, device=tokens_NS.device)
    else:
        logits_NV = logits_NSV[:, -1].float().contiguous()
    size = dist.get_world_size()
    if size > 1:  # ranks with the same tokens may differ in the last bits, and would draw different ones
        first_of_last_stage = size - size // parallel_state.get_pipeline_model_parallel_world_size()
        dist.broadcast(logits_NV, first_of_last_stage)
    return logits_NV
