"""Sentences with labels for a BERT, as in GLUE: a plugin with the source of samples "sentences".

    fmoe data example                                    # a tokenizer
    fmoe train examples/tasks/sentences.toml
    fmoe evaluate runs/sentences

The sentences are generated, so nothing is downloaded. The task "entailment" has pairs (like RTE): does a comparison
follow from two others? The task "acceptability" has single sentences (like CoLA): does the verb agree with its subject?
The label is a token, which the BERT predicts at CLS. So any checkpoint of a BERT is a start, without a new head.
"""

import hashlib
from collections.abc import Callable

import numpy as np

from fmoe.errors import UserError
from pretrain.config import Recipe
from pretrain.data.custom import register_samples
from pretrain.data.opening import open_tokenizer

LABELS = ("no", "yes")
HELD_OUT = 8  # texts of one hash in this many are for validation
NAMES = [
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Hana",
    "Ivo",
    "Jo",
    "Kim",
    "Leo",
    "Mia",
    "Ned",
    "Ole",
    "Pia",
]
COMPARISONS = [("taller", "shorter"), ("older", "younger"), ("faster", "slower"), ("richer", "poorer")]
NOUNS = [
    ("dog", "dogs"),
    ("girl", "girls"),
    ("car", "cars"),
    ("teacher", "teachers"),
    ("bird", "birds"),
    ("king", "kings"),
]
VERBS = [("sleeps", "sleep"), ("waits", "wait"), ("moves", "move"), ("sings", "sing"), ("returns", "return")]
PLACES = ["near", "behind", "beside", "above"]


def entailment(draw: np.random.Generator) -> tuple[list[str], int]:
    """Return premise and hypothesis, and 1 if the hypothesis follows, 0 if its reverse does."""
    names = draw.permutation(NAMES)[:3].tolist()  # in falling order
    more, less = COMPARISONS[draw.integers(len(COMPARISONS))]
    steps = [f"{names[0]} is {more} than {names[1]}.", f"{names[1]} is {more} than {names[2]}."]
    first, second = draw.permutation(3)[:2].tolist()
    says_more = bool(draw.integers(2))
    hypothesis = f"{names[first]} is {more if says_more else less} than {names[second]}."
    return [" ".join(draw.permutation(steps).tolist()), hypothesis], int((first < second) == says_more)


def acceptability(draw: np.random.Generator) -> tuple[list[str], int]:
    """Return a sentence, and 1 if its verb agrees with its subject, not only with the noun before the verb."""
    subject, other, number, of_other, of_verb = draw.integers([len(NOUNS), len(NOUNS), 2, 2, 2]).tolist()
    verb = VERBS[draw.integers(len(VERBS))][of_verb]
    place = PLACES[draw.integers(len(PLACES))]
    return [f"The {NOUNS[subject][number]} {place} the {NOUNS[other][of_other]} {verb}."], int(number == of_verb)


TASKS: dict[str, Callable] = {"entailment": entailment, "acceptability": acceptability}


class Sentences:
    """Samples of a BERT: CLS, the texts, each followed by SEP, and padding. The label's token is predicted at CLS.

    The entries of ``data.train`` and ``data.validation`` are the names of the splits: train, validation. No text is in
    both.
    """

    def __init__(self, recipe: Recipe, names: tuple[str, ...], task: str = "acceptability", size: int = 4096):
        if task not in TASKS:
            raise UserError(f"task={task} is not one of {', '.join(TASKS)}")
        for name in names:
            if name not in ("train", "validation"):
                raise UserError(f"{name} is not a split: train or validation")
        self._length = recipe.model.sequence_length
        tokenizer = open_tokenizer(recipe)
        self._label_ids = [tokenizer.encode(label)[-1] for label in LABELS]
        cls, sep = tokenizer.role("cls"), tokenizer.role("sep")
        self.classes: list[int] = []
        self._tokens: list[list[int]] = []
        texts = hashlib.sha256()
        draw = np.random.default_rng(0)
        while len(self._tokens) < size:
            parts, label = TASKS[task](draw)
            digest = hashlib.sha256(" ".join(parts).encode()).digest()
            split = "train" if digest[0] % HELD_OUT else "validation"
            tokens = [cls, *(token for part in parts for token in [*tokenizer.encode(part), sep])]
            if len(tokens) > self._length:
                raise UserError(f"model.sequence_length={self._length} is less than the {len(tokens)} tokens of a text")
            if split in names:
                self.classes.append(label)
                self._tokens.append(tokens)
                texts.update(digest)
        self.fingerprint = texts.hexdigest()

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        tokens = self._tokens[i]
        at = np.arange(self._length)
        return {
            "tokens": np.array(tokens + [0] * (self._length - len(tokens)), dtype=np.int64),
            "documents": (at >= len(tokens)).astype(np.int64),  # padding is another document
            "labels": np.where(at == 0, self._label_ids[self.classes[i]], 0),
            "loss_mask": (at == 0).astype(np.int64),
        }

    def score(self, numbers: list[int], predict: Callable) -> dict[str, float]:
        """Return accuracy, and F1 of the label 1."""
        labels = np.array([self.classes[i] for i in numbers])
        predicted = np.array([tokens[0] == self._label_ids[1] for tokens in predict(self[i] for i in numbers)])
        hits = int((predicted & (labels == 1)).sum())
        return {
            "accuracy": float((predicted == (labels == 1)).mean()),
            "f1": 2 * hits / max(int(predicted.sum() + labels.sum()), 1),
        }


register_samples("sentences", Sentences)
