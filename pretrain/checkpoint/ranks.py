"""Ranks that save or load a checkpoint together: each part of the work succeeds on all ranks or fails on all."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fmoe.errors import UserError, one_line
from pretrain.checkpoint.files import SaveError

_MESSAGE_BYTES = 4096
_MESSAGE_CHARS = 900  # at most 4 bytes each, plus the JSON around them


class Ranks:
    """A process group, or this single process if torch.distributed is not initialized.

    Attributes:
        rank: rank of this process in the group.
        size: number of processes in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        is_distributed = dist.is_available() and dist.is_initialized()
        self.group = group
        self.rank = dist.get_rank(group) if is_distributed else 0
        self.size = dist.get_world_size(group) if is_distributed else 1
        assert self.rank >= 0, "this process is not in the group that saves"

    @contextmanager
    def together(self, undo: Callable[[], None] | None = None) -> Iterator[None]:
        """Wait for all ranks at the end of a ``with`` block. If a rank has raised in the block, raise on every rank.

        A failing rank raises its own exception, or a `SaveError` for an OSError. The other ranks raise a copy of the
        exception of the lowest failing rank. The copy of a `UserError` or `SaveError` has the same type. The copy of
        any other exception is a RuntimeError. The block must not call collectives.

        Args:
            undo: function to call on rank 0 if a rank has failed, after every rank has left the block. All ranks wait
                for it. It must not raise.
        """
        failure: Exception | None = None
        try:
            yield
        except OSError as error:
            failure = SaveError(f"{error.filename or 'checkpoint'}: {error.strerror or error}", error.errno)
            failure.__cause__ = error
        except Exception as error:
            failure = error
        failing = self._lowest(self.size if failure is None else self.rank)
        if failing == self.size:
            return
        theirs = self._broadcast(failure, failing)
        if undo is not None and self.rank == 0:
            undo()
        self._lowest(self.rank)  # a barrier
        raise failure if failure is not None else theirs

    def total(self, value: int) -> int:
        """Sum a value over the ranks. Collective."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def _lowest(self, value: int) -> int:
        return self._reduced(value, dist.ReduceOp.MIN)

    def _reduced(self, value: int, operation: dist.ReduceOp.RedOpType) -> int:
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device())
        dist.all_reduce(tensor, op=operation, group=self.group)
        return int(tensor.item())

    def _broadcast(self, failure: Exception | None, source: int) -> Exception:
        if self.size == 1:
            assert failure is not None
            return failure
        buffer = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
        if self.rank == source:
            assert failure is not None
            text = torch.frombuffer(bytearray(_to_wire(failure)), dtype=torch.uint8)
            buffer[: len(text)] = text
        buffer = buffer.to(self.device())
        dist.broadcast(buffer, group=self.group, group_src=source)
        return _from_wire(bytes(buffer.cpu().tolist()).rstrip(b"\0"), source)

    def device(self) -> torch.device:
        """Return the device on which tensors must be for this group's collectives."""
        # The backend of a group for several devices is "cpu:gloo,cuda:nccl" or "undefined"; it takes CPU tensors.
        backend = dist.get_backend(self.group)
        on_gpu = "nccl" in backend and "gloo" not in backend
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _to_wire(failure: Exception) -> bytes:
    message = one_line(failure, _MESSAGE_CHARS)
    if isinstance(failure, SaveError):
        fields = ["save", message, failure.errno]
    elif isinstance(failure, UserError):
        fields = ["user", message, None]
    else:
        fields = ["other", f"{type(failure).__name__}: {message}", None]
    return json.dumps(fields, ensure_ascii=False).encode(errors="replace")


def _from_wire(data: bytes, rank: int) -> Exception:
    kind, message, errno = json.loads(data)
    message = f"rank {rank}: {message}"
    if kind == "save":
        return SaveError(message, errno)
    return UserError(message) if kind == "user" else RuntimeError(message)
