"""Stand-ins, over gloo, for what ``exchange="deepep"`` and ``"symmetric"`` call on GPUs: with the same signatures and
results, and the restrictions of the real ones as assertions. Not a test itself.

Shape letters: those of `fmoe.exchange.base`.
"""

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist

from fmoe.exchange import deepep, symmetric

sent = {"bytes": 0, "calls": 0}  # what this rank sent to others through a stand-in


def all_to_all(parts, group, likes):
    """Exchange a list of tensors, one for each rank, whose lengths only the sender knows."""
    counts = torch.tensor([len(p) for p in parts])
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    joined = torch.cat([p.contiguous() for p in parts])
    out = joined.new_empty(int(received.sum()), *likes)
    dist.all_to_all_single(out, joined, received.tolist(), counts.tolist(), group=group)
    sent["bytes"] += sum(p.nbytes for rank, p in enumerate(parts) if rank != group.rank())
    return list(out.split(received.tolist()))


class Config:
    """As ``deep_ep.Config``: a buffer for each rank."""

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 0


class Buffer:
    """As ``deep_ep.Buffer``, between the GPUs of a node."""

    num_sms = 20
    dtypes = (torch.bfloat16,)

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0):
        assert num_nvl_bytes > 0
        self.group = group
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes

    @staticmethod
    def set_num_sms(num_sms):
        assert num_sms % 2 == 0
        Buffer.num_sms = num_sms

    @staticmethod
    def get_dispatch_config(num_ranks):
        assert num_ranks in (2, 4, 8, 16, 24, 32, 64, 128, 144, 160), f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        ranks = self.group.size()
        assert topk_idx.dim() == 2 and topk_idx.is_contiguous() and topk_idx.dtype == torch.int64
        assert topk_idx.shape[1] <= 32 and num_experts % ranks == 0 and (topk_idx < num_experts).all()
        rank_TK = torch.where(topk_idx >= 0, topk_idx // (num_experts // ranks), -1)
        is_in = torch.stack([(rank_TK == rank).any(1) for rank in range(ranks)], 1)
        per_expert = (topk_idx[topk_idx >= 0]).bincount(minlength=num_experts).int()
        return is_in.sum(0).int(), None, per_expert, is_in, SimpleNamespace()

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
    ):
        self._check(x)
        width = x.shape[1]
        if handle is not None:
            assert topk_idx is None and topk_weights is None and len(x) == handle.num_tokens
            return torch.cat(all_to_all([x[t] for t in handle.tokens], self.group, (width,))), *[None] * 5
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        assert len(x) == len(topk_idx) and topk_weights.shape == topk_idx.shape
        assert all(t.dtype == torch.int32 for t in (num_tokens_per_rank, num_tokens_per_expert))
        local = len(num_tokens_per_expert) // self.group.size()
        tokens = [is_token_in_rank[:, rank].nonzero().squeeze(1) for rank in range(self.group.size())]
        assert num_tokens_per_rank.tolist() == [len(t) for t in tokens]
        experts = []
        weights = []
        for rank, rows in enumerate(tokens):
            expert = topk_idx[rows] - rank * local
            is_here = (topk_idx[rows] >= 0) & (expert >= 0) & (expert < local)
            experts.append(torch.where(is_here, expert, -1))
            weights.append(torch.where(is_here, topk_weights[rows], 0))
        received = all_to_all([x[t] for t in tokens], self.group, (width,))
        expert = torch.cat(all_to_all(experts, self.group, topk_idx.shape[1:]))
        weight = torch.cat(all_to_all(weights, self.group, topk_idx.shape[1:]))
        handle = SimpleNamespace(num_tokens=len(x), tokens=tokens, counts=[len(r) for r in received])
        counts = expert[expert >= 0].bincount(minlength=local).tolist()
        return torch.cat(received), expert, weight, counts, handle, SimpleNamespace()

    def combine(self, x, handle, topk_weights=None):
        self._check(x)
        assert x.dtype in self.dtypes and len(x) == sum(handle.counts)
        total = torch.zeros(handle.num_tokens, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
        for tokens, rows in zip(
            handle.tokens, all_to_all(list(x.split(handle.counts)), self.group, x.shape[1:]), strict=True
        ):
            total.index_add_(0, tokens, rows.to(total.dtype))
        weights = None
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32 and len(topk_weights) == len(x)
            weights = torch.zeros(handle.num_tokens, topk_weights.shape[1])
            parts = all_to_all(list(topk_weights.split(handle.counts)), self.group, topk_weights.shape[1:])
            for tokens, rows in zip(handle.tokens, parts, strict=True):
                weights.index_add_(0, tokens, rows)
        return total.to(x.dtype), weights, SimpleNamespace()

    def _check(self, x):
        sent["calls"] += 1
        assert x.dim() == 2 and x.is_contiguous() and x.dtype in self.dtypes and x.shape[1] * 2 % 32 == 0
        assert self.num_nvl_bytes >= x.shape[1] * 2 * self.group.size(), "the buffer is too small"


class SymmetricMemory:
    """As ``torch.distributed._symmetric_memory`` and ``torch.ops.symm_mem`` with NVSHMEM.

    torch's own schemas of the two operations hold, which are registered here for the CPU.
    """

    def __init__(self):
        self.storages = {}
        self.is_fenced = True
        self.library = torch.library.Library("symm_mem", "IMPL")
        self.library.impl("all_to_all_vdev_2d", self.there, "CPU")
        self.library.impl("all_to_all_vdev_2d_offset", self.back, "CPU")

    def empty(self, group, shape, dtype, device):
        self.agree(group, (shape, dtype))
        made = torch.empty(shape, dtype=dtype, device=device)
        made.view(-1).view(torch.uint8).fill_(0xFF)  # NaN, and -1
        self.storages[made.untyped_storage().data_ptr()] = made
        return made

    def fence(self, group, device, for_host=False):
        self.is_fenced = True
        return REAL_FENCE(group, device, for_host)

    def agree(self, group, value):
        everyone = [None] * group.size()
        dist.all_gather_object(everyone, value, group=group)
        assert everyone == [value] * group.size(), everyone

    def check(self, given, taken, splits, found, name):
        group = dist.distributed_c10d._resolve_process_group(name)
        assert all(t.untyped_storage().data_ptr() in self.storages for t in (given, taken, splits, found))
        assert given.dtype == taken.dtype and given.shape[1:] == taken.shape[1:] and splits.dtype == torch.int64
        assert all(t.is_contiguous() for t in (given, taken, splits, found)) and found.shape == (2, splits.shape[-1])
        self.agree(group, (tuple(given.shape), tuple(taken.shape), given.dtype, tuple(splits.shape)))
        assert self.is_fenced, "buffers are used again before all ranks are here"
        self.is_fenced = False
        sent["calls"] += 1
        taken.view(-1).view(torch.uint8).fill_(0xFF)
        return group

    def there(self, given, taken, splits, found, group_name, major_align=None):
        group = self.check(given, taken, splits, found, group_name)
        ranks = group.size()
        local = len(splits) // group.size()
        parts = given[: splits.sum()].split(splits.view(ranks, local).sum(1).tolist())
        received = torch.empty_like(splits)
        dist.all_to_all_single(received, splits, group=group)
        segments = [
            rows.split(counts.tolist())
            for rows, counts in zip(all_to_all(parts, group, given.shape[1:]), received.view(ranks, local), strict=True)
        ]
        self.place([segments[rank][expert] for expert in range(local) for rank in range(ranks)], taken, found)

    def back(self, given, taken, splits, found, group_name):
        group = self.check(given, taken, splits, found, group_name)
        ranks = group.size()
        local = splits.shape[1] // group.size()
        segments = [given[at : at + n] for n, at in splits.t().tolist()]  # by expert and then by rank
        parts = [torch.cat(segments[rank::ranks]) for rank in range(ranks)]
        counts = splits[0].view(local, ranks).t().contiguous()
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        rows = all_to_all(parts, group, given.shape[1:])
        found_parts = [p for r, n in zip(rows, received.tolist(), strict=True) for p in r.split(n)]
        self.place(found_parts, taken, found)

    def place(self, segments, taken, found):
        rows = torch.cat(segments)
        assert len(rows) <= len(taken), "the buffer is too small"
        taken[: len(rows)] = rows
        found[0] = torch.tensor([len(s) for s in segments])
        found[1] = found[0].cumsum(0) - found[0]


REAL_FENCE = symmetric.fence
_memory: list[SymmetricMemory] = []  # one per process: an operation is registered once


@contextlib.contextmanager
def installed(dtype=torch.bfloat16):
    """Both libraries on this rank.

    Args:
        dtype: what DeepEP sends: another dtype than bfloat16, which the real one takes alone, compares exactly.
    """
    if not _memory:
        _memory.append(SymmetricMemory())
    memory = _memory[0]
    package = ModuleType("deep_ep")
    package.Buffer = type("Buffer", (Buffer,), {"dtypes": (dtype,)})
    was = sys.modules.get("deep_ep"), symmetric.why, symmetric.empty, symmetric.fence, deepep.SENT
    sys.modules["deep_ep"] = package
    symmetric.why = lambda: None
    symmetric.empty = memory.empty
    symmetric.fence = memory.fence
    deepep.SENT = dtype
    sent.update(bytes=0, calls=0)
    try:
        yield sent
    finally:
        sys.modules["deep_ep"], symmetric.why, symmetric.empty, symmetric.fence, deepep.SENT = was
        symmetric._workspaces.clear()
        deepep._buffers.clear()


def with_libraries(dtype, function, *args):
    """Call a function of a rank with the stand-ins."""
    with installed(dtype):
        return function(*args)
