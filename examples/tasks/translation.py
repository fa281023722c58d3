"""Translation into English with a T5: a plugin with the source of samples "pairs", and the preparation of its data.

    pip install 'fmoe[pretrain,tasks]'
    python examples/tasks/translation.py data/translation
    fmoe train examples/tasks/translation.toml
    fmoe evaluate runs/translation

The pairs are the message catalogs of Django (BSD licence), which the installed package contains. As in GShard's task
(arXiv 2006.16668), texts of many languages are translated into English. Messages are held out in all languages at once.
"""

import argparse
import gettext
import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from fmoe import cli
from fmoe.errors import UserError, require
from pretrain.config import Recipe
from pretrain.data.conversations import pack
from pretrain.data.custom import register_samples
from pretrain.data.opening import open_tokenizer
from pretrain.data.tokenizers import train_tokenizer

LANGUAGES = ("de", "nl", "sv", "da", "nb", "fr", "es", "it", "pt_BR", "ca")
DEFAULT = "django"  # package with catalogs
HELD_OUT = 16  # one of this many messages is for validation
VOCAB = 2048


class Pairs:
    """Samples of a T5 from files of JSON lines: ``source`` for the encoder, ``target`` for the decoder.

    Both end with the end-of-document token. A sample is a pack of pairs, in which tokens attend only to their own pair.
    Pairs longer than ``model.sequence_length`` are left out.
    """

    def __init__(self, recipe: Recipe, names: tuple[str, ...]):
        content = [Path(name).read_bytes() for name in names]
        self.fingerprint = hashlib.sha256(b"".join(content)).hexdigest()
        self._tokenizer = open_tokenizer(recipe)
        self._length = recipe.model.sequence_length
        self._pad = self._tokenizer.role("pad")
        self._pairs = []
        self._references = []
        for line in b"".join(content).splitlines():
            row = json.loads(line)
            pair = self._encode(row["source"]), self._encode(row["target"])
            if max(map(len, pair)) <= self._length:
                self._pairs.append(pair)
                self._references.append(row["target"])
        lengths = np.array([max(map(len, pair)) for pair in self._pairs], dtype=np.int64)
        pack_of = pack(lengths, self._length)
        order = np.argsort(pack_of, kind="stable")
        self._packs = np.split(order, np.cumsum(np.bincount(pack_of))[:-1]) if len(order) else []

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        sources, targets = zip(*(self._pairs[number] for number in self._packs[i]), strict=True)
        inputs = [[self._pad, *target[:-1]] for target in targets]  # T5's decoder begins with padding
        ones = [[1] * len(target) for target in targets]
        return {
            "tokens": self._joined(sources, self._pad),
            "documents": self._joined(_numbers(sources), -1),
            "decoder_tokens": self._joined(inputs, self._pad),
            # Padding sees the last pair, because each query must see a key.
            "decoder_documents": self._joined(_numbers(targets), len(targets) - 1),
            "labels": self._joined(targets, self._pad),
            "loss_mask": self._joined(ones, 0),
        }

    def score(self, numbers: list[int], predict: Callable) -> dict[str, float]:
        """Return BLEU (Papineni et al. 2002) and chrF by sacrebleu, 0 to 100."""
        sacrebleu = require("sacrebleu", "pretrain,tasks", "BLEU")
        chosen = np.concatenate([self._packs[i] for i in dict.fromkeys(numbers)])
        chosen = sorted(chosen.tolist(), key=lambda number: len(self._pairs[number][0]))  # full batches of one length
        predicted = predict({"tokens": np.array(self._pairs[number][0], dtype=np.int64)} for number in chosen)
        texts = [self._tokenizer.decode(tokens) for tokens in predicted]
        references = [[self._references[number] for number in chosen]]
        return {
            "pairs": len(texts),
            "bleu": sacrebleu.corpus_bleu(texts, references).score,
            "chrf": sacrebleu.corpus_chrf(texts, references).score,
        }

    def _encode(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text), self._tokenizer.end_of_document]

    def _joined(self, parts: Iterable[list[int]], padding: int) -> np.ndarray:
        values = np.full(self._length, padding, dtype=np.int64)
        joined = [value for part in parts for value in part]
        values[: len(joined)] = joined
        return values


def _numbers(parts: Iterable[list[int]]) -> list[list[int]]:
    return [[number] * len(part) for number, part in enumerate(parts)]


register_samples("pairs", Pairs)


def catalog_pairs(package: str, languages: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (message in another language, message in English) from the catalogs of an installed package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        wanted = "'fmoe[pretrain,tasks]'" if package == DEFAULT else package
        raise UserError(f"the package {package} is not installed: pip install {wanted}")
    for path in sorted(Path(spec.origin).parent.rglob("locale/*/LC_MESSAGES/*.mo")):
        if path.parts[-3] not in languages:
            continue
        with path.open("rb") as file:
            catalog = gettext.GNUTranslations(file)._catalog  # the public interface looks up one message at a time
        for key, text in catalog.items():
            english = key if isinstance(key, str) else key[0]  # a message with plural forms, and the form's number
            is_first = isinstance(key, str) or key[1] == 0
            if english and text and is_first and "\x04" not in english:  # which separates a context from its message
                yield text, english


def prepare(folder: Path, package: str, languages: tuple[str, ...]) -> None:
    """Write ``train.jsonl``, ``validation.jsonl`` and ``tokenizer.model`` into a folder."""
    rows: dict[str, dict[str, None]] = {"train": {}, "validation": {}}
    for text, english in catalog_pairs(package, languages):
        is_held_out = int(hashlib.sha256(english.encode()).hexdigest(), 16) % HELD_OUT == 0
        row = json.dumps({"source": text, "target": english}, ensure_ascii=False)
        rows["validation" if is_held_out else "train"][row] = None  # each pair once
    if not rows["train"]:
        raise UserError(f"--package {package} has no messages in --languages {' '.join(languages)}")
    folder.mkdir(parents=True, exist_ok=True)
    for split, lines in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        print(f"{folder / split}.jsonl: {len(lines)} pairs")
    text = folder / "text.jsonl"
    sides = (json.loads(row)[side] for row in rows["train"] for side in ("source", "target"))
    text.write_text("".join(json.dumps({"text": side}) + "\n" for side in sides))
    train_tokenizer([text], folder / "tokenizer.model", VOCAB)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write sentence pairs and a tokenizer for examples/tasks/translation.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--package", default=DEFAULT, help="installed package with catalogs (default: %(default)s)")
    parser.add_argument("--languages", nargs="+", default=LANGUAGES)
    arguments = parser.parse_args()
    prepare(arguments.folder, arguments.package, tuple(arguments.languages))


if __name__ == "__main__":
    sys.exit(cli.run("translation.py", main))
