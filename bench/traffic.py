"""Measured bytes that a rank sends in one step, and how often the host reads values of a tensor."""

import math
from collections import Counter

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Reads of values on the host. On a GPU each waits for all work before it, unless the tensor was copied earlier.
_READS = ("tolist", "item", "numpy", "cpu", "__int__", "__float__", "__bool__", "__index__")
# The shape of their result depends on values: on a GPU the host waits for them as well.
_SHAPED_BY_VALUES = ("masked_select", "nonzero", "unique", "bincount")


class Traffic:
    """Counter of a rank's traffic within a context: ``with Traffic() as traffic: step()``.

    Attributes:
        sent: bytes that this rank sent to others. An all-to-all counts the parts for other ranks, an all-gather this
            rank's part once per other rank, a reduce-scatter the other ranks' parts, an all-reduce both of these, a
            broadcast the whole once per other rank, on its source.
        sent_by: these bytes by kind of collective.
        sent_over: these bytes by the name of the process group.
        collectives: number of collectives of each kind.
        reads: number of reads by the host of each kind.
    """

    def __init__(self):
        self.sent_by: Counter[str] = Counter()
        self.sent_over: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self._modes = (_Reads(self.reads), _Collectives(self))

    @property
    def sent(self) -> int:
        return self.sent_by.total()

    def __enter__(self) -> "Traffic":
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*exception)


class _Reads(TorchFunctionMode):
    def __init__(self, reads: Counter[str]):
        super().__init__()
        self._reads = reads

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in _READS or name in _SHAPED_BY_VALUES:
            self._reads[name.strip("_")] += 1
        return function(*args, **(kwargs or {}))


class _Collectives(TorchDispatchMode):
    def __init__(self, traffic: Traffic):
        super().__init__()
        self._traffic = traffic

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = function._schema.name.removeprefix("c10d::").strip("_")
            self._traffic.collectives[name] += 1
            group = next(torch.distributed.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
            sent = _sent(name, args, group)
            self._traffic.sent_by[name] += sent
            self._traffic.sent_over[group.group_name] += sent
        return function(*args, **(kwargs or {}))


def _sent(name: str, args: tuple, group: torch.distributed.ProcessGroup) -> int:
    size = group.size()
    if name == "alltoall_base":
        _, rows, _, _, splits = args[:5]
        keeps = splits[group.rank()] if splits else rows.shape[0] // size
        return (rows.shape[0] - keeps) * math.prod(rows.shape[1:]) * rows.element_size()
    if name in ("allgather_base", "allgather_into_tensor_coalesced", "allgather"):
        return _bytes(args[1]) * (size - 1)
    if name in ("reduce_scatter_base", "reduce_scatter_tensor_coalesced"):
        return _bytes(args[1]) * (size - 1) // size
    if name in ("allreduce", "allreduce_coalesced"):
        return 2 * _bytes(args[0]) * (size - 1) // size
    if name == "broadcast":
        return _bytes(args[0]) * (size - 1) * (args[2] == group.rank())
    if name == "send":
        return _bytes(args[0])
    if name in ("barrier", "recv_", "recv"):
        return 0
    raise ValueError(f"c10d.{name} is not supported: the bytes that it sends are unknown")


def _bytes(tensors: torch.Tensor | list[torch.Tensor]) -> int:
    return sum(t.nbytes for t in ([tensors] if isinstance(tensors, torch.Tensor) else tensors))
