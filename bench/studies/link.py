"""A cluster's clock on one machine: processor seconds of each rank, and emulated transfers between ranks.

Ranks may outnumber the cores, and other programs may run: neither changes the result. gloo's own work does not count.
"""

import math
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.exchange import collectives


class Link:
    """An emulated full-duplex link of this rank, which carries one transfer after the other; a context in which it
    carries the collectives of exchanges.

    A transfer of n bytes in the busier direction takes n / bandwidth seconds from its start, or from the end of the
    transfer before it. A collective ends for all ranks when the last rank's transfer does. A broadcast and a reduction
    are pipelined: each rank sends the tensor on once.

    Every rank of the world must build one at the same time.

    Attributes:
        bandwidth: bytes per second in either direction; infinite for no limit.
    """

    def __init__(self) -> None:
        self.bandwidth = math.inf
        self._group = dist.new_group(backend="gloo")
        self._ahead = self._free_at = 0.0

    def now(self) -> float:
        """Return the seconds since `line_up` on this rank: its thread's processor time, and waits for transfers."""
        return time.thread_time() + self._ahead

    def line_up(self) -> None:
        """Set the clocks of all ranks to zero."""
        dist.barrier(self._group)
        self._ahead = -time.thread_time()
        self._free_at = 0.0

    def start(self, num_bytes: int) -> float:
        """Begin a transfer; return the time at which it ends on this rank."""
        self._free_at = max(self.now(), self._free_at) + num_bytes / self.bandwidth
        return self._free_at

    def __enter__(self) -> "Link":
        link = self
        plain = collectives.Pending

        class Delayed(plain):
            def __init__(self, monitor: Any, work: Any, what: str, sent: int, result: Tensor, read: tuple):
                super().__init__(monitor, work, what, sent, result, read)
                if read and isinstance(read[0], Tensor):  # what is sent; the part that stays here is in both
                    self._ends_at = link.start(max(sent, result.nbytes - (read[0].nbytes - sent)))
                else:
                    self._ends_at = link.start(result.nbytes)

            def wait(self, for_host: bool = False) -> Tensor:
                before = link.now()
                result = super().wait(for_host)
                link.advance(before, self._ends_at)
                return result

        self._patch = mock.patch.object(collectives, "Pending", Delayed)
        self._patch.start()
        return self

    def advance(self, before: float, ends_at: float) -> None:
        """Set the clock to the end of a collective's transfers on all ranks, or to ``before`` if that is later."""
        latest = torch.tensor(ends_at, dtype=torch.float64)
        dist.all_reduce(latest, dist.ReduceOp.MAX, self._group)
        self._ahead += max(before, latest.item()) - self.now()

    def __exit__(self, *exception: Any) -> None:
        self._patch.stop()
