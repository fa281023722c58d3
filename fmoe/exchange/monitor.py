"""Waits that end: a failure on one rank raises on every rank and names it.

A rank that waits longer than `PATIENCE` uses the store of its process group. It writes the number of the collective for
which it waits, and reads whether another rank has failed. At the group's timeout, or when a connection breaks, the
error names the ranks that have not written. A shorter wait does not use the store.
"""

import collections
import contextlib
import json
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fmoe.errors import ranks_text
from fmoe.runtime import collectives

logger = logging.getLogger(__name__)

PATIENCE = 1.0  # seconds of waiting before the store is asked
_STORE_SECONDS = 1.0  # a store that does not answer in that time (its process may be stopped) is not asked again
_BEFORE_WATCHDOG = 0.9  # share of a group's timeout after which a wait on a GPU gives up
_SHORT = 0.1  # seconds; after a shorter wait on a GPU, the collective is not asked for an error
_GRACE = 2.0  # additional seconds for the other ranks to report, once a connection is broken


class PeerError(RuntimeError):
    """Another rank of the group failed, exited or does not respond.

    The message names the forward pass, and the rank if it is known.

    Attributes:
        is_agreed: whether all ranks of the group raise in the same forward pass.
    """

    is_agreed = False


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the group's timeout in seconds, as given to ``init_process_group`` or ``new_group``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for device in group._device_types:
            options = getattr(group._get_backend(device), "options", None)
            if options is not None:
                return options._timeout.total_seconds()
    return dist.distributed_c10d.default_pg_timeout.total_seconds()


class Traffic:
    """Bytes that a rank sends to other ranks for one layer.

    Attributes:
        sent: bytes so far, computed from shapes. An all-to-all counts the rows for other ranks. An all-gather counts
            this rank's part once per other rank. An all-reduce counts this rank's share of a ring algorithm. A
            broadcast counts the tensor once per other rank, on the root. A reduction counts one tensor on each rank but
            the root.
    """

    def __init__(self) -> None:
        self.sent = 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what is sent in this context. Use it for setup that is not part of a step."""
        sent = self.sent
        yield
        self.sent = sent


class GroupMonitor:
    """Waits for the collectives of one process group. Use `monitor_of` to get it.

    Collectives are numbered in the order of their start.

    Attributes:
        context: the layer and its forward pass, for messages.
        started: number of collectives started so far.
        traffic: counts the bytes sent.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = weakref.ref(group)
        self.rank = dist.get_rank()
        self.ranks = dist.get_process_group_ranks(group)
        self.context = "a layer"
        self.started = 0
        self.traffic = Traffic()
        self._passes: collections.Counter[str] = collections.Counter()
        self._has_posted = False
        self._store: dist.Store | None = None
        with contextlib.suppress(AttributeError, KeyError, ValueError):
            self._store = dist.distributed_c10d._get_process_group_store(group)

    def start_pass(self, label: str, traffic: Traffic) -> None:
        """Begin a forward pass of the layer ``label``: errors name this pass, and bytes sent count in ``traffic``."""
        self.traffic = traffic
        self._passes[label] += 1
        self.context = f"{label or 'a layer'}, forward pass {self._passes[label]}"
        if self._has_posted:  # all ranks have recovered from that failure
            self._has_posted = False
            self._ask(lambda store: store.delete_key("fmoe/failed"))

    def wait(self, work: collectives.Started, what: str, number: int) -> None:
        """Wait on the CPU for ``work``, the collective with this ``number``.

        Args:
            what: name of the collective in errors.

        Raises:
            PeerError: another rank failed, is gone, or did not join within the group's timeout.
        """
        begin = time.monotonic()
        patience = PATIENCE
        while True:
            try:
                work.wait(timedelta(seconds=patience))
                return
            except RuntimeError as error:
                # It may have completed just after the wait for it timed out.
                if work.is_completed() and not _has_succeeded(work):
                    raise self.broken(error, what, number, begin) from error
            remaining = begin + self._timeout() - time.monotonic()
            self._look(what, number, remaining <= 0)
            patience = max(0.001, min(PATIENCE, remaining))

    def wait_on_device(self, work: collectives.Started, what: str, number: int) -> None:
        """Wait until ``work`` on a GPU is complete, so that the host can read its result.

        The wait ends shortly before the group's timeout, because nccl's watchdog would end the process at the timeout,
        without a `PeerError`.

        Raises:
            PeerError: another rank failed, is gone, or did not join within 9/10 of the group's timeout.
        """
        begin = time.monotonic()
        waited = 0.0
        next_look = PATIENCE
        while not work.is_completed():
            waited = time.monotonic() - begin
            if waited > next_look:
                next_look += PATIENCE
                self._look(what, number, waited >= _BEFORE_WATCHDOG * self._timeout(), _BEFORE_WATCHDOG)
            time.sleep(min(waited / 20, 1e-3))  # the GPU is idle for a twentieth of the wait at most
        error = work.error() if waited > _SHORT else None  # the first call of `error` prints a warning
        if error is not None:
            # The watchdog is about to end this process: there is no time to wait for reports, as `broken` does.
            self._post(what, number)
            self._raise_if_failed(number)
            raise PeerError(f"{self.context}, {what}: {self._missing(number)} ({_first_line(error)})") from error

    def post_failure(self, error: Exception) -> None:
        """Report that this rank failed and will not join the others, whether they wait for it now or later."""
        reason = f"rank {self.rank} failed in {self.context}: {type(error).__name__}: {error}"
        reason = str(error) if isinstance(error, PeerError) else reason  # it already names the failed rank
        text = json.dumps([self.started, self.rank, reason[:4000]])

        def post(store: dist.Store) -> bool:
            store.set("fmoe/failed", text)
            return True

        self._has_posted = self._ask(post) is True

    def _timeout(self) -> float:
        group = self._group()
        return 0.0 if group is None else timeout_of(group)

    def _look(self, what: str, number: int, is_late: bool, share: float = 1) -> None:
        self._post(what, number)
        self._raise_if_failed(number)
        if is_late:
            seconds = share * self._timeout()
            limit = "the group's timeout of" if share == 1 else f"{share:.0%} of the group's timeout,"
            raise PeerError(f"{self.context}, {what}: {self._missing(number)} within {limit} {seconds:g} s")

    def broken(self, error: Exception, what: str, number: int, begin: float) -> PeerError:
        """Return the error for a broken connection or the backend's timeout.

        Each rank that waits for a collective reports the collective's number to the group's store. The error names the
        ranks that have not reported this ``number`` or a later one.

        Args:
            begin: ``time.monotonic()`` at the start of the wait. Other ranks report after `PATIENCE`
                seconds of waiting.
        """
        seconds = self._timeout()
        is_late = time.monotonic() - begin >= _BEFORE_WATCHDOG * seconds > 0  # the backend's timeout came before ours
        self._post(what, number)
        end = max(begin + PATIENCE + _GRACE, time.monotonic() + 0.3)
        last = end + _GRACE
        absent = None
        while time.monotonic() < end:
            self._raise_if_failed(number)
            before = absent
            absent = self._absent(number)
            if not absent:
                break
            if before is not None and len(absent) < len(before):  # more ranks report; on a busy machine this is slow
                end = min(max(end, time.monotonic() + 1.0), last)
            time.sleep(0.1)
        missing = self._missing(number) + (f" within the group's timeout of {seconds:g} s" if is_late else "")
        return PeerError(f"{self.context}, {what}: {missing} ({_first_line(error)})")

    def _post(self, what: str, number: int) -> None:
        text = json.dumps([number, what])
        self._ask(lambda store: store.set(f"fmoe/at/{self.rank}", text))

    def _raise_if_failed(self, number: int) -> None:
        def failure(store: dist.Store) -> Any:
            return json.loads(store.get("fmoe/failed")) if store.check(["fmoe/failed"]) else None

        report = self._ask(failure)  # number of started collectives, rank, message
        if report is not None and report[1] != self.rank and report[0] < number:
            raise PeerError(report[2])

    def _absent(self, number: int) -> list[int] | None:
        """Return the ranks that have not reported this collective or a later one; None if the store is gone."""

        def at(store: dist.Store) -> list[int]:
            keys = {rank: f"fmoe/at/{rank}" for rank in self.ranks}
            return [r for r, key in keys.items() if not store.check([key]) or json.loads(store.get(key))[0] < number]

        return self._ask(at)

    def _missing(self, number: int) -> str:
        absent = self._absent(number)
        if absent is None:
            return (
                "an unknown rank did not answer, and neither did the store that would name it (without torchrun, the "
                "store runs in rank 0)"
            )
        if not absent:
            return "every rank answered, but the collective did not complete"
        return f"{ranks_text(absent)} did not answer"

    def _ask(self, question: Callable[[dist.Store], Any]) -> Any:
        """Return ``question(store)``; None if there is no store or it does not answer in time."""
        store = self._store
        if store is None:
            return None
        answers: list[Any] = []

        def call() -> None:
            with contextlib.suppress(Exception):
                answers.append(question(store))

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(_STORE_SECONDS)
        if not answers:
            self._store = None  # not asked again
            return None
        return answers[0]


def _has_succeeded(work: collectives.Started) -> bool:
    """Return whether a completed collective succeeded."""
    try:
        work.wait()
    except RuntimeError:
        return False
    return True


_monitors: "weakref.WeakKeyDictionary[dist.ProcessGroup, GroupMonitor]" = weakref.WeakKeyDictionary()


def monitor_of(group: dist.ProcessGroup) -> GroupMonitor:
    """Return the monitor of a group, which all exchanges over that group share."""
    if group not in _monitors:
        _monitors[group] = GroupMonitor(group)
    return _monitors[group]


def _first_line(error: Exception) -> str:
    """Return the first line of a backend's message; a C++ stack trace follows it."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200]
