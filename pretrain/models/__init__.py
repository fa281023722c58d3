"""Kinds of models, one module each, with the same two functions.

``build(recipe, *, pre_process, post_process, vp_stage) -> nn.Module``
    Build Megatron-core's model on the host, with dense feed-forward blocks, or none where experts will be; called once
    per pipeline chunk of a rank.
``forward(model, batch) -> Tensor``
    Run a chunk on a micro batch from `pretrain.models.batch.collate`: b sequences of s tokens. The last chunk returns
    losses [b, s], or logits [b, s, vocabulary] if the batch has no ``labels``; other chunks return activations.
    ``model`` may be wrapped for the schedule, or bare.

`pretrain.engine.model.build_model` inserts the experts. `pretrain.data.inputs` opens the samples for a kind of model.
"""

import importlib
from types import ModuleType

from pretrain.config import Recipe


def kind_of(recipe: Recipe) -> ModuleType:
    """Return the module of ``recipe.model.kind``."""
    return importlib.import_module(f"pretrain.models.{recipe.model.kind}")
