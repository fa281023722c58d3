"""Conversion between text and the tokens of a prompt or a sample."""

import re
from collections.abc import Mapping, Sequence

from fmoe.errors import UserError
from pretrain.data.tokenizers import Tokenizer
from pretrain.data.tokenizers.base import sentinel

_SENTINEL = re.compile(r"<extra_id_(\d+)>")
_CONTEXT = 8  # preceding tokens, from which a tokenizer knows whether a piece begins a text
_UNFINISHED = "\ufffd"


class TextStream:
    """Incremental detokenizer: returns text once no later token can change it.

    A character may take several tokens.

    Args:
        before: tokens that precede the first added token; their text is not returned.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]):
        self._tokenizer = tokenizer
        self._ids = list(before[-_CONTEXT:])
        self._begin = 0
        self._shown = len(self._ids)

    def add(self, token: int) -> str:
        """Add a token. Return the text that is now complete; empty while a character is incomplete."""
        self._ids.append(token)
        return self._new(is_last=False)

    def close(self) -> str:
        """Return the rest of the text, with U+FFFD for invalid bytes."""
        return self._new(is_last=True)

    def _new(self, is_last: bool) -> str:
        shown = self._tokenizer.decode(self._ids[self._begin : self._shown])
        text = self._tokenizer.decode(self._ids[self._begin :])
        if len(text) <= len(shown) or (text.endswith(_UNFINISHED) and not is_last):
            return ""
        # The last decoded tokens are the context of the next.
        self._begin = max(self._shown - _CONTEXT, 0)
        self._shown = len(self._ids)
        return text[len(shown) :]


def encode_spans(text: str, tokenizer: Tokenizer, needs_spans: bool = True) -> list[int]:
    """Encode a text in which sentinels <extra_id_0>, <extra_id_1>, ... stand for the spans to fill in.

    The end token that a T5's encoder expects is appended.

    Raises:
        UserError: the text has no sentinel although ``needs_spans``, sentinels out of order, or more sentinels than the
            tokenizer has.
    """
    parts = _SENTINEL.split(text)  # texts and numbers of sentinels alternate
    texts = parts[::2]
    numbers = [int(number) for number in parts[1::2]]
    if needs_spans and not numbers:
        raise UserError(f"the prompt has no {sentinel(0)}: a T5 fills in spans marked by {sentinel(0)}, ...")
    if numbers != list(range(len(numbers))):
        names = ", ".join(map(sentinel, numbers))
        raise UserError(f"the prompt has {names}: sentinels must be numbered from 0 in order")
    if len(numbers) > len(tokenizer.sentinels):
        raise UserError(
            f"the prompt has {len(numbers)} sentinels, but the tokenizer {tokenizer.path} has only "
            f"{len(tokenizer.sentinels)}"
        )
    ids = []
    for number, part in zip([*numbers, None], texts, strict=True):  # the text before each sentinel, and the last
        ids += tokenizer.encode(part) if part else []
        ids.append(tokenizer.end_of_document if number is None else tokenizer.sentinels[number])
    return ids


def spans_of(tokens: Sequence[int], tokenizer: Tokenizer) -> dict[int, str]:
    """Return the text of each span in a T5's output, by the number of its sentinel. If a sentinel repeats, its first
    span counts."""
    numbers = {token: number for number, token in enumerate(tokenizer.sentinels)}
    spans: dict[int, list[int]] = {}
    span: list[int] = []  # tokens before the first sentinel are dropped
    for token in tokens:
        if token in numbers:
            span = []
            spans.setdefault(numbers[token], span)
        else:
            span.append(token)
    return {number: tokenizer.decode(ids) for number, ids in spans.items()}


def answer(text: str, tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return a text with the spans of a T5's output filled in; the output alone if the text has no sentinels."""
    return fill(text, spans_of(tokens, tokenizer)) if _SENTINEL.search(text) else tokenizer.decode(tokens)


def fill(text: str, spans: Mapping[int, str]) -> str:
    """Replace the sentinels of a text by their spans; sentinels without a span stay."""
    return _SENTINEL.sub(lambda match: spans.get(int(match[1]), match[0]), text)
