"""Pipeline stages of a model, and their schedules of micro batches."""

import contextlib
import inspect
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.utils import get_model_config, get_model_type
from torch import Tensor

from fmoe.runtime.deferral import WeightGradients, backward_inputs
from pretrain.config import ParallelConfig

Results = list[dict[str, Any]]  # of the loss function, for each micro batch
Schedule = Callable[..., Results]


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
    """Return the pipeline's schedule: Megatron-core's, or the one of `SCHEDULES` that ``parallel.schedule`` names."""
    schedule = get_forward_backward_func()
    if parallel.pipeline == 1 or parallel.schedule not in SCHEDULES:
        return schedule

    def chosen(*, forward_only: bool, **options: Any) -> Results:
        # Without backward passes, all schedules are the same.
        return schedule(forward_only=True, **options) if forward_only else SCHEDULES[parallel.schedule](**options)

    return chosen


class _Stage:
    """A pipeline stage with one chunk of the model: passes of micro batches, and messages to neighboring stages.

    Args:
        options: arguments of Megatron-core's schedules.

    Attributes:
        previous, next: ranks of the neighboring stages; None for no stage.
        results: the loss function's results for each micro batch on the last stage; empty on the others.
    """

    def __init__(
        self,
        *,
        forward_step_func: Callable,
        data_iterator: list,
        model: list[Any],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
    ):
        (self._chunk,) = model
        (batches,) = data_iterator
        self.config = get_model_config(self._chunk)
        self._group = parallel_state.get_pipeline_model_parallel_group()
        ranks = dist.get_process_group_ranks(self._group)
        self.number = self._group.rank()
        self.num_stages = len(ranks)
        self.previous = ranks[self.number - 1] if self.number else None
        self.next = ranks[self.number + 1] if self.number + 1 < self.num_stages else None
        self.count = num_microbatches
        context = parallel_state.get_context_parallel_group()
        (self._shape,) = schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=None,
            config=self.config,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            cp_group=context,
        )
        self.results: Results = []
        self._forward = partial(
            schedules.forward_step,
            forward_step_func,
            batches,
            self._chunk,
            num_microbatches,
            forward_data_store=self.results,
            config=self.config,
            cp_group_size=context.size(),
            is_last_stage=self.next is None,
        )
        self._backward = partial(schedules.backward_step, config=self.config)
        if "model_type" in inspect.signature(schedules.backward_step).parameters:  # up to megatron-core 0.16
            self._backward = partial(self._backward, model_type=get_model_type(self._chunk))
        self._tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
        self._activations: deque[tuple[Any, Tensor]] = deque()
        self._requests: list[Any] = []

    def exchange(self, rank: int | None, outgoing: Tensor | None, receives: bool) -> Callable[[], Tensor | None]:
        """Start to send a tensor to a neighbor, if it is not None, and to receive one from it.

        Returns:
            Function that waits for the received tensor.
        """
        if rank is None:
            return lambda: None
        messages = []
        received = None
        if outgoing is not None:
            messages.append(dist.P2POp(dist.isend, outgoing, rank, self._group))
        if receives:
            options = {"dtype": self.config.pipeline_dtype, "device": torch.cuda.current_device()}
            received = torch.empty(self._shape, requires_grad=True, **options)
            messages.append(dist.P2POp(dist.irecv, received, rank, self._group))
        # Together, as NCCL blocks if two ranks first send to each other.
        requests = dist.batch_isend_irecv(messages) if messages else []
        if not receives:
            self._requests += requests

        def wait() -> Tensor | None:
            for request in requests if receives else ():
                request.wait()
            return received

        return wait

    def forward(self, number: int, entering: Tensor | None) -> Tensor:
        """Run the forward pass of micro batch ``number``, and keep its activations."""
        leaving, count = self._forward(input_tensor=entering, current_microbatch=number)
        self._tokens += count
        self._activations.append((entering, leaving))
        return leaving

    def backward(self, number: int, grad: Tensor | None) -> Tensor | None:
        """Run the backward pass of micro batch ``number``, the oldest; return the gradient of its input."""
        with self.reduction(number):
            return self._backward(*self._activations.popleft(), grad)

    def backward_inputs(self, number: int, grad: Tensor | None) -> tuple[Tensor | None, WeightGradients]:
        """Run `backward` without gradients of large weights; also return these, to be computed."""
        entering, leaving = self._activations.popleft()
        if grad is None and self.config.grad_scale_func is not None:
            leaving = self.config.grad_scale_func(leaving)
        with self.reduction(number):
            remaining = backward_inputs(leaving, grad)
        return entering.grad, remaining

    def reduction(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which only the gradients of the last micro batch are reduced over ranks."""
        is_last = number == self.count - 1
        return contextlib.nullcontext() if is_last or self.config.no_sync_func is None else self._chunk.no_sync()

    def finish(self) -> Results:
        """Wait for messages, reduce gradients, and return `results`."""
        for request in self._requests:
            request.wait()
        if self.config.finalize_model_grads_func is not None:
            tokens = self._tokens if self.config.calculate_per_token_loss else None
            self.config.finalize_model_grads_func([self._chunk], tokens)
        return self.results


def fill_drain(**options: Any) -> Results:
    """Run GPipe's schedule (arXiv 1811.06965 section 2.2): all micro batches forward, then all backward.

    A stage holds the activations of all micro batches at once. The schedule is for comparison with 1F1B. Both give
    equal results, because backward passes run in the order of the micro batches here too.

    Args:
        options: arguments of Megatron-core's schedules, as for `_Stage`.

    Returns:
        The loss function's results for each micro batch on the last stage; empty on the others.
    """
    stage = _Stage(**options)
    for number in range(stage.count):
        entering = stage.exchange(stage.previous, None, True)()
        stage.exchange(stage.next, stage.forward(number, entering), False)
    for number in range(stage.count):
        grad = stage.exchange(stage.next, None, True)()
        stage.exchange(stage.previous, stage.backward(number, grad), False)
    return stage.finish()


def zero_bubble(**options: Any) -> Results:
    """Run the schedule ZB-H1 (arXiv 2401.10241 section 2.3): 1F1B with weight gradients in the bubble.

    Forward passes F and backward passes B run in the order of 1F1B. B computes the gradient that the previous stage
    waits for. A third pass W computes the gradients of large weights; stage s runs it s micro batches later. Every
    stage then holds activations, or operands of W, of as many micro batches as the first stage does on 1F1B.

    Arguments and result are those of `fill_drain`.
    """
    stage = _Stage(**options)
    ahead = min(stage.num_stages - stage.number - 1, stage.count)  # forward passes before the first backward pass
    weights: deque[WeightGradients] = deque()
    entering = stage.exchange(stage.previous, None, True)
    for number in range(stage.count + ahead):
        leaving = stage.forward(number, entering()) if number < stage.count else None
        oldest = number - ahead
        grad = stage.exchange(stage.next, leaving, oldest >= 0)
        d_entering = None
        if oldest >= 0 and stage.previous is None:  # no stage waits for it
            stage.backward(oldest, grad())
        elif oldest >= 0:
            d_entering, remaining = stage.backward_inputs(oldest, grad())
            weights.append(remaining)
        entering = stage.exchange(stage.previous, d_entering, number + 1 < stage.count)
        if len(weights) > stage.number:
            with stage.reduction(oldest - stage.number):
                weights.popleft().run()
    while weights:
        with stage.reduction(stage.count - len(weights)):
            weights.popleft().run()
    return stage.finish()


SCHEDULES: dict[str, Schedule] = {"gpipe": fill_drain, "zero_bubble": zero_bubble}
