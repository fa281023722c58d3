"""Mapping between the tensors of a Hugging Face folder ("theirs") and of a checkpoint of fmoe ("ours").

A family of models is a table of `Entry`, and a new family is a new table (docs/interchange.md has an example). Sizes
are written in letters: V rows of the embedding, D width, Q query heads and G key/value heads of width d, F hidden units
of a dense block, H hidden units of an expert, E experts; "2H D" is a matrix of 2 * H rows and D columns.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

import torch
from torch import Tensor

from pretrain.config import ModelConfig

Sizes = Mapping[str, int]


def sizes_of(model: ModelConfig) -> Sizes:
    """Return the sizes that the letters stand for."""
    return {
        "V": model.vocab_size,
        "D": model.hidden_size,
        "Q": model.num_heads,
        "G": model.query_groups,
        "d": model.head_width,
        "F": model.dense_width,
        "H": model.ffn_hidden_size,
        "E": model.num_experts,
    }


def shape_of(letters: str, sizes: Sizes) -> tuple[int, ...]:
    """Return the shape that letters spell: ``(2 * H, D)`` for ``"2H D"``. Spaces separate axes, not their factors."""
    return tuple(
        prod(int(f) if f.isdigit() else sizes[f] for f in re.findall(r"\d+|[A-Za-z]", axis)) for axis in letters.split()
    )


class Transform(Protocol):
    """Conversion of one of our tensors to one or more of theirs, and back; `join` inverts `split`."""

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]: ...

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor: ...


class Same:
    """Identity."""

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        return (ours,)

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return theirs[0]


class Halves:
    """Gate matrix above value matrix, [2 * H, D], as two matrices [H, D]."""

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        return ours.chunk(2, 0)

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return torch.cat(tuple(theirs), 0)


class QueryKeyValue:
    """Megatron's fused matrix (for each key/value head its query heads, the key, the value) as three matrices.

    In both formats, rotary embeddings pair element i of a head with i + d / 2, so rows keep their order within a head.
    """

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        groups, head, width = sizes["G"], sizes["d"], ours.shape[-1]
        queries = sizes["Q"] // groups
        rows = ours.view(groups, queries + 2, head, width)
        return tuple(part.reshape(-1, width) for part in rows.split([queries, 1, 1], 1))

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        groups, head, width = sizes["G"], sizes["d"], theirs[0].shape[-1]
        return torch.cat([part.view(groups, -1, head, width) for part in theirs], 1).view(-1, width)


Where = Literal["model", "output", "layer", "dense", "moe", "expert"]


@dataclass(frozen=True)
class Entry:
    """A line of a family's table.

    Attributes:
        where: scope of the entry. "model" is once; "output" is once, if the output layer is untied; "layer" is every
            layer; "dense" is every layer without experts; "moe" is every layer with experts; "expert" is every expert
            of those layers, where ours is the expert's slice of a stack.
        ours: name in a checkpoint; ``{layer}`` counts from 0.
        theirs: names and sizes, in the order of the transform; ``{expert}`` counts from 0.
        transform: conversion from ours to theirs, and back.
    """

    where: Where
    ours: str
    theirs: Mapping[str, str]
    transform: Transform = Same()  # noqa: RUF009 - stateless


_LAYER = "model.layers.{layer}"
_ATTENTION = f"{_LAYER}.self_attn"
_OUR_LAYER = "model/decoder.layers.{layer}"

# Common to Llama's descendants.
_COMMON = (
    Entry("model", "model/embedding.word_embeddings.weight", {"model.embed_tokens.weight": "V D"}),
    Entry(
        "layer", f"{_OUR_LAYER}.self_attention.linear_qkv.layer_norm_weight", {f"{_LAYER}.input_layernorm.weight": "D"}
    ),
    Entry(
        "layer",
        f"{_OUR_LAYER}.self_attention.linear_qkv.weight",
        {
            f"{_ATTENTION}.q_proj.weight": "Qd D",
            f"{_ATTENTION}.k_proj.weight": "Gd D",
            f"{_ATTENTION}.v_proj.weight": "Gd D",
        },
        QueryKeyValue(),
    ),
    Entry("layer", f"{_OUR_LAYER}.self_attention.linear_proj.weight", {f"{_ATTENTION}.o_proj.weight": "D Qd"}),
    Entry(
        "layer", f"{_OUR_LAYER}.mlp.linear_fc1.layer_norm_weight", {f"{_LAYER}.post_attention_layernorm.weight": "D"}
    ),
    Entry("model", "model/decoder.final_layernorm.weight", {"model.norm.weight": "D"}),
    Entry("output", "model/output_layer.weight", {"lm_head.weight": "V D"}),
)
_QK_NORM = (
    Entry("layer", f"{_OUR_LAYER}.self_attention.q_layernorm.weight", {f"{_ATTENTION}.q_norm.weight": "d"}),
    Entry("layer", f"{_OUR_LAYER}.self_attention.k_layernorm.weight", {f"{_ATTENTION}.k_norm.weight": "d"}),
)
_DENSE = (
    Entry(
        "dense",
        f"{_OUR_LAYER}.mlp.linear_fc1.weight",
        {f"{_LAYER}.mlp.gate_proj.weight": "F D", f"{_LAYER}.mlp.up_proj.weight": "F D"},
        Halves(),
    ),
    Entry("dense", f"{_OUR_LAYER}.mlp.linear_fc2.weight", {f"{_LAYER}.mlp.down_proj.weight": "D F"}),
)


def _experts(block: str, gate: str, value: str, output: str) -> tuple[Entry, ...]:
    """Return the entries of router and experts, with separate matrices per expert."""
    expert = f"{_LAYER}.{block}.experts.{{expert}}"
    return (
        Entry("moe", f"{_OUR_LAYER}.mlp.gate.weight", {f"{_LAYER}.{block}.gate.weight": "E D"}),
        Entry(
            "expert",
            f"{_OUR_LAYER}.mlp.experts.weight_in",
            {f"{expert}.{gate}.weight": "H D", f"{expert}.{value}.weight": "H D"},
            Halves(),
        ),
        Entry("expert", f"{_OUR_LAYER}.mlp.experts.weight_out", {f"{expert}.{output}.weight": "D H"}),
    )


# Experts in transformers 5's in-memory layout, which it writes on request.
_STACKED = (
    Entry("moe", f"{_OUR_LAYER}.mlp.gate.weight", {f"{_LAYER}.mlp.gate.weight": "E D"}),
    Entry("moe", f"{_OUR_LAYER}.mlp.experts.weight_in", {f"{_LAYER}.mlp.experts.gate_up_proj": "E 2H D"}),
    Entry("moe", f"{_OUR_LAYER}.mlp.experts.weight_out", {f"{_LAYER}.mlp.experts.down_proj": "E D H"}),
)

MIXTRAL = (*_COMMON, *_experts("block_sparse_moe", "w1", "w3", "w2"))
MIXTRAL_STACKED = (*_COMMON, *_STACKED)
QWEN3_MOE = (*_COMMON, *_QK_NORM, *_DENSE, *_experts("mlp", "gate_proj", "up_proj", "down_proj"))
QWEN3_MOE_STACKED = (*_COMMON, *_QK_NORM, *_DENSE, *_STACKED)


@dataclass(frozen=True)
class Place:
    """One application of an entry: our tensor, or an expert's slice of it, and their tensors.

    Attributes:
        ours: name in a checkpoint.
        expert: index in the stack; None for the whole tensor.
        theirs: names and shapes.
    """

    ours: str
    expert: int | None
    theirs: Mapping[str, tuple[int, ...]]
    transform: Transform


def places(table: Sequence[Entry], model: ModelConfig) -> Iterator[Place]:
    """Yield all tensors of a model, layer by layer."""
    sizes = sizes_of(model)
    in_layers = [entry for entry in table if entry.where not in ("model", "output")]
    first, *rest = [entry for entry in table if entry.where in ("model", "output")]
    yield from _apply(first, sizes)
    for number in model.layer_numbers:
        has_experts = number in model.layers_with_experts
        for entry in in_layers:
            if entry.where == "layer" or (entry.where != "dense") == has_experts:
                yield from _apply(entry, sizes, number - 1)
    for entry in rest:
        if entry.where == "model" or not model.tie_embeddings:
            yield from _apply(entry, sizes)


def _apply(entry: Entry, sizes: Sizes, layer: int = 0) -> Iterator[Place]:
    ours = entry.ours.format(layer=layer)
    for expert in range(sizes["E"]) if entry.where == "expert" else (None,):
        theirs = {
            name.format(layer=layer, expert=expert): shape_of(letters, sizes) for name, letters in entry.theirs.items()
        }
        yield Place(ours, expert, theirs, entry.transform)
