"""FastMoE's functions of dispatch, for layers and gates that its users made of them (`fmoe.FMoE` has its own).

Workers exchange over the group that `ensure_comm` named last. Counts are int64; worker w owns the experts
w * num_expert ... (w + 1) * num_expert - 1.

Shape letters: T tokens, K choices, D width, L experts of a worker, W workers, M choices that are made (not -1), R rows
that this worker's experts get.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.errors import UserError
from fmoe.exchange.all_to_all import hop_counts
from fmoe.exchange.collectives import all_to_all
from fmoe.exchange.hops import Hop
from fmoe.kernels.rows import DispatchPlan
from fmoe.layout import gather_slices, slice_bounds, take_slice
from fmoe.routing import Routing
from fmoe.runtime import collectives


def get_torch_default_comm() -> dist.ProcessGroup:
    """The group of all processes.

    Raises:
        UserError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise UserError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    return dist.distributed_c10d._get_default_group()


def get_rank_0_in_comm(comm: dist.ProcessGroup) -> int:
    """The global rank of the group's first process."""
    return dist.get_global_rank(comm, 0)


_moe_group: dist.ProcessGroup | None = None


def ensure_comm(t: Tensor | None, comm: dist.ProcessGroup | None) -> None:
    """From here on the functions of this module exchange over ``comm``; None for all processes. ``t`` is not used."""
    global _moe_group
    _moe_group = get_torch_default_comm() if comm is None else comm


def get_moe_group() -> dist.ProcessGroup | None:
    """What `ensure_comm` was told last."""
    return _moe_group


def exchange_counts(counts: Tensor, world_size: int) -> Tensor:
    """[W * X], X numbers for each worker -> [W * X], the X numbers that each worker has for this one."""
    if world_size == 1:
        return counts
    return all_to_all(moe_group_of(world_size), counts, what="a gate's exchange of counts").wait(for_host=True)


@torch.no_grad()
def count_by_gate(
    gate: Tensor, num_expert: int, world_size: int, require_pos: bool = True
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Where the choices lie, and how many go to each expert.

    Args:
        gate: int64 [T] or [T, K], ids among the ``num_expert * world_size`` experts; -1 is no choice.

    Returns:
        pos: [M], indices into ``gate.view(-1)``, by expert and then in order; None unless ``require_pos``.
        local_expert_count: [W * L], choices of this worker for every expert.
        global_expert_count: [W * L], choices of each worker (in order of workers) for this worker's experts.
    """
    choices_N1 = gate.reshape(-1, 1).long()
    plan = DispatchPlan.from_routing(Routing(choices_N1, choices_N1), num_expert * world_size)
    pos = plan.perm_N[: int(plan.count_E.sum())] if require_pos else None
    return pos, plan.count_E, exchange_counts(plan.count_E, world_size)


@torch.no_grad()
def prepare_forward(gate: Tensor, num_expert: int, world_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """`count_by_gate` with the counts on the host, the rows of each of this worker's experts [L], and R."""
    pos: Any
    pos, local_expert_count, global_expert_count = count_by_gate(gate, num_expert, world_size)
    sent, received = torch.stack([local_expert_count, global_expert_count]).cpu()
    fwd_expert_count = received.view(world_size, num_expert).sum(0)
    return pos, sent, received, fwd_expert_count, int(fwd_expert_count.sum())


def _local_scatter(inp: Tensor, pos: Tensor) -> Tensor:
    """``inp[pos]``."""
    return inp.index_select(0, pos)


def _local_gather(inp: Tensor, pos: Tensor, out_batch_size: int, maybe_overlap: bool = True) -> Tensor:
    """Rows to their places in zeros; with ``maybe_overlap`` those of the same place are added."""
    out = inp.new_zeros(out_batch_size, *inp.shape[1:])
    return out.index_add(0, pos, inp) if maybe_overlap else out.index_copy(0, pos, inp)


class MOEScatter:
    """``MOEScatter.apply(...)``: tokens -> the rows of this worker's experts, those of one expert side by side."""

    @staticmethod
    def apply(
        inp: Tensor,
        pos: Tensor,
        local_expert_count: Tensor,
        global_expert_count: Tensor,
        fwd_batch_size: int,
        world_size: int,
    ) -> Tensor:
        """[T, D] -> [R, D]; ``pos`` [M] is the token of each choice. ``fwd_batch_size`` follows from the counts."""
        rows_MD = _local_scatter(inp, pos)
        if world_size == 1:
            return rows_MD
        return _transfer(local_expert_count, global_expert_count, world_size, inp.device).forward(rows_MD)


class MOEGather:
    """``MOEGather.apply(...)``: the way back of `MOEScatter`."""

    @staticmethod
    def apply(
        global_output_buf: Tensor,
        pos: Tensor,
        local_expert_count: Tensor,
        global_expert_count: Tensor,
        local_batch_size: int,
        world_size: int,
    ) -> Tensor:
        """[R, D] -> [local_batch_size, D], a row for every choice (``pos`` [M] is its place), zero where there is
        none."""
        rows = global_output_buf
        if world_size > 1:
            rows = _transfer(local_expert_count, global_expert_count, world_size, rows.device).back(rows)
        return _local_gather(rows, pos, local_batch_size, maybe_overlap=False)


class AllGather:
    """``AllGather.apply(...)``: the inverse of `Slice`."""

    @staticmethod
    def apply(inp: Tensor, rank: int, world_size: int, group: dist.ProcessGroup | None) -> Tensor:
        """The parts of all ranks of the group, one after the other. ``rank`` is this one's.

        Raises:
            UserError: the parts are not of the lengths that `Slice` gives.
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
                f"AllGather got parts of {lengths} rows: equal ones, or those that Slice gives, can be joined"
            )
        return gather_slices(inp, sum(lengths), group)


class Slice:
    """``Slice.apply(...)``: this rank's part of what all ranks of the group hold alike."""

    @staticmethod
    def apply(inp: Tensor, rank: int, world_size: int, group: dist.ProcessGroup | None) -> Tensor:
        """Rows in order of ranks; where they do not divide evenly, the first ranks have one more. ``rank`` is this
        one's."""
        return inp if world_size == 1 else take_slice(inp, get_torch_default_comm() if group is None else group)


def moe_group_of(world_size: int) -> dist.ProcessGroup:
    group = get_torch_default_comm() if _moe_group is None else _moe_group
    if group.size() != world_size:
        raise UserError(
            f"world_size={world_size} differs from the {group.size()} workers of the group: name it by ensure_comm"
        )
    return group


def _transfer(sent: Tensor, received: Tensor, world_size: int, device: torch.device) -> Hop:
    sent_WL, received_WL = sent.view(world_size, -1), received.view(world_size, -1)
    group = moe_group_of(world_size)
    return hop_counts(group, sent_WL.tolist(), received_WL.tolist(), received_WL.to(device)).hop()
