"""Configuration of a run: the sections of a recipe, and functions that read and write recipes."""

from pretrain.config.load import build_recipe, load_recipe, write_recipe
from pretrain.config.model import AttentionConfig, ModelConfig, MoEConfig, PositionConfig
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.parallel import ParallelConfig
from pretrain.config.recipe import Recipe
from pretrain.config.sections import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    GuardConfig,
    RunConfig,
    TrackingConfig,
    TrainConfig,
)

__all__ = [
    "AttentionConfig",
    "CheckpointConfig",
    "DataConfig",
    "EvaluationConfig",
    "GuardConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PositionConfig",
    "Recipe",
    "RunConfig",
    "TrackingConfig",
    "TrainConfig",
    "build_recipe",
    "load_recipe",
    "write_recipe",
]
