"""Saving."""

from collections.abc import Callable
from pathlib import Path

from pretrain.callbacks.base import Callback, Loop, Metrics
from pretrain.checkpoint import Snapshot, keep_last, remove_leftovers, write
from pretrain.checkpoint.background import BackgroundWriter
from pretrain.checkpoint.host import HostBuffers
from pretrain.checkpoint.ranks import Ranks
from pretrain.config import CheckpointConfig
from pretrain.engine import state


class Checkpointing(Callback):
    """Writes a checkpoint every so many steps and after the last of this process, and removes those that are too old.

    Asynchronous: the step waits for a copy of the state on the host; a thread writes it while training goes on. One
    checkpoint at a time: the next save waits for the one before. What the thread could not do is raised, on every
    rank, after the first step at which all have noticed, and the run ends when its last checkpoint is on disk.

    Args:
        folder: gets a folder for each checkpoint.
        config: the recipe's section.
        on_saved: called on rank 0 with the step and the folder of each checkpoint that is on disk, maybe in the thread.
    """

    def __init__(
        self, folder: Path, config: CheckpointConfig, on_saved: Callable[[int, Path], None] = lambda step, folder: None
    ):
        self.folder, self.config, self._on_saved = folder, config, on_saved
        self._writer: BackgroundWriter | None = None
        self._buffers: HostBuffers | None = None
        self._saved: int | None = None
        self._reserved = False

    def on_start(self, trainer: Loop, metrics: Metrics) -> None:
        if trainer.processes.is_main:
            remove_leftovers(self.folder)
        if self.config.asynchronous:
            self._writer, self._buffers = BackgroundWriter(), HostBuffers()

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        if self._writer is not None:
            self._writer.poll()
        if trainer.step % self.config.every == 0 or trainer.is_last:
            self.save(trainer)
        elif (buffers := self._buffers) is not None and self._writer is not None and not self._reserved:
            # After the first step, which makes the optimizer's state; in the thread, because fresh pages take time.
            wanted = [(piece.place, piece.data) for piece in state.pieces(trainer.engine)]
            self._writer.start(lambda group: buffers.reserve(wanted))
        self._reserved = True
        if trainer.is_last:
            self.finish()

    def save(self, trainer: Loop) -> None:
        """Saves this step, unless it is saved already. Collective."""
        step = trainer.step
        if self._saved == step:
            return
        if self._writer is None:
            self._write(step, trainer.snapshot(), None)
        else:
            self._writer.wait()  # the buffers are its until then
            snapshot = trainer.snapshot(self._buffers)
            self._writer.start(lambda group: self._write(step, snapshot, group))
        self._saved = step

    def finish(self) -> None:
        """Returns when what was saved is on disk. Collective."""
        if self._writer is not None:
            self._writer.wait()

    def on_end(self, trainer: Loop, error: BaseException | None) -> None:
        if error is None:
            self.finish()
        elif self._writer is not None:
            self._writer.abandon()

    def _write(self, step: int, snapshot: Snapshot, group) -> None:
        path = write(self.folder, step, snapshot, group=group)
        ranks = Ranks(group)
        if ranks.rank == 0:
            self._on_saved(step, path)
        with ranks.together():
            if ranks.rank == 0 and self.config.keep:
                keep_last(self.folder, self.config.keep, self.config.keep_every)
