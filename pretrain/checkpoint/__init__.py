"""Crash-safe checkpoints, which load at any parallel split because tensors have global names. Independent of Megatron.

A checkpoint is a folder ``step-NNNNNNNN`` of safetensors shards, JSON states and a manifest. The manifest has the
digest of every file and the location of every piece of a tensor.

`save` writes a checkpoint, `open_checkpoint` reads it. `save` is `collect` followed by `write`. `background` runs
`write` in a thread during training.
"""

from pretrain.checkpoint.files import SaveError
from pretrain.checkpoint.folders import keep_last, latest, remove_leftovers, steps
from pretrain.checkpoint.load import Checkpoint, open_checkpoint
from pretrain.checkpoint.save import Snapshot, TensorPiece, collect, save, save_parts, write

__all__ = [
    "Checkpoint",
    "SaveError",
    "Snapshot",
    "TensorPiece",
    "collect",
    "keep_last",
    "latest",
    "open_checkpoint",
    "remove_leftovers",
    "save",
    "save_parts",
    "steps",
    "write",
]
