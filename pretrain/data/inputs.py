"""Input files of a run, opened and checked against the recipe before training."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import torch

from fmoe import random
from fmoe.errors import UserError, require
from pretrain.config import Recipe
from pretrain.data.blend import Blend
from pretrain.data.conversations import Conversations
from pretrain.data.counting import check_ids, count_missing, unigram_entropy
from pretrain.data.custom import open_source
from pretrain.data.indexed import IndexedCorpus, corpus_paths
from pretrain.data.opening import bos_of, naming, open_corpus, open_tokenizer
from pretrain.data.samples import GPTSamples, Samples
from pretrain.data.tokenizers import Tokenizer
from pretrain.models import kind_of
from pretrain.tracking.trackio import check_installed

# Fixed: every run validates on the same sequences, drawn at random so that a few represent all documents.
VALIDATION_SEED = 0
_MUCH_PADDING = 0.1  # of the tokens


@dataclass(frozen=True)
class Inputs:
    """Samples, corpora and checksums of a run.

    Attributes:
        train: training samples.
        validation: validation samples; None without validation.
        corpora: training corpora.
        unigram_entropy: entropy of the training corpora's token frequencies in nats; None while a corpus has no counts
            (see `with_counts`).
        fingerprints: SHA-256 of the tokens of each training corpus; None for a corpus without a checksum.
        validation_fingerprints: the same for each validation corpus.
        tokenizer_fingerprint: SHA-256 of the tokenizer's file.
        end_of_document: id that ends documents.
        epochs_per_sample: one value per training corpus of a blend (`Blend.epochs_per_sample`).
        warnings: probable mistakes in the data, one line each.
    """

    train: Samples
    validation: Samples | None
    corpora: tuple[IndexedCorpus, ...]
    unigram_entropy: float | None
    fingerprints: tuple[str | None, ...] = ()
    validation_fingerprints: tuple[str | None, ...] = ()
    tokenizer_fingerprint: str | None = None
    end_of_document: int | None = None
    epochs_per_sample: tuple[float, ...] = ()
    warnings: tuple[str, ...] = ()


def open_inputs(recipe: Recipe) -> Inputs:
    """Open the tokenizer and the corpora of a recipe.

    Raises:
        UserError: for each of

            * a file that is missing or damaged,
            * a corpus that is shorter than a sequence, or that was prepared with another tokenizer or ``data.bos``,
            * a tokenizer with a larger vocabulary than the model's,
            * a token id outside the model's vocabulary (large corpora without counts are not checked; `with_counts`
              checks the training corpora),
            * a special token, a package or a GPU that the recipe needs and that is missing.
    """
    _check_machine(recipe)
    vocab_size = recipe.model.vocab_size
    data = recipe.data
    needs_tokenizer = data.tokenizer or data.samples is None
    tokenizer: Any = open_tokenizer(recipe) if needs_tokenizer else None
    samples: Samples
    corpora: list[IndexedCorpus] = []
    epochs_per_sample: tuple[float, ...] = ()
    entropy = None
    with naming("data.train"):
        if data.samples is not None:
            samples, fingerprints = open_source(recipe, data.train, recipe.train.seed)
        else:
            corpora = _open_corpora(recipe, data.train, tokenizer)
            seed = recipe.train.seed
            samples, epochs_per_sample = _build_samples(recipe, corpora, tokenizer, seed, data.weights)
            check_ids(corpora, vocab_size)
            if all(corpus.counts for corpus in corpora):
                entropy = unigram_entropy(corpora, vocab_size)
            fingerprints = _fingerprints(recipe, corpora)
    validation = None
    held_out: tuple[str | None, ...] = ()
    if data.validation:
        validation, held_out = open_validation(recipe, tokenizer)
    warnings: list[str] = []
    if data.samples is None:
        warnings = [
            *_conversation_doubts("data.train", samples),
            *_conversation_doubts("data.validation", validation),
            *_doubts(recipe, fingerprints, held_out),
        ]
    warnings += _repeats(recipe, validation)
    return Inputs(
        train=samples,
        validation=validation,
        corpora=tuple(corpora),
        unigram_entropy=entropy,
        fingerprints=fingerprints,
        validation_fingerprints=held_out,
        tokenizer_fingerprint=getattr(tokenizer, "fingerprint", None),
        end_of_document=getattr(tokenizer, "end_of_document", None),
        epochs_per_sample=epochs_per_sample,
        warnings=tuple(warnings),
    )


def open_validation(recipe: Recipe, tokenizer: Any) -> tuple[Samples, tuple[str | None, ...]]:
    """Return a recipe's validation samples, and the SHA-256 of each validation corpus's tokens (None if unknown).

    Args:
        tokenizer: may be None with ``data.samples``.

    Raises:
        UserError: as for `open_inputs`; the message begins with ``data.validation``.
    """
    with naming("data.validation"):
        if recipe.data.samples is not None:
            return open_source(recipe, recipe.data.validation, VALIDATION_SEED)
        corpora = _open_corpora(recipe, recipe.data.validation, tokenizer)
        samples, _ = _build_samples(recipe, corpora, tokenizer, VALIDATION_SEED)
        check_ids(corpora, recipe.model.vocab_size)
    return samples, _fingerprints(recipe, corpora)


def with_counts(inputs: Inputs, vocab_size: int) -> Inputs:
    """Return the inputs with ``unigram_entropy``. Tokens of a corpus without stored token counts are counted first.

    Collective; see `pretrain.data.counting.count_missing`.

    Raises:
        UserError: a token id is outside the model's vocabulary; raised on every rank.
    """
    if not inputs.corpora:  # samples of a registered source
        return inputs
    count_missing(inputs.corpora, vocab_size)
    with naming("data.train"):
        return replace(inputs, unigram_entropy=unigram_entropy(inputs.corpora, vocab_size))


def _build_samples(
    recipe: Recipe,
    corpora: Sequence[IndexedCorpus],
    tokenizer: Tokenizer,
    seed: int,
    weights: Sequence[float] = (),
) -> tuple[Samples, tuple[float, ...]]:
    """Build the samples for a recipe's model, in an order that depends on ``seed``.

    Args:
        weights: weights of the corpora in a blend; empty to read them as one corpus.

    Returns:
        The samples and, for a blend, its `Blend.epochs_per_sample`.

    Raises:
        UserError: a corpus is too short, or the tokenizer lacks a special token.
    """
    kind = kind_of(recipe)
    length = kind.block_length(recipe)

    def build(corpora: Sequence[IndexedCorpus], seed: int) -> GPTSamples | Conversations:
        if recipe.data.chat:
            return Conversations(corpora, length, seed, padding=tokenizer.end_of_document)
        return GPTSamples(corpora, length, seed, streams=recipe.streams)

    epochs_per_sample: tuple[float, ...] = ()
    blocks: GPTSamples | Conversations | Blend
    if weights:
        # Each member has its own order, even if a corpus is named twice.
        seeds = [random.key("blend", seed, number) for number in range(len(corpora))]
        blocks = Blend([build([corpus], key) for corpus, key in zip(corpora, seeds, strict=True)], weights)
        epochs_per_sample = blocks.epochs_per_sample
    else:
        blocks = build(corpora, seed)
    return kind.samples(recipe, blocks, tokenizer, seed, length), epochs_per_sample


def _open_corpora(recipe: Recipe, prefixes: Sequence[str], tokenizer: Tokenizer) -> list[IndexedCorpus]:
    bos = bos_of(recipe, tokenizer)
    return [open_corpus(prefix, tokenizer, bos, chat=recipe.data.chat) for prefix in prefixes]


def _fingerprints(recipe: Recipe, corpora: Sequence[IndexedCorpus]) -> tuple[str | None, ...]:
    sums = [corpus.description.get("sha256", {}) for corpus in corpora]
    if recipe.data.chat:  # the index says which tokens are answers
        return tuple(hashlib.sha256(f"{each['bin']}{each['idx']}".encode()).hexdigest() for each in sums)
    return tuple(each.get("bin") for each in sums)


def _conversation_doubts(key: str, samples: Samples | None) -> Iterator[str]:
    """Yield a line if conversations do not fit into a sequence, and one if much of the samples is padding."""
    for member in samples.members if isinstance(samples, Blend) else [samples]:
        if not isinstance(member, Conversations):
            continue
        length = member.sequence_length
        if member.num_cut or member.num_left_out:
            yield (
                f"{key}: of {member.num_conversations:,} conversations, {member.num_cut:,} are cut to "
                f"model.sequence_length={length}, and {member.num_left_out:,} are left out, because their first answer "
                "begins later"
            )
        if member.padding_share > _MUCH_PADDING:
            yield f"{key}: {member.padding_share:.0%} of the samples' tokens are padding"


def _doubts(
    recipe: Recipe,
    fingerprints: Sequence[str | None],
    held_out_fingerprints: Sequence[str | None],
) -> Iterator[str]:
    """Yield a line for each pair of corpora with the same tokens."""
    data = recipe.data
    train = list(zip(data.train, fingerprints, strict=True))
    held_out = list(zip(data.validation, held_out_fingerprints, strict=True))
    for key, corpora in (("data.train", train), ("data.validation", held_out)):
        for other, corpus in combinations(corpora, 2):
            if _is_same(corpus, other):
                yield f"{key}: {corpus[0]} and {other[0]} hold the same tokens"
    for corpus, other in product(held_out, train):
        if _is_same(corpus, other):
            yield (
                f"data.validation: {corpus[0]} holds the tokens of data.train={other[0]}: val/loss is a training loss"
            )


def _repeats(recipe: Recipe, validation: Samples | None) -> Iterator[str]:
    """Yield a line if a validation repeats sequences."""
    count = recipe.train.validation_sequences
    if validation is not None and validation.samples_per_epoch < count:
        yield (
            f"train.validation_sequences={count} exceeds the {validation.samples_per_epoch} sequences of "
            f"data.validation={', '.join(recipe.data.validation)}: each validation repeats some"
        )


def _is_same(corpus: tuple[str, str | None], other: tuple[str, str | None]) -> bool:
    """Return whether two corpora, given by prefix and SHA-256, have the same SHA-256 or are one file."""
    prefix, fingerprint = corpus
    other_prefix, other_fingerprint = other
    if fingerprint is not None and fingerprint == other_fingerprint:
        return True
    return os.path.samefile(corpus_paths(prefix)[0], corpus_paths(other_prefix)[0])


def _check_machine(recipe: Recipe) -> None:
    """Check for optional packages and devices that the recipe needs."""
    if recipe.tracking.wandb:
        require("wandb", "pretrain", "tracking.wandb=true")
    if recipe.tracking.tensorboard:
        require("tensorboard", "tensorboard", "tracking.tensorboard=true")
    if recipe.tracking.trackio:
        check_installed("tracking.trackio=true")
    if recipe.optimizer.cpu_offload and not torch.cuda.is_available():
        raise UserError(
            f"optimizer.cpu_offload={recipe.optimizer.cpu_offload} needs a GPU, and torch finds none: use 0, since all "
            "state is in host memory already"
        )
    if recipe.optimizer.name == "adamw8bit":
        require("torchao", "adamw8bit", "optimizer.name=adamw8bit")
