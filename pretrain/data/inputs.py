"""Input files of a run, opened and checked against the recipe before training."""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fmoe.errors import UserError, require
from pretrain.checkpoint.ranks import Ranks
from pretrain.config import Recipe
from pretrain.data.counts import TokenCounts, outside_vocabulary
from pretrain.data.indexed import IndexedCorpus, corpus_paths
from pretrain.data.kinds import build_samples, epochs_per_sample
from pretrain.data.samples import Samples, count_tokens, unigram_entropy
from pretrain.data.tokenizers import Tokenizer, load_tokenizer
from pretrain.data.tokenizers.base import read_declared
from pretrain.tracking.trackio import check_installed

# Fixed: every run validates on the same sequences, drawn at random so that a few represent all documents.
VALIDATION_SEED = 0
# Tokens that a rank reads between two collectives: few enough that no rank waits for long.
_TOKENS_A_ROUND = 1 << 26

logger = logging.getLogger(__name__)


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
    """One value per training corpus of a blend; see `pretrain.data.kinds.epochs_per_sample`."""
    warnings: tuple[str, ...] = ()
    """Probable mistakes in the data, one line each."""


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
    data, model = recipe.data, recipe.model
    _check_machine(recipe)
    tokenizer = open_tokenizer(recipe)
    with naming("data.train"):
        train = [open_corpus(prefix, tokenizer, bos_of(recipe, tokenizer)) for prefix in data.train]
        samples = build_samples(recipe, train, tokenizer, recipe.train.seed, data.weights)
        _check_ids(train, model.vocab_size)
        entropy = unigram_entropy(train, model.vocab_size) if all(corpus.counts for corpus in train) else None
    validation, sums = open_validation(recipe, tokenizer) if data.validation else (None, ())
    return Inputs(
        samples,
        validation,
        tuple(train),
        entropy,
        _fingerprints(train),
        sums,
        tokenizer.fingerprint,
        tokenizer.end_of_document,
        epochs_per_sample(recipe, train, data.weights),
        tuple(_doubts(recipe, validation, _fingerprints(train), sums)),
    )


def _doubts(
    recipe: Recipe, validation: Samples | None, train_sums: Sequence[str | None], sums: Sequence[str | None]
) -> Iterator[str]:
    data, wanted = recipe.data, recipe.train.validation_sequences
    train = list(zip(data.train, train_sums, strict=True))
    held_out = list(zip(data.validation, sums, strict=True))
    for key, corpora in (("data.train", train), ("data.validation", held_out)):
        for number, (prefix, sum_) in enumerate(corpora):
            for other, other_sum in corpora[:number]:
                if _is_same(prefix, sum_, other, other_sum):
                    yield f"{key}: {prefix} and {other} hold the same tokens"
    for prefix, sum_ in held_out:
        for other, other_sum in train:
            if _is_same(prefix, sum_, other, other_sum):
                yield f"data.validation: {prefix} holds the tokens of data.train={other}: val/loss is a training loss"
    if validation is not None and validation.samples_per_epoch < wanted:
        yield (
            f"train.validation_sequences={wanted} exceeds the {validation.samples_per_epoch} sequences of "
            f"data.validation={', '.join(data.validation)}: each validation repeats some"
        )


def _is_same(prefix: str, sum_: str | None, other: str, other_sum: str | None) -> bool:
    """Return whether two corpora have the same SHA-256 or are one file."""
    bins = [corpus_paths(path)[0] for path in (prefix, other)]
    return (sum_ is not None and sum_ == other_sum) or os.path.samefile(*bins)


def with_counts(inputs: Inputs, vocab_size: int) -> Inputs:
    """Return the inputs with ``unigram_entropy``. Tokens of a corpus without stored token counts are counted first.

    Collective: each rank reads its share of such a corpus. Rank 0 then stores the counts next to the corpus, if it is
    allowed to write there.

    Raises:
        UserError: a token id is outside the model's vocabulary; raised on every rank.
    """
    ranks = Ranks()
    for corpus in inputs.corpora:
        # The modification times of files may differ between machines, so rank 0 decides.
        if ranks.total(int(ranks.rank == 0 and corpus.counts is None)):
            if ranks.rank == 0:
                logger.warning("%s has no token counts: reading its %d tokens once", corpus.prefix, corpus.num_tokens)
            corpus.counts = _count_together(corpus, vocab_size, ranks)
        if ranks.rank == 0 and (reason := corpus.keep_counts()) is not None:
            logger.warning("token counts of %s are not saved, so each new run counts again: %s", corpus.prefix, reason)
    with naming("data.train"):
        return replace(inputs, unigram_entropy=unigram_entropy(inputs.corpora, vocab_size))


def _count_together(corpus: IndexedCorpus, vocab_size: int, ranks: Ranks) -> TokenCounts:
    unigrams = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, corpus.num_tokens, ranks.size * _TOKENS_A_ROUND):
        with ranks.together(), naming("data.train"):
            begin = start + ranks.rank * _TOKENS_A_ROUND
            chunk = corpus.flat[begin : begin + _TOKENS_A_ROUND]
            if len(chunk):
                least, largest = int(chunk.min()), int(chunk.max())
                if least < 0 or largest >= vocab_size:
                    raise outside_vocabulary(corpus.prefix, least if least < 0 else largest, vocab_size)
                unigrams += np.bincount(chunk, minlength=vocab_size)
    if ranks.size > 1:
        total = torch.from_numpy(unigrams).to(ranks.device())
        dist.all_reduce(total)
        unigrams = total.cpu().numpy()
    used = np.flatnonzero(unigrams)
    largest = int(used[-1]) if len(used) else -1
    return TokenCounts(0, largest, unigrams[: largest + 1])


def _check_ids(corpora: Sequence[IndexedCorpus], vocab_size: int) -> None:
    """Raise UserError for a token id outside the vocabulary. Large corpora without token counts are not checked."""
    for corpus in corpora:
        if corpus.counts is None and corpus.num_tokens <= _TOKENS_A_ROUND:
            corpus.counts = count_tokens(corpus)
        if corpus.counts is not None:
            corpus.counts.check(corpus.prefix, vocab_size)


def open_tokenizer(
    recipe: Recipe, path: str | Path | None = None, sha256: str | None = None, end_of_document: int | None = None
) -> Tokenizer:
    """Open the tokenizer of a recipe.

    Args:
        path: new location of ``data.tokenizer``; None if it has not moved.
        sha256: required SHA-256 of the file; None accepts any.
        end_of_document: required id that ends documents; None accepts any.

    Raises:
        UserError: the file is missing, is damaged, has another SHA-256 or end of document, or its vocabulary exceeds
            the model's.
    """
    model, key = recipe.model, "data.tokenizer" if path is None else "--tokenizer"
    with naming(key):
        path = recipe.data.tokenizer if path is None else path
        if Path(path).is_char_device():
            raise UserError(f"{path} is a device, not a file")
        tokenizer = load_tokenizer(path)
    if sha256 not in (None, tokenizer.fingerprint):
        raise UserError(
            f"the model was trained with another tokenizer than {tokenizer.path}, whose SHA-256 begins with "
            f"{tokenizer.fingerprint[:12]}: use the file whose SHA-256 begins with {sha256[:12]}"
        )
    if end_of_document not in (None, tokenizer.end_of_document):
        raise UserError(
            f"the model was trained on documents that end with token {end_of_document}, but {tokenizer.path} ends them "
            f"with token {tokenizer.end_of_document}: restore the files beside it, such as tokenizer_config.json"
        )
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"the vocabulary of {key}={tokenizer.path} has {tokenizer.vocab_size} entries, "
            f"which exceeds model.vocab_size={model.vocab_size}"
        )
    return tokenizer


def open_trained_tokenizer(
    recipe: Recipe, path: str | Path | None, data: Mapping[str, Any], sha256: str | None = None
) -> Tokenizer:
    """Open the tokenizer that a checkpoint's model was trained with.

    Older checkpoints do not record the token that ends documents. That of the training corpora is then used, if they
    are readable. Otherwise a declared token that the older rule by names would not have chosen is a warning.

    Args:
        path: as for `open_tokenizer`.
        data: the record ``data`` in the checkpoint's state.
        sha256: the tokenizer's SHA-256 if ``data`` has none.

    Raises:
        UserError: as for `open_tokenizer`.
    """
    tokenizer = open_tokenizer(recipe, path, data.get("tokenizer") or sha256, data.get("end_of_document"))
    if data.get("end_of_document") is not None:
        return tokenizer
    end, old = _recorded_end(recipe, tokenizer), tokenizer.end_by_name
    if end in tokenizer.special_ids:
        tokenizer.end_documents_with(end)
    elif old not in (None, tokenizer.end_of_document):
        names = {i: name for name, i in tokenizer.ids.items()}
        logger.warning(
            "the checkpoint does not record which token ends documents: %r is eos_token in %s, but versions of fmoe "
            "that ignored this file used %r; to keep it, set eos_token to %r",
            names[tokenizer.end_of_document],
            read_declared(tokenizer.path).files["eos_token"],
            names[old],
            names[old],
        )
    return tokenizer


def _recorded_end(recipe: Recipe, tokenizer: Tokenizer) -> int | None:
    """Return the id that ends the documents of the first readable training corpus with this tokenizer."""
    for prefix in recipe.data.train:
        with contextlib.suppress(UserError, OSError):
            corpus = IndexedCorpus(prefix)
            if corpus.tokenizer_fingerprint == tokenizer.fingerprint:
                return corpus.description["tokenizer"].get("end_of_document")
    return None


def open_validation(recipe: Recipe, tokenizer: Tokenizer) -> tuple[Samples, tuple[str | None, ...]]:
    """Return a recipe's validation samples, and the SHA-256 of each validation corpus's tokens (None if unknown).

    Raises:
        UserError: as for `open_inputs`; the message begins with ``data.validation``.
    """
    with naming("data.validation"):
        bos = bos_of(recipe, tokenizer)
        corpora = [open_corpus(prefix, tokenizer, bos) for prefix in recipe.data.validation]
        samples = build_samples(recipe, corpora, tokenizer, VALIDATION_SEED)
        _check_ids(corpora, recipe.model.vocab_size)
    return samples, _fingerprints(corpora)


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """Convert a UserError or OSError of the ``with`` block to a UserError whose message begins with ``key``."""
    try:
        yield
    except (UserError, OSError) as error:
        raise UserError(f"{key}: {error}") from error


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


def _fingerprints(corpora: list[IndexedCorpus]) -> tuple[str | None, ...]:
    return tuple(corpus.description.get("sha256", {}).get("bin") for corpus in corpora)


def open_corpus(prefix: str | Path, tokenizer: Tokenizer, bos: int | None = None) -> IndexedCorpus:
    """Open a corpus by its prefix.

    Args:
        bos: id that begins each document; None if no document begins with BOS.

    Raises:
        UserError: the corpus is missing or damaged; or it was prepared with another tokenizer, end of document or
            ``bos``.
    """
    corpus = IndexedCorpus(prefix)
    if corpus.tokenizer_fingerprint not in (None, tokenizer.fingerprint):
        raise UserError(
            f"{prefix} was prepared with another tokenizer than the model's, {tokenizer.path}: prepare "
            "the corpus again with the model's tokenizer"
        )
    described = corpus.description.get("tokenizer", {})
    end = described.get("end_of_document", tokenizer.end_of_document)
    if end != tokenizer.end_of_document:
        raise UserError(
            f"the documents of {prefix} end with token {end}, but those of the tokenizer {tokenizer.path} with token "
            f"{tokenizer.end_of_document}: prepare the corpus again, or correct eos_token in tokenizer_config.json "
            "beside the tokenizer"
        )
    found = described.get("bos")
    if not described and corpus.num_tokens:  # written by Megatron
        found = bos if int(corpus.flat[0]) == bos else None
    if found != bos:
        begin = "without BOS" if found is None else f"with BOS (token {found})"
        value, how = ("false", "without --bos") if bos is None else (f"true (token {bos})", "with --bos")
        raise UserError(
            f"data.bos={value}, but the documents of {prefix} begin {begin}: prepare the corpus again {how}, or change "
            "data.bos"
        )
    return corpus


def bos_of(recipe: Recipe, tokenizer: Tokenizer) -> int | None:
    """Return the id that begins a document; None if ``data.bos`` is false.

    Raises:
        UserError: the tokenizer has no BOS token; or this token also ends documents, and ``data.document_mask`` is set.
    """
    if not recipe.data.bos:
        return None
    with naming("data.bos=true"):
        bos = tokenizer.role("bos")
    if bos == tokenizer.end_of_document and recipe.data.document_mask:
        raise UserError(
            f"data.document_mask=true is not supported with data.bos=true for {tokenizer.path}, whose BOS also ends "
            "documents: use data.bos=false"
        )
    return bos
