"""Pipeline stages of a model, and their schedules of micro batches."""

import contextlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config, get_model_type

from pretrain.config import ParallelConfig

Schedule = Callable[..., list[dict[str, Any]]]


def stages(parallel: ParallelConfig) -> list[dict[str, Any]]:
    """Return the keyword arguments of `pretrain.engine.model.build_model` for each chunk of the model on this rank."""
    if parallel.pipeline == 1:
        return [{}]
    numbers = [None] if parallel.model_chunks == 1 else range(parallel.model_chunks)
    return [
        {
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=number is None, vp_stage=number),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=number is None, vp_stage=number),
            "vp_stage": number,
        }
        for number in numbers
    ]


def get_schedule(parallel: ParallelConfig) -> Schedule:
    """Return the pipeline's schedule: Megatron-core's, or `fill_drain` for ``parallel.schedule=gpipe``."""
    schedule = get_forward_backward_func()
    if parallel.pipeline == 1 or parallel.schedule != "gpipe":
        return schedule

    def gpipe(*, forward_only: bool, **options: Any) -> list[dict[str, Any]]:
        # Without backward passes, the two schedules are the same.
        return schedule(forward_only=True, **options) if forward_only else fill_drain(**options)

    return gpipe


def fill_drain(
    *,
    forward_step_func: Callable,
    data_iterator: list,
    model: list[Any],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
) -> list[dict[str, Any]]:
    """Run GPipe's schedule (arXiv 1811.06965 section 2.2): all micro batches forward, then all backward.

    A stage holds the activations of all micro batches at once. The schedule is for comparison with 1F1B. Both give
    equal results, because backward passes run in the order of the micro batches here too.

    Returns:
        The loss function's results for each micro batch on the last stage; empty on the others.
    """
    (chunk,) = model
    (batches,) = data_iterator
    config = get_model_config(chunk)
    group = parallel_state.get_pipeline_model_parallel_group()
    link = P2PCommunicator(pp_group=group, config=config)
    is_first = group.rank() == 0
    is_last = group.rank() == group.size() - 1
    context = parallel_state.get_context_parallel_group()
    shapes = schedules.get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=None,
        config=config,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        cp_group=context,
    )
    forward = partial(schedules.forward_step, forward_step_func, batches, chunk, num_microbatches)
    backward = partial(schedules.backward_step, config=config)
    if "model_type" in inspect.signature(schedules.backward_step).parameters:  # up to megatron-core 0.16
        backward = partial(backward, model_type=get_model_type(chunk))
    results: list[dict[str, Any]] = []
    inputs = []
    outputs = []
    tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
    with chunk.no_sync() if config.no_sync_func is not None else contextlib.nullcontext():
        for number in range(num_microbatches):
            entering = link.recv_forward(shapes, is_first)
            leaving, count = forward(
                entering,
                results,
                config,
                cp_group_size=context.size(),
                current_microbatch=number,
                is_last_stage=is_last,
            )
            link.send_forward(leaving, is_last)
            inputs.append(entering)
            outputs.append(leaving)
            tokens += count
        for entering, leaving in zip(inputs[:-1], outputs[:-1], strict=True):
            link.send_backward(backward(entering, leaving, link.recv_backward(shapes, is_last)), is_first)
    # The backward pass of the last micro batch reduces gradients.
    link.send_backward(backward(inputs[-1], outputs[-1], link.recv_backward(shapes, is_last)), is_first)
    if config.finalize_model_grads_func is not None:
        config.finalize_model_grads_func([chunk], tokens if config.calculate_per_token_loss else None)
    return results
