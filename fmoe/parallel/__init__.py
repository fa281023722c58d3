"""Data parallelism with experts: process groups, wrappers, gradients, checkpoints (docs/parallelism.md)."""

from fmoe.parallel.checkpoint import load_optimizer_state_dict, load_state_dict, optimizer_state_dict, state_dict
from fmoe.parallel.classes import ShardedClassifier
from fmoe.parallel.ddp import DenseAverager, DistributedDataParallel
from fmoe.parallel.fsdp import fully_shard, no_sync
from fmoe.parallel.gradients import average_gradients, clip_grad_norm_, grad_norm, is_expert
from fmoe.parallel.groups import ParallelGroups, init
from fmoe.parallel.parallelize import parallelize
from fmoe.parallel.pretrained import load_hf, save_hf
from fmoe.parallel.tables import CachedEmbedding, ShardedEmbedding, ShardedRows, optimizer_rows
from fmoe.parallel.trainer import TrainerMixin

__all__ = [
    "CachedEmbedding",
    "DenseAverager",
    "DistributedDataParallel",
    "ParallelGroups",
    "ShardedClassifier",
    "ShardedEmbedding",
    "ShardedRows",
    "TrainerMixin",
    "average_gradients",
    "clip_grad_norm_",
    "fully_shard",
    "grad_norm",
    "init",
    "is_expert",
    "load_hf",
    "load_optimizer_state_dict",
    "load_state_dict",
    "no_sync",
    "optimizer_rows",
    "optimizer_state_dict",
    "parallelize",
    "save_hf",
    "state_dict",
]
