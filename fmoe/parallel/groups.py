"""Process groups of data and expert parallelism."""

import dataclasses
import datetime
import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fmoe.errors import UserError
from fmoe.moe import MoE
from fmoe.runtime import launcher

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParallelGroups:
    """The data parallel ranks as a mesh (dp, ep). The ranks of each row together hold all experts once.

    Use `init` or `from_mesh` to make one.

    Attributes:
        mesh: mesh of both dimensions. In groups from `init`, rank = dp index * ep + ep index, so ranks that exchange
            tokens are adjacent.
        data_mesh: the same ranks as one dimension, for dense parameters.
        ep_name, dp_name: names of the dimensions of ``mesh``.
        hybrid: with ``shard_size`` of `init`, the meshes (replicate, shard) of dense parameters and of experts; else
            None, and `fully_shard` shards over all ranks.
    """

    mesh: DeviceMesh
    data_mesh: DeviceMesh
    ep_name: str = "ep"
    dp_name: str = "dp"
    hybrid: tuple[DeviceMesh, DeviceMesh] | None = None

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, ep: str = "ep", dp: str = "dp") -> "ParallelGroups":
        """Make groups from two dimensions of a mesh, which may have further dimensions (tensor, pipeline).

        Call it on every rank of the mesh.

        Args:
            ep: name of the expert parallel dimension.
            dp: name of the other dimension, along which ranks hold the same experts.

        Raises:
            UserError: the mesh has no dimension ``ep`` or ``dp``; both names are equal.
        """
        names = mesh.mesh_dim_names or ()
        for key, name in (("ep", ep), ("dp", dp)):
            if name not in names:
                has = f"are {', '.join(names)}" if names else "have no names"
                raise UserError(f"{key}={name!r} is not a dimension of the mesh: its dimensions {has}")
        if ep == dp:
            raise UserError(f"ep={ep!r} and dp={dp!r} are the same dimension of the mesh")
        ordered = tuple(name for name in names if name in (ep, dp))  # torch requires the mesh's own order
        pair = mesh if names == ordered else mesh[ordered]
        return cls(pair, pair._flatten("_".join(ordered)), ep, dp)

    @property
    def moe_group(self) -> dist.ProcessGroup:
        """The expert parallel group, over which experts are split; for ``moe_group`` of `MoE.build`."""
        return self.mesh.get_group(self.ep_name)

    @property
    def expert_data_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same experts as this one."""
        return self.expert_data_mesh.get_group()

    @property
    def data_group(self) -> dist.ProcessGroup:
        """All data parallel ranks. They have different tokens, but the same dense parameters."""
        return self.data_mesh.get_group()

    @property
    def expert_data_mesh(self) -> DeviceMesh:
        """`expert_data_group` as a mesh."""
        return self.mesh[self.dp_name]

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh over which `fully_shard` shards dense parameters; (replicate, shard) with ``shard_size``."""
        return self.hybrid[0] if self.hybrid else self.data_mesh

    @property
    def expert_shard_mesh(self) -> DeviceMesh:
        """The mesh over which `fully_shard` shards experts; (replicate, shard) with ``shard_size``."""
        return self.hybrid[1] if self.hybrid else self.expert_data_mesh

    @property
    def ep(self) -> int:
        """Expert parallel size."""
        return self.moe_group.size()

    @property
    def dp(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.expert_data_group.size()

    @property
    def size(self) -> int:
        """Number of data parallel ranks, ``dp * ep``."""
        return self.data_mesh.size()


def init(
    ep: int = 1,
    dp: int | None = None,
    *,
    shard_size: int | None = None,
    device_type: str | None = None,
    timeout: datetime.timedelta | None = None,
) -> ParallelGroups:
    """Make the groups of a job whose processes are all data parallel.

    Call it in every process. It starts torch.distributed if it is not running, from torchrun's environment. Without
    torchrun the job is a single process, so that the same script runs with and without it.

    Args:
        ep: number of ranks over which experts are split; these ranks are adjacent, to share a machine if possible.
        dp: number of ranks that hold the same experts; None for ``processes / ep``.
        shard_size: number of adjacent ranks over which `fully_shard` shards parameters, of which other such ranks hold
            copies (HSDP): a multiple or a divisor of ``ep``. None for all ranks.
        device_type: "cpu" (gloo) or "cuda" (nccl, on the device LOCAL_RANK). None for the device of torch.distributed
            if that is running, else cuda if available, else cpu.
        timeout: timeout of torch.distributed, if it is started here.

    Raises:
        UserError: an argument is invalid or does not fit the number of processes; torchrun's environment is
            incomplete or invalid; the processes cannot meet.
    """
    for key, value in (("ep", ep), ("dp", dp), ("shard_size", shard_size)):
        if value is not None and (type(value) is not int or value < 1):
            raise UserError(f"{key}={value!r} is not a positive whole number")
    if device_type not in (None, "cpu", "cuda"):
        raise UserError(f"device_type={device_type!r} must be 'cpu' or 'cuda'")
    if shard_size is not None and shard_size % ep and ep % shard_size:
        raise UserError(f"shard_size={shard_size} must be a multiple or a divisor of ep={ep}")
    world = dist.get_world_size() if dist.is_initialized() else launcher.world_size()
    for key, value in (("ep", ep), ("shard_size", shard_size)):
        if value is not None and world % value:
            raise UserError(f"{key}={value} does not divide the number of processes, {world}")
    if dp is not None and dp * ep != world:
        raise UserError(f"dp={dp} x ep={ep} is {dp * ep}, which differs from the {world} processes of the job")
    if not dist.is_initialized():
        device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        _start(device_type, timeout)
    elif device_type is None:
        has_cuda = any(device.type == "cuda" for device in dist.distributed_c10d._get_default_group()._device_types)
        device_type = "cuda" if has_cuda and torch.cuda.is_available() else "cpu"
    groups = ParallelGroups.from_mesh(init_device_mesh(device_type, (world // ep, ep), mesh_dim_names=("dp", "ep")))
    if shard_size is None:
        return groups
    names = ("replicate", "shard")
    dense = init_device_mesh(device_type, (world // shard_size, shard_size), mesh_dim_names=names)
    copies = max(1, shard_size // ep)  # ranks with the same experts among those over which parameters are sharded
    ranks = init_device_mesh(device_type, (groups.dp // copies, copies, ep), mesh_dim_names=(*names, "ep"))
    return dataclasses.replace(groups, hybrid=(dense, ranks[names]))


def _start(device_type: str, timeout: datetime.timedelta | None) -> None:
    backend = "nccl" if device_type == "cuda" else "gloo"
    is_launched = launcher.is_launched()
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if device_type == "cuda":
        device = torch.device("cuda", launcher.number("LOCAL_RANK", 0))
        torch.cuda.set_device(device)
        options["device_id"] = device
    if not is_launched:
        logger.info("no torchrun environment: a job of one process")
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    with launcher.meeting():
        dist.init_process_group(backend, **options)


def moe_layers(model: nn.Module, groups: ParallelGroups) -> dict[str, MoE]:
    """Return the `MoE` layers of a model by name.

    Raises:
        UserError: the experts of a layer are split over other ranks than ``groups.moe_group``.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    expected = dist.get_process_group_ranks(groups.moe_group)
    for name, layer in layers.items():
        group = layer.exchange.group
        ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
        if ranks != expected:
            raise UserError(
                f"experts of {name or layer.name} are split over the ranks {ranks}, but groups.moe_group "
                f"(ep={groups.ep}) has the ranks {expected}: build the layer with moe_group=groups.moe_group"
            )
    return layers
