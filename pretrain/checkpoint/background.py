"""Writing while training goes on: a thread, and process groups that nothing else uses."""

import logging
import threading
from collections.abc import Callable

import torch.distributed as dist

from pretrain.checkpoint.ranks import Ranks

logger = logging.getLogger(__name__)

Work = Callable[[dist.ProcessGroup | None], object]


class BackgroundWriter:
    """Runs one piece of work at a time in a thread, the same on every rank. Its error is raised on all ranks at once.

    Threads of different ranks end at different steps. That one has ended counts when `poll` finds that all have, so
    that an error surfaces, and the next work begins, at the same step everywhere.

    Creating one, `start`, `poll` and `wait` are collective. They use groups of gloo of their own: one for the thread,
    one to agree on whether the threads have ended.
    """

    def __init__(self) -> None:
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._group, votes = (None if is_alone else dist.new_group(backend="gloo") for _ in range(2))
        self._votes = Ranks(votes)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether there is work that is not known to have ended; the same on every rank."""
        return self._thread is not None

    def start(self, work: Work) -> None:
        """Calls ``work(group)`` in the thread, after what is under way; raises what that raised."""
        self.wait()
        # A daemon: a rank that dies on another error does not wait for ever for ranks that are gone.
        self._thread = threading.Thread(target=self._run, args=(work,), name="fmoe-checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """If the work has ended on every rank, forgets it, or raises its error. Costs nothing when there is none."""
        if self._thread is not None and not self._votes.total(int(self._thread.is_alive())):
            self.wait()

    def wait(self) -> None:
        """Waits for the work; raises its error on every rank, also where there was none."""
        if self._thread is None:
            return
        error = self._join()
        with self._votes.together():
            if error is not None:
                raise error

    def abandon(self) -> None:
        """For a rank that ends with an error, and does not know of the others: lets the thread end, logs its error."""
        if self._thread is not None and (error := self._join()) is not None:
            logger.warning("the checkpoint under way was not written: %s", error)

    def _join(self) -> BaseException | None:
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        return error

    def _run(self, work: Work) -> None:
        try:
            work(self._group)
        except BaseException as error:
            self._error = error
