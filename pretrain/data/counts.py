"""Token counts of a corpus by id, counted once and stored next to the corpus.

``PREFIX.json`` holds the counts of a corpus written by `pretrain.data.indexed.IndexedWriter`. For any other corpus, or
if the ``.bin`` is newer than the JSON, ``PREFIX.counts`` holds them, with the size and modification time of the
``.bin``.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fmoe.errors import UserError
from pretrain.files import replacing, with_ending

_VERSION = 1
_MAX_IDS = 1 << 24  # exceeds any vocabulary; bounds the array that a damaged id would allocate
_PENDING = 1 << 20  # tokens per np.bincount, which takes time for each id: one document would be too few


@dataclass(frozen=True, eq=False)
class TokenCounts:
    """Number of tokens of each id in a corpus.

    Attributes:
        least: 0, or the lowest token id if that is negative.
        largest: the highest token id; -1 in a corpus without tokens.
        unigrams: number of tokens of each id, int64 [largest + 1]. None if an id is negative, or at least 2^24.
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
        """Return the counts as JSON values."""
        unigrams = None if self.unigrams is None else self.unigrams.tolist()
        return {"version": _VERSION, "least": self.least, "largest": self.largest, "unigrams": unigrams}

    @classmethod
    def from_json(cls, values: Any, num_tokens: int) -> "TokenCounts | None":
        """Parse the output of `as_json` for a corpus of ``num_tokens`` tokens; None if it has an unknown version.

        Raises:
            ValueError: the counts are incomplete, or contradict each other or ``num_tokens``.
        """
        if not isinstance(values, dict) or values.get("version") != _VERSION:
            return None
        try:
            least = values["least"]
            largest = values["largest"]
            unigrams = values["unigrams"]
        except LookupError as error:
            raise ValueError(f"the token counts have no key {error}") from error
        is_countable = unigrams is not None
        # sum() of Python integers: int64 would wrap.
        if (
            {type(number) for number in (least, largest, *(unigrams or []))} != {int}
            or least > 0
            or is_countable != (least == 0 and largest < _MAX_IDS)
            or (is_countable and (len(unigrams) != largest + 1 or min(unigrams, default=0) < 0))
            or (is_countable and sum(unigrams) != num_tokens)
        ):
            raise ValueError(f"the token counts do not match a corpus of {num_tokens} tokens")
        return cls(least, largest, np.array(unigrams, dtype=np.int64) if is_countable else None)


class TokenCounter:
    """Incremental counter of tokens.

    It stores a count per id. It also stores added tokens until there are about a million, then counts them.
    """

    def __init__(self) -> None:
        self._unigrams = np.zeros(0, dtype=np.int64)
        self._least = 0
        self._largest = -1
        self._pending: list[np.ndarray] = []
        self._num_pending = 0

    def add(self, tokens: np.ndarray) -> None:
        """Count tokens; the array must not change afterwards."""
        self._pending.append(tokens)
        self._num_pending += len(tokens)
        if self._num_pending >= _PENDING:
            self._count()

    def finish(self) -> TokenCounts:
        """Return the counts of all tokens so far."""
        self._count()
        is_countable = self._least >= 0 and self._largest < _MAX_IDS
        return TokenCounts(self._least, self._largest, self._unigrams if is_countable else None)

    def _count(self) -> None:
        if not self._num_pending:
            return
        tokens = np.concatenate(self._pending)
        self._pending = []
        self._num_pending = 0
        self._least = min(self._least, int(tokens.min()))
        self._largest = max(self._largest, int(tokens.max()))
        if self._least < 0 or self._largest >= _MAX_IDS:
            return
        counts = np.bincount(tokens, minlength=self._largest + 1)
        counts[: len(self._unigrams)] += self._unigrams
        self._unigrams = counts


def outside_vocabulary(prefix: Path, token: int, vocab_size: int) -> UserError:
    """Return the error for a token id without a row in the model's embedding."""
    return UserError(
        f"{prefix} has the token id {token}, outside model.vocab_size={vocab_size}: prepare the corpus again, "
        "with the model's tokenizer"
    )


def chunks(tokens: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Yield the tokens, ``size`` at a time."""
    for start in range(0, len(tokens), size):
        yield tokens[start : start + size]


def counts_path(prefix: Path) -> Path:
    """Return ``PREFIX.counts``, the file that `keep` writes."""
    return with_ending(prefix, ".counts")


def keep(prefix: Path, bin_path: Path, counts: TokenCounts) -> str | None:
    """Write the counts to ``PREFIX.counts``. Return the reason if that fails, else None.

    An existing ``PREFIX.counts`` that is not a JSON object is not replaced.
    """
    path = counts_path(prefix)
    text = json.dumps({"bin": _identity(bin_path), "counts": counts.as_json()}) + "\n"
    is_other = f"{path} exists and is not a file of counts"
    try:
        if path.exists() and not isinstance(json.loads(path.read_bytes()), dict):
            return is_other
        with replacing(path) as (file,):
            file.write(text.encode())
    except (OSError, UserError) as error:
        return str(error)
    except (ValueError, RecursionError):  # not JSON
        return is_other
    return None


def kept(prefix: Path, bin_path: Path, num_tokens: int) -> TokenCounts | None:
    """Return the counts that `keep` wrote. Return None if they are missing, unreadable, or of an earlier state of the
    ``.bin`` file."""
    try:
        values = json.loads(counts_path(prefix).read_bytes())
        if values["bin"] != _identity(bin_path):
            return None
        return TokenCounts.from_json(values["counts"], num_tokens)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None  # they can be counted again


def _identity(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
