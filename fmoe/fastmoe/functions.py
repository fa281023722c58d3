"""FastMoE's dispatch functions, for user code that builds layers and gates from them.

Ranks communicate over the group that `ensure_comm` set last, or else over all processes. Counts are int64. Rank w owns
the experts w * num_expert ... (w + 1) * num_expert - 1.

Shape letters: T tokens, K choices, D width, L experts per rank, W ranks, M choices other than -1, R rows that this
rank's experts get.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.errors import UserError
from fmoe.exchange.all_to_all import hop_counts
from fmoe.exchange.collectives import all_to_all
from fmoe.exchange.hops import AllToAll, Hop
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import Routing
from fmoe.runtime import collectives
from fmoe.shards import gather_slices, slice_bounds, take_slice


def get_torch_default_comm() -> dist.ProcessGroup:
    """Return the group of all processes.

    Raises:
        UserError: torch.distributed is not initialized.
    """
    if not dist.is_initialized():
        raise UserError("torch.distributed is not initialized: call torch.distributed.init_process_group first")
    return dist.distributed_c10d._get_default_group()


def get_rank_0_in_comm(comm: dist.ProcessGroup) -> int:
    """Return the global rank of the group's first process."""
    return dist.get_global_rank(comm, 0)


_moe_group: dist.ProcessGroup | None = None


def ensure_comm(t: Tensor | None, comm: dist.ProcessGroup | None) -> None:
    """Set the group over which the functions of this module communicate; None for all processes. ``t`` is ignored."""
    global _moe_group
    _moe_group = get_torch_default_comm() if comm is None else comm


def get_moe_group() -> dist.ProcessGroup | None:
    """Return the group that `ensure_comm` set last; None before the first call."""
    return _moe_group


def exchange_counts(counts: Tensor, world_size: int) -> Tensor:
    """Send an equal part of ``counts`` to each of W ranks; return the parts received, in order of ranks."""
    if world_size == 1:
        return counts
    return all_to_all(moe_group_of(world_size), counts, what="a gate's exchange of counts").wait(for_host=True)


@torch.no_grad()
def count_by_gate(
    gate: Tensor, num_expert: int, world_size: int, require_pos: bool = True
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Sort the choices in ``gate`` by expert, and count them.

    Args:
        gate: int64 [T] or [T, K], ids among the ``num_expert * world_size`` experts; -1 for no choice.

    Returns:
        ``pos`` [M], indices into ``gate.view(-1)``, sorted by expert and then by index; None without ``require_pos``;
        ``local_expert_count`` [W * L], the number of this rank's choices of each expert;
        ``global_expert_count`` [W * L], the number of each rank's choices of each of this rank's experts.
    """
    choices_N1 = gate.reshape(-1, 1).long()
    plan = DispatchPlan.from_routing(Routing(choices_N1, choices_N1), num_expert * world_size)
    pos = plan.perm_N[: int(plan.count_E.sum())] if require_pos else None
    return pos, plan.count_E, exchange_counts(plan.count_E, world_size)


@torch.no_grad()
def prepare_forward(gate: Tensor, num_expert: int, world_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Return the results of `count_by_gate`, and the numbers of rows that this rank gets.

    Returns:
        ``pos``; ``local_expert_count`` and ``global_expert_count``, on the host; the number of rows of each of this
        rank's experts [L]; the sum of these numbers.
    """
    pos: Any
    pos, local_expert_count, global_expert_count = count_by_gate(gate, num_expert, world_size)
    sent, received = torch.stack([local_expert_count, global_expert_count]).cpu()
    fwd_expert_count = received.view(world_size, num_expert).sum(0)
    return pos, sent, received, fwd_expert_count, int(fwd_expert_count.sum())


def _local_scatter(inp: Tensor, pos: Tensor) -> Tensor:
    return inp.index_select(0, pos)


def _local_gather(inp: Tensor, pos: Tensor, out_batch_size: int, maybe_overlap: bool = True) -> Tensor:
    """Write rows at the indices ``pos`` of a tensor of zeros; with ``maybe_overlap``, rows of equal index add up."""
    out = inp.new_zeros(out_batch_size, *inp.shape[1:])
    return out.index_add(0, pos, inp) if maybe_overlap else out.index_copy(0, pos, inp)


class MOEScatter:
    """Namespace of `MOEScatter.apply`, which sends tokens to the ranks of their experts."""

    @staticmethod
    def apply(
        inp: Tensor,
        pos: Tensor,
        local_expert_count: Tensor,
        global_expert_count: Tensor,
        fwd_batch_size: int,
        world_size: int,
    ) -> Tensor:
        """Send tokens [T, D] to the ranks of their experts; return the rows [R, D] of this rank, sorted by expert.

        Args:
            pos: [M], the token of each choice, sorted by expert.
            fwd_batch_size: ignored.
        """
        rows_MD = _local_scatter(inp, pos)
        if world_size == 1:
            return rows_MD
        hop = _hop(local_expert_count, global_expert_count, world_size, inp.device)
        return AllToAll.apply(rows_MD, hop, False)


class MOEGather:
    """Namespace of `MOEGather.apply`, which sends rows back to the ranks of their tokens."""

    @staticmethod
    def apply(
        global_output_buf: Tensor,
        pos: Tensor,
        local_expert_count: Tensor,
        global_expert_count: Tensor,
        local_batch_size: int,
        world_size: int,
    ) -> Tensor:
        """Send rows [R, D] back to the ranks of their tokens; return this rank's rows, [local_batch_size, D].

        Args:
            pos: [M], the index in the result at which each choice's row is written; other rows are zero.
        """
        rows = global_output_buf
        if world_size > 1:
            hop = _hop(local_expert_count, global_expert_count, world_size, rows.device)
            rows = AllToAll.apply(rows, hop, True)
        return _local_gather(rows, pos, local_batch_size, maybe_overlap=False)


class AllGather:
    """Namespace of `AllGather.apply`, the inverse of `Slice.apply`."""

    @staticmethod
    def apply(inp: Tensor, rank: int, world_size: int, group: dist.ProcessGroup | None) -> Tensor:
        """Return the concatenated slices of all ranks of ``group``.

        Args:
            inp: this rank's slice.
            rank: this rank's index in the group.

        Raises:
            UserError: the slices do not have the lengths that `Slice` returns.
        """
        if world_size == 1:
            return inp
        group = get_torch_default_comm() if group is None else group
        gathered = [torch.zeros(1, dtype=torch.int64, device=inp.device) for _ in range(world_size)]
        collectives.run(dist.all_gather, gathered, gathered[rank].new_tensor([inp.shape[0]]), group=group)
        lengths = torch.cat(gathered).tolist()
        bounds = [slice_bounds(sum(lengths), part, world_size) for part in range(world_size)]
        if lengths != [end - begin for begin, end in bounds]:
            raise UserError(
                f"AllGather got {lengths} rows: pass equally many on every rank, or the rows that Slice returned"
            )
        return gather_slices(inp, sum(lengths), group)


class Slice:
    """Namespace of `Slice.apply`, the inverse of `AllGather.apply`."""

    @staticmethod
    def apply(inp: Tensor, rank: int, world_size: int, group: dist.ProcessGroup | None) -> Tensor:
        """Return this rank's slice of ``inp``, along the first dimension.

        If the rows are not divisible by the number of ranks, the first ranks get one more. ``rank`` is ignored.
        """
        if world_size == 1:
            return inp
        return take_slice(inp, get_torch_default_comm() if group is None else group)


def moe_group_of(world_size: int) -> dist.ProcessGroup:
    """Return the group that `ensure_comm` set, or the default group.

    Raises:
        UserError: the group does not have ``world_size`` ranks.
    """
    group = get_torch_default_comm() if _moe_group is None else _moe_group
    if group.size() != world_size:
        raise UserError(
            f"world_size={world_size} differs from the {group.size()} ranks of the group: call ensure_comm "
            "with another group"
        )
    return group


def _hop(sent: Tensor, received: Tensor, world_size: int, device: torch.device) -> Hop:
    sent_WL = sent.view(world_size, -1).tolist()
    received_WL = received.view(world_size, -1)
    return hop_counts(moe_group_of(world_size), sent_WL, received_WL.tolist(), received_WL.to(device)).hop()
