"""Measured bytes that a rank sends in one step, and how often the host reads values of a tensor."""

import math
from collections import Counter

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Reads of values on the host. On a GPU each waits for all work before it, unless the tensor was copied earlier.
_READS = ("tolist", "item", "numpy", "cpu", "__int__", "__float__", "__bool__", "__index__")
# The shape of their result depends on values: a GPU's host waits for it as well.
_SHAPED_BY_VALUES = ("masked_select", "nonzero", "unique", "bincount")


class Traffic:
    """Counter of a rank's traffic within a context: ``with Traffic() as traffic: step()``.

    Attributes:
        sent: bytes that this rank sent to others. An all-to-all counts the parts for other ranks, an all-gather this
            rank's part once per other rank, a reduce-scatter the other ranks' parts, an all-reduce both of these.
        collectives: number of collectives of each kind.
        reads: number of reads by the host of each kind.
    """

    def __init__(self):
        self.sent = 0
        self.collectives: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self._modes = (_Reads(self.reads), _Collectives(self))

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
            self._traffic.sent += _sent(name, args)
        return function(*args, **(kwargs or {}))


def _sent(name: str, args: tuple) -> int:
    group = next(torch.distributed.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
    size = group.size()
    if name == "alltoall_base":
        _, rows, _, _, splits = args[:5]
        keeps = splits[group.rank()] if splits else rows.shape[0] // size
        return (rows.shape[0] - keeps) * math.prod(rows.shape[1:]) * rows.element_size()
    if name == "allgather_base":
        return args[1].nbytes * (size - 1)
    if name == "reduce_scatter_base":
        return args[1].nbytes * (size - 1) // size
    if name == "allreduce":
        return 2 * sum(tensor.nbytes for tensor in args[0]) * (size - 1) // size
    raise ValueError(f"c10d.{name} is not supported: the bytes that it sends are unknown")
