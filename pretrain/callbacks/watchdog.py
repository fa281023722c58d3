"""Watchdog that ends a run without progress and writes its stacks."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

from pretrain.callbacks.base import Callback, Loop, Metrics
from pretrain.start.codes import EXIT_HANG

_GRACE = 60.0  # upper bound on the seconds that a rank waits for the other ranks' stacks


class Watchdog(Callback):
    """After ``seconds`` without progress, write the stacks of all threads to ``folder/rank-N.txt`` and end the process.

    Progress is the beginning of a step or of a micro batch, in validation too. The watch covers callbacks that run
    before this one, and the validation before the first step. Later callbacks, such as saving, may take any time.

    Each rank has its own timer thread. The thread needs the interpreter lock, so it does not run during a native call
    that holds the lock.

    Args:
        folder: folder of the files, one per rank; existing files are appended to.
        seconds: time limit without progress.
    """

    def __init__(self, folder: Path, seconds: float):
        self.folder = folder
        self.seconds = seconds
        self._moved = threading.Condition()
        self._seen: float | None = None  # time.monotonic() of the last progress; None: not watching
        self._has_begun = False
        self._is_over = False
        self._thread: threading.Thread | None = None

    def on_start(self, trainer: Loop, metrics: Metrics) -> None:
        self._set(None)

    def before_step(self, trainer: Loop) -> None:
        self._has_begun = True
        self.on_progress(trainer)

    def on_progress(self, trainer: Loop) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, args=(trainer,), name="watchdog", daemon=True)
            self._thread.start()
        self._set(time.monotonic())

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        self._set(None)

    def on_end(self, trainer: Loop, error: BaseException | None) -> None:
        with self._moved:
            self._is_over = True
            self._moved.notify()
        if self._thread is not None:
            self._thread.join()

    def _set(self, seen: float | None) -> None:
        with self._moved:
            was_idle = self._seen is None
            self._seen = seen
            if was_idle and seen is not None:  # else the thread wakes up in time by itself
                self._moved.notify()

    def _watch(self, trainer: Loop) -> None:
        with self._moved:
            while not self._is_over:
                left = None if self._seen is None else self._seen + self.seconds - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._moved.wait(left)
            else:
                return
        self._dump(trainer)

    def _dump(self, trainer: Loop) -> None:
        rank = trainer.processes.rank
        path = self.folder / f"rank-{rank}.txt"
        where = f"{'in' if self._has_begun else 'before'} step {trainer.step + 1}"
        line = f"rank {rank}: no progress for {self.seconds / 60:g} minutes {where}"
        began = time.time()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            where = f"the stacks of all its threads are in {path}"
        except OSError as error:
            where = f"its stacks could not be written: {error}"
        sys.stderr.write(f"pretrain: error: {line} (guard.hang_minutes); {where}\n")
        sys.stderr.flush()
        # The first rank to end takes the others down; give them time to write.
        files = [self.folder / f"rank-{number}.txt" for number in range(trainer.processes.world_size)]
        deadline = time.monotonic() + min(self.seconds, _GRACE)
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if all(file.stat().st_mtime > began - self.seconds for file in files):
                    break
            time.sleep(0.1)
        os._exit(EXIT_HANG)
