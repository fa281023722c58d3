"""Rare synchronization (``parallel.sync_every``): local steps, then an average of the parameters over ranks.

1. Each data parallel rank keeps its own gradients, and makes optimizer steps of its own.
2. At the end of a period, and of the run, ranks average how far they have moved. Experts are averaged over the ranks
   that hold them.
3. An outer optimizer moves the common parameters of the last average by this mean, and all ranks go on from there: by
   exactly this mean (local SGD, arXiv 1805.09767), or with Nesterov momentum (DiLoCo, arXiv 2311.08105).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from fmoe.parallel.buckets import buckets_of, copy_back
from fmoe.parallel.compression import Bucket, Compressor, Memory, Numbers, average
from fmoe.parallel.gradients import is_expert
from megatron_patch.optimizer import Shard, shards
from pretrain.config import Recipe

_LONGEST = 16  # periods of adaptive synchronization are at most so many times as long


class OwnGradients(Compressor):
    """A reduction that leaves each rank its own gradients, after a warm-up in which they are averaged."""

    def reduce(self, bucket: Bucket) -> None:
        pass


class RareSync:
    """Averages of the parameters of an engine without sharding.

    Attributes:
        last: number of steps at the end of which the parameters were last equal on all ranks.
        period: number of steps from then to the next average.
        first: loss and learning rate of the first average after the warmup of the learning rate, for adaptive periods.
    """

    def __init__(self, recipe: Recipe, optimizer: Any):
        options = recipe.parallel
        self._options = options
        self._steps = recipe.train.steps
        self._warmup_steps = recipe.warmup_steps
        self.last = 0
        self.period = options.sync_every
        self.first: tuple[float, float] | None = None
        self._pairs = [(shard.main.detach().clone(), shard) for shard in shards(optimizer)]  # common parameters
        is_nesterov = options.sync_outer == "nesterov"
        momentum = options.sync_momentum if is_nesterov else 0.0
        lr = options.sync_lr if is_nesterov else 1.0
        self._outer = torch.optim.SGD(
            [base for base, _ in self._pairs], lr=lr, momentum=momentum, nesterov=momentum > 0
        )

    @torch.no_grad()
    def step(self, step: int, loss: float, lr: float) -> None:
        """End step number ``step``, counted from 0: average the parameters if the period is over. Collective.

        Args:
            loss: loss of the step, equal on all ranks.
            lr: learning rate of the step.
        """
        done = step + 1
        if done < self._options.sync_warmup:
            self.last = done
            return
        if done == self._options.sync_warmup:
            self.restart(done)
            return
        is_due = done >= self.last + self.period if self._options.sync_adaptive else done % self.period == 0
        if not is_due and done != self._steps:
            return
        for for_experts in (False, True):
            pairs = [(base, shard.main) for base, shard in self._pairs if is_expert(shard.parameter) == for_experts]
            _average_changes(pairs, _group(for_experts))
        self._outer.step()
        self._outer.zero_grad()
        for base, shard in self._pairs:
            shard.main.copy_(base)
            if shard.main is not shard.parameter:
                shard.parameter.copy_(base.view(shard.parameter.shape))
        self.last = done
        if self._options.sync_adaptive and math.isfinite(loss) and lr > 0 and done > self._warmup_steps:
            self.first = self.first or (loss, lr)
            factor = math.sqrt(loss / self.first[0] * self.first[1] / lr)
            self.period = math.ceil(self._options.sync_every * min(factor, _LONGEST))

    @torch.no_grad()
    def restart(self, done: int) -> None:
        """Take the parameters after ``done`` steps, equal on all ranks, as the common ones."""
        self.last = done
        for base, shard in self._pairs:
            base.copy_(shard.main)

    def memories(self) -> Iterator[Memory]:
        """Yield the common parameters of the last average, and the outer momentum."""
        for base, shard in self._pairs:
            is_saved = group_of(shard).rank() == 0
            yield Memory("base", shard.parameter, 0, base.view(-1), is_shared=True, is_saved=is_saved)
            if self._outer.defaults["momentum"]:
                momentum = self._outer.state[base].setdefault("momentum_buffer", torch.zeros_like(base))
                yield Memory("momentum", shard.parameter, 0, momentum.view(-1), is_shared=True, is_saved=is_saved)

    def numbers(self) -> Numbers:
        """Return the rest of the state, for `set_numbers`."""
        return {"last": self.last, "period": self.period, "first": self.first}

    def set_numbers(self, numbers: Numbers) -> None:
        """Restore the result of `numbers`. The period is the recipe's, unless it is adaptive."""
        self.last = numbers["last"]
        if self._options.sync_adaptive:
            self.period = numbers["period"]
            self.first = numbers["first"]


def group_of(shard: Shard) -> dist.ProcessGroup:
    """Return the ranks that keep different values of a shard between averages."""
    return _group(is_expert(shard.parameter))


def _group(for_experts: bool) -> dist.ProcessGroup:
    if for_experts:
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _average_changes(pairs: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup) -> None:
    """Set the gradient of each base to the mean of base minus present value over the ranks of a group. Collective."""
    changes = []
    for base, main in pairs:
        base.grad = base - main
        changes.append(base.grad)
    if group.size() == 1:
        return
    for bucket in buckets_of(changes):
        flat = torch.cat([change.view(-1) for change in bucket])
        average(flat, group)
        copy_back(flat, bucket)
