"""Watchdog that ends a run without progress and writes its stacks."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

from pretrain.callbacks.base import Callback, Loop, Metrics
from pretrain.start import torchrun
from pretrain.start.process import EXIT_HANG

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
        self.folder, self.seconds = folder, seconds
        self._moved = threading.Condition()
        self._seen: float | None = None  # time.monotonic() of the last progress; None: not watching
        self._has_begun = self._is_over = False
        self._thread: threading.Thread | None = None

    def start(self, trainer: Loop) -> None:
        """Start the timer thread, which watches from the first micro batch on.

        Call `start` before training, and `stop` after it, even if training raised.
        """
        self._trainer = trainer
        trainer.engine.on_progress = self._progress
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a second call does nothing."""
        with self._moved:
            self._is_over = True
            self._moved.notify()
        if self._thread is not None:
            self._thread.join()

    def on_start(self, trainer: Loop, metrics: Metrics) -> None:
        self._set(None)

    def before_step(self, trainer: Loop) -> None:
        self._has_begun = True
        self._progress()

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        self._set(None)

    def on_end(self, trainer: Loop, error: BaseException | None) -> None:
        self.stop()

    def _progress(self) -> None:
        self._set(time.monotonic())

    def _set(self, seen: float | None) -> None:
        with self._moved:
            is_idle, self._seen = self._seen is None, seen
            if is_idle and seen is not None:  # else the thread wakes up in time by itself
                self._moved.notify()

    def _watch(self) -> None:
        with self._moved:
            while not self._is_over:
                left = None if self._seen is None else self._seen + self.seconds - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._moved.wait(left)
            else:
                return
        self._dump()

    def _dump(self) -> None:
        rank = self._trainer.processes.rank
        path = self.folder / f"rank-{rank}.txt"
        where = f"{'in' if self._has_begun else 'before'} step {self._trainer.step + 1}"
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
        torchrun.report(EXIT_HANG)
        # The first rank to end takes the others down; give them time to write.
        deadline = time.monotonic() + min(self.seconds, _GRACE)
        while time.monotonic() < deadline and not self._all_wrote(began - self.seconds):
            time.sleep(0.1)
        os._exit(EXIT_HANG)

    def _all_wrote(self, since: float) -> bool:
        with contextlib.suppress(OSError):
            files = [self.folder / f"rank-{n}.txt" for n in range(self._trainer.processes.world_size)]
            return all(file.stat().st_mtime > since for file in files)
        return False
