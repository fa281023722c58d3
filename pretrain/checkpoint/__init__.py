"""Crash-safe checkpoints, which load at any parallel split because tensors have global names. Independent of Megatron.

A checkpoint is a folder ``step-NNNNNNNN`` of safetensors shards, JSON states and a manifest with the digest of every
file and the location of every piece. `save` writes one, `open_checkpoint` reads it. `collect` and `write` are the two
halves of `save`; `background` runs the second in a thread during training.
"""

from pretrain.checkpoint.files import SaveError
from pretrain.checkpoint.folders import keep_last, latest, remove_leftovers, steps
from pretrain.checkpoint.load import Checkpoint, open_checkpoint
from pretrain.checkpoint.save import Piece, Snapshot, collect, save, save_parts, write

__all__ = [
    "Checkpoint",
    "Piece",
    "SaveError",
    "Snapshot",
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
