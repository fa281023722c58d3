"""FastMoE's helpers around process groups."""

import torch.distributed as dist

from fmoe.errors import UserError


def get_torch_default_comm() -> dist.ProcessGroup:
    """The group of all processes.

    Raises:
        UserError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise UserError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    return dist.group.WORLD


def get_rank_0_in_comm(comm: dist.ProcessGroup) -> int:
    """The global rank of the group's first process."""
    return dist.get_global_rank(comm, 0)
