"""Megatron's process groups for a recipe."""

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_patch.layer import drop_tracked_losses
from pretrain.config import Recipe
from pretrain.engine import rng
from pretrain.start.process import timeout


def init_parallel(recipe: Recipe) -> None:
    """Create Megatron's process groups and seed all random number generators.

    May be called again only after `stop_parallel`.
    """
    parallel = recipe.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.model_chunks > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        num_distributed_optimizer_instances=parallel.copies,
        distributed_timeout_minutes=int(timeout(recipe.guard.hang_minutes).total_seconds() // 60),
        create_gloo_process_groups=dist.get_backend() == "gloo",
    )
    rng.seed(recipe.train.seed)


def stop_parallel() -> None:
    """Destroy the groups that `init_parallel` created, and empty Megatron's tracker of auxiliary losses."""
    parallel_state.destroy_model_parallel()
    drop_tracked_losses()
