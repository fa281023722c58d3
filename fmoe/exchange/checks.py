"""Errors that all ranks of a group raise together, and the checks of a layer's settings that need the other ranks."""

from collections.abc import Mapping
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fmoe.errors import UserError, ranks_text
from fmoe.exchange.collectives import all_gather, broadcast
from fmoe.exchange.monitor import PeerError, monitor_of

_MESSAGE_BYTES = 4096


def raise_on_all_ranks(
    group: dist.ProcessGroup, failed: list[int], error: Exception | None, device: torch.device
) -> NoReturn:
    """Raise on every rank of the group: its own error on a failed rank, a `PeerError` elsewhere.

    Every rank must call it with the same ``failed``. The `PeerError` has the text of the first failed rank's error.

    Args:
        failed: the failed ranks, as indices in the group.
        error: the error of this rank; None if it did not fail.
    """
    message = shared_text(group, f"{type(error).__name__}: {error}", failed[0], device)
    if error is not None:
        raise error
    ranks = ranks_text([dist.get_global_rank(group, rank) for rank in failed])
    agreed = PeerError(f"{ranks} failed in {monitor_of(group).context}, before the exchange: {message}")
    agreed.is_agreed = True
    raise agreed


def shared_text(group: dist.ProcessGroup, text: str, source: int, device: torch.device | str) -> str:
    """Return the beginning of the ``text`` of rank ``source`` of the group, on all of its ranks. Collective."""
    message = _as_bytes(text.encode()[:_MESSAGE_BYTES], device)
    broadcast(group, message, source, "sharing of a message").wait(for_host=True)
    return _as_text(message)


def _as_bytes(text: bytes, device: torch.device | str) -> Tensor:
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
    if text:
        message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return message.to(device)


def _as_text(message: Tensor) -> str:
    return bytes(message.cpu().tolist()).rstrip(b"\0").decode(errors="replace")


def check_consistency(group: dist.ProcessGroup, facts: Mapping[str, object], device: torch.device) -> None:
    """Compare settings between the ranks of a group. Every rank must call it.

    Args:
        facts: settings by name; their values are compared and shown as text.

    Raises:
        UserError: settings differ; raised on all ranks. It names the setting, the ranks that differ from the majority,
            and the values.
    """
    lines = [f"{name}={value}".replace("\n", " ")[:400] for name, value in facts.items()]
    message = _as_bytes("\n".join(lines).encode()[:_MESSAGE_BYTES], device)
    messages = all_gather(group, message, "comparison of settings").wait(for_host=True).view(group.size(), -1)
    rows = [dict(line.split("=", 1) for line in _as_text(message).split("\n") if "=" in line) for message in messages]
    for name in {name: None for row in rows for name in row}:
        column = [row.get(name, "nothing") for row in rows]
        values = sorted(set(column), key=lambda value: (-column.count(value), column.index(value)))
        if len(values) > 1:
            ranks = [dist.get_global_rank(group, rank) for rank, value in enumerate(column) if value != values[0]]
            raise UserError(
                f"{rows[0].get('name')}: {name}={' or '.join(values[1:])} on {ranks_text(ranks)}, "
                f"but {values[0]} on the other ranks of moe_group"
            )


def refuse_replicating_wrapper(experts: nn.Module, group: dist.ProcessGroup, name: str) -> None:
    """Raise if torch's DistributedDataParallel or ``fully_shard`` wraps experts that are spread over ``group``.

    These wrappers treat the experts of several ranks as replicas. Call this function in the forward pass: the wrapper
    cannot be found at other times.

    Args:
        name: the layer's name in errors.

    Raises:
        UserError: such a wrapper wraps the experts.
    """
    if torch.compiler.is_compiling():
        return
    if (wrapper := DistributedDataParallel._active_ddp_module) is not None:
        _refuse_ddp(experts, group, name, wrapper)
    # FSDP replaces parameters by its own tensors, which lack the experts' mark ``allreduce = False``.
    if getattr(experts, "_is_fsdp_managed_module", False):
        _refuse_fully_shard(experts, name)


def _refuse_ddp(experts: nn.Module, group: dist.ProcessGroup, name: str, wrapper: DistributedDataParallel) -> None:
    expert = next(experts.parameters(), None)
    others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    replicas = set(dist.get_process_group_ranks(wrapper.process_group))
    if others & replicas and any(expert is p for p in wrapper._module_parameters):
        raise UserError(
            f"torch's DistributedDataParallel overwrote the experts of {name} on all ranks with the first rank's: "
            "rebuild the model and wrap it in fmoe.parallel.DistributedDataParallel(model, groups)"
        )


def _refuse_fully_shard(experts: nn.Module, name: str) -> None:
    from torch.distributed.fsdp import FSDPModule

    is_marked = not getattr(next(experts.parameters(), None), "allreduce", True)
    if not is_marked and not any(isinstance(module, FSDPModule) for module in experts.modules()):
        raise UserError(
            f"torch's fully_shard treated the experts of {name} on all ranks as replicas of each other: rebuild "
            "the model and shard it with fmoe.parallel.fully_shard(model, groups)"
        )
