"""The files that a run reads, opened and checked against the recipe before anything else happens."""

from dataclasses import dataclass

from fmoe.errors import UserError
from pretrain.config import Recipe
from pretrain.data.indexed import IndexedCorpus
from pretrain.data.samples import GPTSamples, unigram_entropy
from pretrain.data.tokenizer import Tokenizer

# The same sequences for every run: a random choice, so that a few of them stand for all documents.
_VALIDATION_SEED = 0


@dataclass(frozen=True)
class Inputs:
    """Training and validation samples (None: no validation), and the training corpus's unigram entropy in nats."""

    train: GPTSamples
    validation: GPTSamples | None
    unigram_entropy: float


def open_inputs(recipe: Recipe) -> Inputs:
    """Opens tokenizer and corpora.

    Raises:
        UserError: a file is missing or damaged, a corpus is empty or shorter than a sequence, the tokenizer's
            vocabulary or a token id is larger than the model's vocabulary.
    """
    data, model = recipe.data, recipe.model
    tokenizer = Tokenizer.load(data.tokenizer)
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"the vocabulary of data.tokenizer={data.tokenizer} has {tokenizer.vocab_size} entries, "
            f"more than model.vocab_size={model.vocab_size}"
        )
    train = [_corpus(prefix, tokenizer) for prefix in data.train]
    validation = [_corpus(prefix, tokenizer) for prefix in data.validation]
    if validation:
        unigram_entropy(validation, model.vocab_size)  # meets every token: none may lie beyond the vocabulary
    return Inputs(
        train=GPTSamples(train, model.sequence_length, recipe.train.seed),
        validation=GPTSamples(validation, model.sequence_length, _VALIDATION_SEED) if validation else None,
        unigram_entropy=unigram_entropy(train, model.vocab_size),
    )


def _corpus(prefix: str, tokenizer: Tokenizer) -> IndexedCorpus:
    corpus = IndexedCorpus(prefix)
    if corpus.tokenizer_fingerprint not in (None, tokenizer.fingerprint):
        raise UserError(f"{prefix} was prepared with another tokenizer than data.tokenizer={tokenizer.path}")
    return corpus
