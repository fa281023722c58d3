"""Checkpoints during training."""

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
    """Write a checkpoint every ``config.every`` steps and after the last step of this process; remove old checkpoints.

    If ``config.asynchronous``, the step waits only for a copy of the state to the host. A thread writes the copy during
    the next steps. Only one checkpoint is written at a time: a save waits for the previous one. Every rank raises the
    thread's errors after the same step. The run ends when its last checkpoint is on disk.

    Args:
        folder: parent folder of the checkpoints.
        config: the recipe's section ``[checkpoint]``.
        on_saved: called on rank 0 with step and folder when a checkpoint is on disk; if asynchronous, in the thread.
    """

    def __init__(
        self, folder: Path, config: CheckpointConfig, on_saved: Callable[[int, Path], None] = lambda step, folder: None
    ):
        self.folder = folder
        self.config = config
        self._on_saved = on_saved
        self._writer: BackgroundWriter | None = None
        self._buffers: HostBuffers | None = None
        self._saved: int | None = None
        self._reserved = False

    def on_start(self, trainer: Loop, metrics: Metrics) -> None:
        if trainer.processes.is_main:
            remove_leftovers(self.folder)
        if self.config.asynchronous:
            self._writer = BackgroundWriter()
            self._buffers = HostBuffers()

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        if self._writer is not None:
            self._writer.poll()
        buffers = self._buffers
        if trainer.step % self.config.every == 0 or trainer.is_last:
            self.save(trainer)
        elif buffers is not None and self._writer is not None and not self._reserved:
            # The first step has created the optimizer state. The thread reserves the memory: page faults take time.
            wanted = [(piece.place, piece.data) for piece in state.pieces(trainer.engine)]
            self._writer.start(lambda group: buffers.reserve(wanted))
        self._reserved = True
        if trainer.is_last:
            self.finish()

    def save(self, trainer: Loop) -> None:
        """Write a checkpoint of the trainer's current step, unless that step has been saved already. Collective."""
        step = trainer.step
        if self._saved == step:
            return
        if self._writer is None:
            self._write(step, trainer.snapshot(), None)
        else:
            self._writer.wait()  # until then the writer uses the buffers
            snapshot = trainer.snapshot(self._buffers)
            self._writer.start(lambda group: self._write(step, snapshot, group))
        self._saved = step

    def finish(self) -> None:
        """Wait until the last save is on disk. Collective."""
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
