"""Mapping between the tensors of a Hugging Face folder ("theirs") and of a checkpoint of fmoe ("ours").

A family of models has a table of `Entry` (docs/interchange.md has an example). Shapes are written in letters: "2H D" is
a matrix of 2 * H rows and D columns. The letters are

* V rows of the embedding, D hidden size, P positions, T segment types;
* Q query heads and G key/value heads, each of width d;
* E experts, H hidden units of an expert, S of all shared experts together, F of a dense block;
* in multi-latent attention: C width of compressed queries, R of compressed keys and values, v of a head's values, K = R
  plus the width of the rotary key, M = v plus the width of a head's key without the rotary part;
* in MXFP4: X = D / 32 and Y = H / 32 blocks.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

import torch
from torch import Tensor

from pretrain.config import ModelConfig

Sizes = Mapping[str, int]


def sizes_of(model: ModelConfig) -> Sizes:
    """Return the sizes that letters stand for in shapes such as ``"2H D"``: ``D`` is the hidden size."""
    return {
        "V": model.vocab_size,
        "D": model.hidden_size,
        "Q": model.attention.num_heads,
        "G": model.query_groups,
        "d": model.head_width,
        "F": model.dense_width,
        "H": model.ffn_hidden_size,
        "S": model.shared_width,
        "E": model.moe.num_experts,
        "C": model.attention.q_lora_rank or 0,
        "R": model.attention.kv_lora_rank or 0,
        "K": (model.attention.kv_lora_rank or 0) + (model.attention.qk_rope_head_dim or 0),
        "M": (model.attention.qk_head_dim or 0) + model.value_width,
        "v": model.value_width,
        "P": model.sequence_length,
        "T": model.segment_types,
        "X": model.hidden_size // 32,
        "Y": model.ffn_hidden_size // 32,
    }


def shape_of(letters: str, sizes: Sizes) -> tuple[int, ...]:
    """Return the shape that letters spell: ``(2 * H, D)`` for ``"2H D"``."""

    def size_of(axis: str) -> int:
        return prod(int(factor) if factor.isdigit() else sizes[factor] for factor in re.findall(r"\d+|[A-Za-z]", axis))

    return tuple(map(size_of, letters.split()))


class Transform(Protocol):
    """Conversion between one tensor of fmoe and one or more tensors of Hugging Face.

    `split` exports, and `join` imports.
    """

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]: ...

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor: ...


class Same:
    """Transform of a tensor that is the same in both formats."""

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        return (ours,)

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return theirs[0]


class Halves:
    """Transform that exports a gated block's matrix [2 * H, D] as two matrices [H, D]: the gate's, then the value's."""

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        return ours.chunk(2, 0)

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return torch.cat(tuple(theirs), 0)


@dataclass(frozen=True)
class OfOne:
    """Transform that drops a tensor's leading axis of size 1, and exports the rest by another transform."""

    transform: Transform

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        return self.transform.split(ours.squeeze(0), sizes)

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return self.transform.join(theirs, sizes).unsqueeze(0)


class QueryKeyValue:
    """Transform that exports attention's fused matrix or bias as three tensors: queries, keys and values.

    The fused rows are ordered by key/value head: the head's queries, its key, its value. Rows keep their order within a
    head, because both formats rotate the pairs (i, i + r / 2) of a head's first r elements.
    """

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        queries = sizes["Q"] // sizes["G"]
        rows = ours.unflatten(0, (sizes["G"], queries + 2, sizes["d"]))
        return tuple(part.flatten(0, 2) for part in rows.split([queries, 1, 1], 1))

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return torch.cat([part.unflatten(0, (sizes["G"], -1, sizes["d"])) for part in theirs], 1).flatten(0, 2)


Where = Literal["model", "output", "layer", "dense", "moe", "expert", "mtp"]
Stack = Literal["encoder", "decoder"]


@dataclass(frozen=True)
class Entry:
    """Tensors of fmoe and the corresponding tensors of Hugging Face, as an entry of a family's table.

    Attributes:
        where: layers or modules that have the tensors. "model": once. "output": once, if the output layer is untied.
            "layer": every layer. "dense": every layer without experts. "moe": every layer with experts. "expert": every
            expert of these layers; in a checkpoint, one tensor stacks all experts of a layer. "mtp": every module of
            multi-token prediction; the other entries also apply to its transformer layer.
        ours: name in a checkpoint. ``{layer}`` is the layer, and ``{depth}`` the module of multi-token prediction, both
            counted from 0. Empty for tensors of zeros that only the Hugging Face format has.
        theirs: names in the Hugging Face format, with shapes in letters (see `shape_of`), in the order in which
            ``transform.split`` returns the tensors. ``{layer}`` and ``{expert}`` count from 0.
        transform: conversion from ours to theirs, and back.
        dtype: None for weights, which have the model's dtype. torch.uint8 for MXFP4, which import converts to the
            model's dtype. Any other dtype is that of a buffer in both formats.
        stack: "encoder" or "decoder", if the entry applies only to the layers of that stack. ``{layer}`` counts
            within the stack. None for all layers.
        when: function that returns whether a model has the tensors.
    """

    where: Where
    ours: str
    theirs: Mapping[str, str]
    transform: Transform = Same()  # noqa: RUF009 - stateless
    dtype: torch.dtype | None = None
    stack: Stack | None = None
    when: Callable[[ModelConfig], bool] = lambda model: True


@dataclass(frozen=True)
class Place:
    """A tensor of a checkpoint, or one slice of it, with the corresponding tensors of Hugging Face.

    Attributes:
        ours: name in a checkpoint; empty for tensors of zeros that only the Hugging Face format has.
        expert: index of the slice along the first axis, which stacks a layer's experts or, in a model without experts,
            the layers; None for the whole tensor.
        theirs: names and shapes in the Hugging Face format.
        dtype: see `Entry`.
    """

    ours: str
    expert: int | None
    theirs: Mapping[str, tuple[int, ...]]
    transform: Transform
    dtype: torch.dtype | None = None


def places(table: Sequence[Entry], model: ModelConfig) -> Iterator[Place]:
    """Yield all tensors of a model, layer by layer."""
    sizes = sizes_of(model)
    table = [entry for entry in table if entry.when(model) and not (entry.where == "output" and model.tie_embeddings)]
    embedding, *outside = [entry for entry in table if entry.where in ("model", "output")]
    yield from _apply(embedding, sizes)
    for number in model.layer_numbers:
        kinds = {"layer", "moe", "expert"} if number in model.layers_with_experts else {"layer", "dense"}
        depth = number - model.mtp_numbers.start
        if depth >= 0:
            kinds.add("mtp")
        in_decoder = model.decoder_layers > 0 and number > model.num_layers
        stacks = (None, "decoder" if in_decoder else "encoder")
        layer = number - 1 - (model.num_layers if in_decoder else 0)
        for entry in table:
            if entry.where in kinds and entry.stack in stacks:
                yield from _apply(entry, sizes, layer, depth)
    for entry in outside:
        yield from _apply(entry, sizes)


def _apply(entry: Entry, sizes: Sizes, layer: int = 0, depth: int = -1) -> Iterator[Place]:
    ours = entry.ours.format(layer=layer, depth=depth)
    if depth >= 0:
        ours = ours.replace(f"/decoder.layers.{layer}.", f"/mtp.layers.{depth}.transformer_layer.")
    experts: Sequence[int | None] = range(sizes["E"]) if entry.where == "expert" else [None]
    if not sizes["E"] and "{layer}" in entry.ours:  # Megatron-core saves equal layers as one tensor
        ours = entry.ours.replace("{layer}.", "")
        experts = [layer]
    for expert in experts:
        theirs = {
            name.format(layer=layer, expert=expert): shape_of(letters, sizes) for name, letters in entry.theirs.items()
        }
        yield Place(ours, expert, theirs, entry.transform, entry.dtype)
