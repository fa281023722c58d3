"""Kinds of models: one module each, with the functions of `Kind`, and one line in `KINDS`.

`pretrain.engine.model.build_model` inserts the experts into a built model. `register_model` adds a kind.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from fmoe.errors import UserError, add_name, known_names
from pretrain.config import Recipe
from pretrain.models.batch import Batch

KINDS: dict[str, Any] = {
    "gpt": "pretrain.models.gpt",
    "t5": "pretrain.models.t5",
    "bert": "pretrain.models.bert",
    "classifier": "pretrain.models.classifier",
}
"""Kinds of models by name: modules, by their names, and registered objects."""


@dataclass(frozen=True)
class Kind:
    """Everything that training asks of a kind of model.

    Attributes:
        build: ``build(recipe, *, pre_process, post_process, vp_stage)`` builds Megatron-core's model on the host, once
            per pipeline chunk of a rank. The model has dense feed-forward blocks, but may have none where experts will
            be.
        fmoefy: ``fmoefy(model, num_experts, *, layers, overlap_shared, exchange, exchange_options, seed, **options)``
            replaces the blocks of ``layers`` (from 1) by experts; by default `megatron_patch.fmoefy`.
        forward: ``forward(model, batch)`` runs a chunk on a micro batch from `pretrain.models.batch.collate`: b
            sequences of s tokens (of a T5, s tokens in the decoder). The last chunk returns losses [b, s], or logits
            [b, s, vocabulary] if the batch has no ``labels``. Other chunks return activations. ``model`` may be wrapped
            for the schedule, or bare.
        block_length: ``block_length(recipe)`` returns the tokens of text of one sample. Blocks of text have one more,
            which is also the first token of the next block.
        samples: ``samples(recipe, blocks, tokenizer, seed, length)`` makes `pretrain.data.samples.Samples` of blocks
            with at least ``length`` tokens. With ``data.chat``, ``blocks`` are samples of conversations already. Raises
            UserError if the tokenizer lacks a special token.
        memories: ``memories(recipe, chunks)`` returns what the model carries from one micro batch of a stream to the
            next, a `pretrain.models.memory.Memory` per chunk; [] if it carries nothing.
    """

    build: Callable[..., nn.Module]
    fmoefy: Callable[..., nn.Module]
    forward: Callable[[nn.Module, Batch], Tensor]
    block_length: Callable[[Recipe], int]
    samples: Callable[..., Any]
    memories: Callable[..., list]


def register_model(name: str, kind: Any) -> None:
    """Register a kind of model under a new name, for ``model.kind`` of a recipe.

    The class of its model must be one that `megatron_patch.fmoefy` supports: a class of Megatron-core, or a subclass of
    it. The kind accepts the recipe keys of a GPT.

    Args:
        kind: module or object with functions of `Kind`. A GPT's functions serve where it has none.

    Raises:
        UserError: the name is empty or belongs to another kind.
    """
    if isinstance(KINDS.get(name), str):
        raise UserError(f"model.kind={name!r} is registered already, as {KINDS[name]}")
    add_name(KINDS, "model.kind", name, kind)


def kind_of(recipe: Recipe) -> Kind:
    """Return the kind that ``recipe.model.kind`` names.

    Raises:
        UserError: no kind has this name.
    """
    name = recipe.model.kind
    if name not in KINDS:
        raise UserError(f"model.kind={name!r} is not known; {known_names(name, KINDS)}")
    import megatron_patch  # noqa: F401 - before megatron-core, whose warnings it silences

    gpt = importlib.import_module(KINDS["gpt"])
    kind = KINDS[name]
    if isinstance(kind, str):
        kind = importlib.import_module(kind)
    functions = {field.name: getattr(kind, field.name, getattr(gpt, field.name)) for field in fields(Kind)}
    return Kind(**functions)
