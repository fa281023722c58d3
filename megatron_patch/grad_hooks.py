"""Reductions of gradients over data parallel ranks in place of those of Megatron-core's DDP.

Megatron's DDP keeps gradients in flat float32 buffers. When the gradients of a bucket group are complete, it calls the
group's methods ``start_grad_sync`` and ``finish_grad_sync``, which `compress_gradients` and `reduce_in` replace.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from fmoe.parallel.compression import Compressor
from fmoe.runtime import collectives


class MegatronBucket:
    """A bucket of Megatron's DDP with the methods of torch's ``dist.GradBucket``."""

    def __init__(self, bucket: Any, index: int):
        self._bucket = bucket
        self._index = index
        self._is_last = False

    def buffer(self) -> Tensor:
        return self._bucket.grad_data

    def gradients(self) -> list[Tensor]:
        return [parameter.main_grad for parameter in self._bucket.params_list]

    def parameters(self) -> list[Tensor]:
        return list(self._bucket.params_list)

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def scale(self, ranks: int) -> None:
        """Scale the gradients so that their mean over ``ranks`` is what Megatron's reduction would give."""
        self._bucket.grad_data.mul_(self._bucket.gradient_scaling_factor * ranks)


def compress_gradients(chunks: Sequence[DistributedDataParallel], dense: Compressor, experts: Compressor) -> None:
    """Let compressors reduce the gradients of a rank's chunks.

    Args:
        chunks: chunks without a distributed optimizer and without overlapped reductions.
        dense: compressor over the data parallel ranks.
        experts: compressor over the ranks that hold the same experts.
    """
    for compressor, groups in ((dense, _groups(chunks, "")), (experts, _groups(chunks, "expert_parallel_"))):
        buckets: list[MegatronBucket] = []
        for group in groups:
            of_group = [MegatronBucket(bucket, len(buckets) + n) for n, bucket in enumerate(group.buckets)]
            buckets += of_group
            reduce = functools.partial(_compress, of_group, compressor)
            group.start_grad_sync = reduce
            group.finish_grad_sync = reduce
        if compressor.group.size() > 1:
            for bucket in buckets:
                compressor.allocate(bucket)
        for bucket in buckets[-1:]:
            bucket._is_last = True


def _groups(chunks: Sequence[DistributedDataParallel], kind: str) -> Iterator[Any]:
    """Yield bucket groups in the order in which they are reduced."""
    for chunk in chunks:
        yield from getattr(chunk, f"{kind}bucket_groups")


def _compress(buckets: list[MegatronBucket], compressor: Compressor, force_all_reduce: bool = False) -> None:
    for bucket in buckets:
        bucket.scale(compressor.group.size())
        compressor(bucket)


def reduce_in(chunks: Sequence[DistributedDataParallel], dtype: torch.dtype) -> None:
    """Reduce the gradients of a rank's chunks in ``dtype``. They are accumulated in float32."""
    for kind in ("", "expert_parallel_"):
        for group in _groups(chunks, kind):
            reduction = _CastReduction(group, dtype)
            group.start_grad_sync = reduction.start
            group.finish_grad_sync = reduction.finish


class _CastReduction:
    """Reduction of a bucket group in another dtype: an all-reduce; with a distributed optimizer, a reduce-scatter."""

    def __init__(self, group: Any, dtype: torch.dtype):
        self._group = group
        self._dtype = dtype
        self._pending: list[tuple[collectives.Started, Tensor, Tensor]] = []

    def start(self, force_all_reduce: bool = False) -> None:
        group = self._group
        if self._pending:  # the first step's, as in Megatron's method
            return
        for bucket in group.buckets:
            sent = bucket.grad_data.mul(bucket.gradient_scaling_factor).to(self._dtype)
            if group.ddp_config.use_distributed_optimizer and not force_all_reduce:
                ranks = group.intra_distributed_optimizer_instance_group
                target = bucket.grad_data.view(ranks.size(), -1)[ranks.rank()]
                received = torch.empty_like(target, dtype=self._dtype)
                started = collectives.start(dist.reduce_scatter_tensor, received, sent, group=ranks)
            else:
                target = bucket.grad_data
                received = sent
                started = collectives.start(dist.all_reduce, received, group=group.data_parallel_group)
            self._pending.append((started, received, target))

    def finish(self, force_all_reduce: bool = False) -> None:
        group = self._group
        group.param_gather_dispatched = False
        if not self._pending:
            self.start(force_all_reduce)
        for started, received, target in self._pending:
            started.wait()
            target.copy_(received)
        self._pending = []
