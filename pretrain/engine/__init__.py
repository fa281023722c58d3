"""The optimizer step on Megatron-core: model and optimizer of a recipe, their checkpoint state, and step metrics."""

import megatron_patch  # noqa: F401 - first: it silences the warnings of megatron-core's imports
from pretrain.engine.engine import Engine, StepResult
from pretrain.engine.groups import init_parallel, stop_parallel

__all__ = ["Engine", "StepResult", "init_parallel", "stop_parallel"]
