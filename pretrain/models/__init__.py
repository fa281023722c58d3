"""Kinds of models, one module each, with the same two functions.

``build(recipe, *, pre_process, post_process, vp_stage) -> nn.Module``
    Build Megatron-core's model on the host, once per pipeline chunk of a rank. The model has dense feed-forward blocks,
    but may have none where experts will be.
``forward(model, batch) -> Tensor``
    Run a chunk on a micro batch from `pretrain.models.batch.collate`: b sequences of s tokens (of a T5, s tokens in the
    decoder). The last chunk returns losses [b, s], or logits [b, s, vocabulary] if the batch has no ``labels``. Other
    chunks return activations. ``model`` may be wrapped for the schedule, or bare.

`pretrain.engine.model.build_model` inserts the experts. `pretrain.data.inputs` opens the samples for a kind of model.
`register_model` adds a kind.
"""

import importlib
from typing import Any, Protocol

from torch import Tensor, nn

from fmoe.errors import UserError, add_name, known_names
from pretrain.config import Recipe
from pretrain.models.batch import Batch


class Kind(Protocol):
    """A kind of model: a Python module, or an object, with these functions."""

    def build(
        self, recipe: Recipe, *, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> nn.Module: ...

    def forward(self, model: nn.Module, batch: Batch) -> Tensor: ...


SHIPPED = ("gpt", "t5", "bert")

MODELS: dict[str, Kind] = {}
"""Registered kinds of models by name."""


def register_model(name: str, kind: Kind) -> None:
    """Register a kind of model under a new name, for ``model.kind`` of a recipe.

    The kind trains on the same samples as a GPT, and accepts the same recipe keys. The class of its model must be one
    that `megatron_patch.fmoefy` supports: a class of Megatron-core, or a subclass of it.

    Raises:
        UserError: the name is empty or belongs to another kind.
    """
    if name in SHIPPED:
        raise UserError(f"model.kind={name!r} is registered already, as pretrain.models.{name}")
    add_name(MODELS, "model.kind", name, kind)


def kind_of(recipe: Recipe) -> Any:
    """Return the kind that ``recipe.model.kind`` names.

    Raises:
        UserError: no kind has this name.
    """
    name = recipe.model.kind
    if name in SHIPPED:
        return importlib.import_module(f"pretrain.models.{name}")
    if name not in MODELS:
        raise UserError(f"model.kind={name!r} is not known; {known_names(name, [*SHIPPED, *sorted(MODELS)])}")
    return MODELS[name]
