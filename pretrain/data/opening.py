"""Tokenizers and corpora of a recipe, checked against it when they are opened."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fmoe.errors import UserError
from pretrain.config import Recipe
from pretrain.data.indexed import IndexedCorpus
from pretrain.data.tokenizers import Tokenizer, load_tokenizer
from pretrain.data.tokenizers.base import read_declared

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """Convert a UserError or OSError of the ``with`` block to a UserError whose message begins with ``key``."""
    try:
        yield
    except (UserError, OSError) as error:
        raise UserError(f"{key}: {error}") from error


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
    key = "--tokenizer"
    if path is None:
        key = "data.tokenizer"
        path = recipe.data.tokenizer
    with naming(key):
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
    if tokenizer.vocab_size > recipe.model.vocab_size:
        raise UserError(
            f"the vocabulary of {key}={tokenizer.path} has {tokenizer.vocab_size} entries, "
            f"which exceeds model.vocab_size={recipe.model.vocab_size}"
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
    end = _recorded_end(recipe, tokenizer)
    old = tokenizer.end_by_name
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


def open_corpus(
    prefix: str | Path, tokenizer: Tokenizer, bos: int | None = None, *, chat: bool = False
) -> IndexedCorpus:
    """Open a corpus by its prefix.

    Args:
        bos: id that begins each document; None if no document begins with BOS.
        chat: the documents are conversations.

    Raises:
        UserError: the corpus is missing or damaged; or it was prepared with another tokenizer, end of document,
            ``bos`` or ``chat``.
    """
    corpus = IndexedCorpus(prefix)
    if chat and "chat" not in corpus.description:
        raise UserError(f"{prefix} holds text, but data.chat=true needs conversations: prepare them with --chat")
    if not chat and "chat" in corpus.description:
        raise UserError(
            f"{prefix} holds conversations, which only data.train and data.validation with data.chat=true can use"
        )
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
    corpus_bos = described.get("bos")
    if not described and corpus.num_tokens:  # written by Megatron
        corpus_bos = bos if int(corpus.flat[0]) == bos else None
    if corpus_bos != bos:
        begin = "without BOS" if corpus_bos is None else f"with BOS (token {corpus_bos})"
        setting = "false" if bos is None else f"true (token {bos})"
        option = "without --bos" if bos is None else "with --bos"
        raise UserError(
            f"data.bos={setting}, but the documents of {prefix} begin {begin}: prepare the corpus again {option}, or "
            "change data.bos"
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
