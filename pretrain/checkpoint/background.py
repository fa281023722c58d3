"""Checkpoint writing in the background: a thread on every rank, and process groups that nothing else uses."""

import logging
import threading
from collections.abc import Callable

import torch.distributed as dist

from pretrain.checkpoint.ranks import Ranks

logger = logging.getLogger(__name__)

Work = Callable[[dist.ProcessGroup | None], object]


class BackgroundWriter:
    """Background thread on every rank that runs one function (the work) at a time.

    The work may end earlier on some ranks than on others. `poll` raises an error of the work only once it has ended on
    every rank. The error is therefore raised at the same training step everywhere.

    The constructor, `start`, `poll` and `wait` are collective. The work gets a process group as its argument, or None
    if there is only one rank.
    """

    def __init__(self) -> None:
        # Two groups: one for the thread, one to agree on whether the threads have ended.
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._group = None if is_alone else dist.new_group(backend="gloo")
        self._votes = Ranks(None if is_alone else dist.new_group(backend="gloo"))
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """True until `poll` or `wait` finds that the work has ended; the same on every rank."""
        return self._thread is not None

    def start(self, work: Work) -> None:
        """Wait for earlier work, then call ``work(group)`` in a thread. If the earlier work failed, raise its error
        instead."""
        self.wait()
        # A daemon thread: a rank that fails with another error must not wait forever for ranks that are gone.
        self._thread = threading.Thread(target=self._run, args=(work,), name="fmoe-checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Call `wait` if the work has ended on every rank; else return at once."""
        if self._thread is not None and not self._votes.total(int(self._thread.is_alive())):
            self.wait()

    def wait(self) -> None:
        """Wait for the work; raise its error on every rank, even if only one rank failed."""
        if self._thread is None:
            return
        error = self._join()
        with self._votes.together():
            if error is not None:
                raise error

    def abandon(self) -> None:
        """Wait for this rank's thread and log its error, if any. Not collective: call it on a rank that fails."""
        if (error := self._join()) is not None:
            logger.warning("the thread that writes checkpoints has failed: %s", error)

    def _join(self) -> BaseException | None:
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        error = self._error
        self._error = None
        return error

    def _run(self, work: Work) -> None:
        try:
            work(self._group)
        except BaseException as error:
            self._error = error
