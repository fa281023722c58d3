"""Micro batches of upcoming steps, collated in a thread while a step runs."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from pretrain.models.batch import Batch


class Prefetch:
    """Builder of batches in a thread, up to ``ahead`` steps beyond the requested one.

    It has no state that a checkpoint needs.

    Args:
        build: function that returns the batches of a step, called in the thread. If it raises an error, `take` of that
            step raises it again.
        end: the step after the last step of the run.
        ahead: number of steps to build ahead; 0 builds within `take`, without a thread.
    """

    def __init__(self, build: Callable[[int], list[Batch]], end: int, ahead: int):
        self._build = build
        self._end = end
        self._ahead = ahead
        self._pool: ThreadPoolExecutor | None = None
        self._futures: deque[tuple[int, Future[list[Batch]]]] = deque()

    def take(self, step: int) -> list[Batch]:
        """Return the batches of a step. If ``step`` is not the next one, batches built ahead are discarded."""
        if not self._ahead:
            return self._build(step)
        if self._pool is None:
            # A thread is enough: numpy releases the GIL while it copies and while pages are read from disk.
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="fmoe-data")
        if self._futures and self._futures[0][0] != step:
            self._drop()
        following = self._futures[-1][0] + 1 if self._futures else step
        for number in range(following, max(min(step + self._ahead + 1, self._end), step + 1)):
            self._futures.append((number, self._pool.submit(self._build, number)))
        return self._futures.popleft()[1].result()

    def close(self) -> None:
        """End the thread once it has built its current step. A later `take` starts another thread."""
        self._drop()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _drop(self) -> None:
        for _, future in self._futures:
            future.cancel()
        self._futures.clear()
