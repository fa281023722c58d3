"""Construction of the samples for each kind of model."""

from collections.abc import Sequence

import numpy as np

from fmoe import random
from pretrain.config import Recipe
from pretrain.data.blend import Blend
from pretrain.data.indexed import IndexedCorpus
from pretrain.data.masking import Masking
from pretrain.data.packing import DocumentMask
from pretrain.data.samples import Blocks, GPTSamples, Samples, Segments
from pretrain.data.spans import SpanCorruption
from pretrain.data.tokenizers import Tokenizer


def build_samples(
    recipe: Recipe,
    corpora: Sequence[IndexedCorpus],
    tokenizer: Tokenizer,
    seed: int,
    weights: Sequence[float] = (),
) -> Samples:
    """Build the samples for a recipe's model, in an order that depends on ``seed``.

    Args:
        weights: weights of the corpora in a blend; empty to read them as one corpus.

    Raises:
        UserError: a corpus is too short, or the tokenizer lacks a special token.
    """
    model, data = recipe.model, recipe.data
    if recipe.streams:
        return Segments(GPTSamples(corpora, model.sequence_length, seed, streams=recipe.streams))
    blocks = _blocks(corpora, block_length(recipe), seed, weights)
    if model.kind == "t5":
        end, start = tokenizer.end_of_document, tokenizer.role("pad")
        return SpanCorruption(blocks, recipe.spans, tokenizer.sentinels, end, start, seed)
    if model.kind == "bert":
        return build_masking(blocks, model.sequence_length, data.noise_density, tokenizer, seed)
    return DocumentMask(blocks, tokenizer.end_of_document) if data.document_mask else blocks


def block_length(recipe: Recipe) -> int:
    """Return the length of a block in tokens, without the last token, which is also the first of the next block."""
    if recipe.model.kind == "t5":
        return recipe.spans.block
    return recipe.model.sequence_length - (2 if recipe.model.kind == "bert" else 0)


def epochs_per_sample(
    recipe: Recipe, corpora: Sequence[IndexedCorpus], weights: Sequence[float] = ()
) -> tuple[float, ...]:
    """Return the average share of each corpus's epoch that one sample of the blend uses; () without ``weights``."""
    length = block_length(recipe)
    return tuple(
        weight / sum(weights) / ((corpus.num_tokens - 1) // length)
        for weight, corpus in zip(weights, corpora, strict=False)
    )


def build_masking(
    blocks: Blocks, sequence_length: int, noise_density: float, tokenizer: Tokenizer, seed: int
) -> Masking:
    """Build the samples of a BERT model from blocks.

    Raises:
        UserError: the tokenizer lacks a special token.
    """
    return Masking(
        blocks,
        sequence_length,
        noise_density,
        cls=tokenizer.role("cls"),
        sep=tokenizer.role("sep"),
        mask=tokenizer.role("mask"),
        end=tokenizer.end_of_document,
        text=np.array(sorted(set(range(tokenizer.vocab_size)) - tokenizer.special_ids), dtype=np.int64),
        seed=seed,
    )


def _blocks(corpora: Sequence[IndexedCorpus], length: int, seed: int, weights: Sequence[float]) -> Blocks:
    if not weights:
        return GPTSamples(corpora, length, seed)
    # Each member has its own order, even if a corpus is named twice.
    keys = [random.key("blend", seed, number) for number in range(len(corpora))]
    return Blend([GPTSamples([corpus], length, key) for corpus, key in zip(corpora, keys, strict=True)], weights)
