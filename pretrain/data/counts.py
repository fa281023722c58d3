"""Occurrences of each token id in a corpus: counted once, and kept next to it.

``PREFIX.json`` holds the counts of a corpus that `pretrain.data.indexed.IndexedWriter` wrote. For any other,
``PREFIX.counts`` keeps them, with size and time of the ``.bin`` that they belong to.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fmoe.errors import UserError
from pretrain.data.files import beside, replacing

_VERSION = 1
_MAX_IDS = 1 << 24  # beyond any vocabulary: a damaged id must not ask for an array as long as it is large
_PENDING = 1 << 20  # tokens that wait to be counted together: documents are shorter than a vocabulary is long


@dataclass(frozen=True, eq=False)
class TokenCounts:
    """The tokens of a corpus by id.

    Attributes:
        least: 0, or the lowest token id if that is negative.
        largest: token id; -1 in a corpus of no tokens.
        unigrams: tokens of each id from 0 to ``largest``, int64; None if an id is no index of such an array.
    """

    least: int
    largest: int
    unigrams: np.ndarray | None

    def check(self, prefix: Path, vocab_size: int) -> np.ndarray:
        """Return the unigrams; raise UserError if a token id is outside ``0 <= id < vocab_size``."""
        if self.least < 0 or self.largest >= vocab_size or self.unigrams is None:
            raise outside_vocabulary(prefix, self.least if self.least < 0 else self.largest, vocab_size)
        return self.unigrams

    def as_json(self) -> dict[str, Any]:
        """The counts as JSON values."""
        unigrams = None if self.unigrams is None else self.unigrams.tolist()
        return {"version": _VERSION, "least": self.least, "largest": self.largest, "unigrams": unigrams}

    @classmethod
    def from_json(cls, values: Any, num_tokens: int) -> "TokenCounts | None":
        """The counts of a corpus of ``num_tokens`` tokens; None where they are of a version that is not known.

        Raises:
            ValueError: they contradict themselves or ``num_tokens``.
        """
        if not isinstance(values, dict) or values.get("version") != _VERSION:
            return None
        try:
            least, largest, unigrams = values["least"], values["largest"], values["unigrams"]
        except LookupError as error:
            raise ValueError(f"token counts without {error}") from error
        is_countable = unigrams is not None
        # sum() of Python's own numbers: int64 would wrap.
        if (
            {type(number) for number in (least, largest, *(unigrams or []))} != {int}
            or least > 0
            or is_countable != (least == 0 and largest < _MAX_IDS)
            or (is_countable and (len(unigrams) != largest + 1 or min(unigrams, default=0) < 0))
            or (is_countable and sum(unigrams) != num_tokens)
        ):
            raise ValueError(f"token counts of another corpus than one of {num_tokens} tokens")
        return cls(least, largest, np.array(unigrams, dtype=np.int64) if is_countable else None)


class TokenCounter:
    """Counts tokens as they come, in memory of a vocabulary and a million tokens."""

    def __init__(self) -> None:
        self._unigrams = np.zeros(0, dtype=np.int64)
        self._least, self._largest = 0, -1
        self._pending: list[np.ndarray] = []
        self._num_pending = 0

    def add(self, tokens: np.ndarray) -> None:
        """Count some tokens; they must not change afterwards."""
        self._pending.append(tokens)
        self._num_pending += len(tokens)
        if self._num_pending >= _PENDING:
            self._count()

    def finish(self) -> TokenCounts:
        """The counts of all tokens so far."""
        self._count()
        is_countable = self._least >= 0 and self._largest < _MAX_IDS
        return TokenCounts(self._least, self._largest, self._unigrams if is_countable else None)

    def _count(self) -> None:
        if not self._num_pending:
            return
        tokens = np.concatenate(self._pending)
        self._pending, self._num_pending = [], 0
        self._least = min(self._least, int(tokens.min()))
        self._largest = max(self._largest, int(tokens.max()))
        if self._least < 0 or self._largest >= _MAX_IDS:
            return
        counts = np.bincount(tokens, minlength=self._largest + 1)
        counts[: len(self._unigrams)] += self._unigrams
        self._unigrams = counts


def outside_vocabulary(prefix: Path, token: int, vocab_size: int) -> UserError:
    """The error about a token id that the model has no embedding for."""
    return UserError(f"{prefix} has the token id {token}, outside vocab_size={vocab_size}")


def chunks(tokens: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """The tokens, ``size`` at a time."""
    for start in range(0, len(tokens), size):
        yield tokens[start : start + size]


def counts_path(prefix: Path) -> Path:
    """Return the file that keeps the counts of a corpus that came without."""
    return beside(prefix, ".counts")


def keep(prefix: Path, bin_path: Path, counts: TokenCounts) -> str | None:
    """Write the counts next to the corpus; return why that is impossible, or None. A file of another purpose stays."""
    text = json.dumps({"bin": _identity(bin_path), "counts": counts.as_json()}) + "\n"
    try:
        if counts_path(prefix).exists() and not isinstance(json.loads(counts_path(prefix).read_bytes()), dict):
            return f"{counts_path(prefix)} exists and is not ours"
        with replacing(counts_path(prefix)) as (file,):
            file.write(text.encode())
    except (OSError, ValueError, RecursionError) as error:  # a UserError is a ValueError
        return str(error)
    return None


def kept(prefix: Path, bin_path: Path, num_tokens: int) -> TokenCounts | None:
    """Return the counts that `keep` wrote; None without such counts, or if the tokens were replaced since."""
    try:
        values = json.loads(counts_path(prefix).read_bytes())
        if values["bin"] != _identity(bin_path):
            return None
        return TokenCounts.from_json(values["counts"], num_tokens)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None  # it is a memory of what can be counted again


def _identity(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
