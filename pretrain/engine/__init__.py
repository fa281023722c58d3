"""The optimizer step: the recipe's model and optimizer on Megatron-core, what a checkpoint holds of them, what a step
reports."""

import megatron_patch  # noqa: F401 - first: it silences the warnings of megatron-core's imports
from pretrain.engine.engine import Engine, StepResult, init_parallel, stop_parallel

__all__ = ["Engine", "StepResult", "init_parallel", "stop_parallel"]
