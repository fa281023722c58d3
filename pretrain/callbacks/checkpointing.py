"""Saving."""

from pathlib import Path

from pretrain.callbacks.base import Callback, Metrics
from pretrain.checkpoint import keep_last


class Checkpointing(Callback):
    """Writes a checkpoint every so many steps and after the last, and removes those that are too old.

    Args:
        folder: gets a folder for each checkpoint.
        every: steps between them.
        keep: the newest so many stay; 0 for all.
    """

    def __init__(self, folder: Path, every: int, keep: int):
        self.folder, self.every, self.keep = folder, every, keep

    def on_step(self, trainer, metrics: Metrics) -> None:
        if trainer.step % self.every == 0 or trainer.is_done:
            trainer.save(self.folder)
            if self.keep and trainer.processes.is_main:
                keep_last(self.folder, self.keep)
