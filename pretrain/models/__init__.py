"""Kinds of models, a module each, with the same two functions:

``build(recipe, *, pre_process, post_process, vp_stage) -> nn.Module``
    Megatron-core's model on the host, with dense blocks or none where experts will be; once for each of a process's
    pipeline chunks.
``forward(model, batch) -> Tensor``
    One pass over a micro batch that `collate` made, in every chunk: the losses [b, s] of the last, the activations of
    others; without ``labels`` in the batch, the last has logits [b, s, vocabulary]. ``model`` is as the schedule has
    it, wrapped, or bare.

`pretrain.engine.model.build_model` puts experts in; `pretrain.data.inputs` opens the samples of a kind.
"""

import importlib
from types import ModuleType

from pretrain.config import Recipe


def kind_of(recipe: Recipe) -> ModuleType:
    """The module of ``recipe.model.kind``."""
    return importlib.import_module(f"pretrain.models.{recipe.model.kind}")
