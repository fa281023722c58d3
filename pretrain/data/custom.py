"""Samples of registered sources: sentence pairs, images with classes, rows of features."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fmoe.errors import UserError, add_name, build_named
from pretrain.config import Recipe
from pretrain.data.samples import epoch_order

SOURCES: dict[str, Callable[..., Any]] = {}
"""Registered factories of sources by name."""


def register_samples(name: str, factory: Callable[..., Any]) -> None:
    """Register a source of samples under a new name, for ``data.samples`` of a recipe.

    A source holds the samples of a split, such as the training or the validation split. It has a length, and
    ``source[i]`` is sample i: a dictionary of numpy arrays, of the same names and shapes in each sample. Sample i
    depends only on i. A source may have these attributes too:

    * ``fingerprint``: SHA-256 of the samples as text. With it, a run resumes only with the same samples.
    * ``score(numbers, predict)``: function that returns figures of the samples with these numbers by name, which
      ``fmoe evaluate`` prints. ``predict`` takes an iterable of samples, these or others, and returns a list of
      predicted token ids for each (`pretrain.inference.evaluation.predict`).
    * ``classes``: class of each sample, int [samples]. ``fmoe evaluate`` prints the experts' loads by class.

    Args:
        factory: a class, or a function that returns the source. It is called with the recipe and the entries of
            ``data.train`` or ``data.validation``, and with ``data.samples_options`` as keywords.

    Raises:
        UserError: the name is empty or belongs to another source.
    """
    add_name(SOURCES, "data.samples", name, factory)


@dataclass(frozen=True)
class SourceSamples:
    """The endless sequence of a source's samples. Each epoch has all of them, in an order that depends on ``seed``."""

    source: Any
    seed: int

    @property
    def samples_per_epoch(self) -> int:
        return len(self.source)

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        """Return sample ``n`` of the endless sequence."""
        sample: dict[str, np.ndarray] = self.source[self.index(n)]
        return sample

    def index(self, n: int) -> int:
        """Return the number in the source of sample ``n``."""
        epoch, position = divmod(n, len(self.source))
        return int(_order(len(self.source), self.seed, epoch)[position])


_order = functools.lru_cache(maxsize=4)(epoch_order)  # training and validation, each at the turn of an epoch


def open_source(recipe: Recipe, names: tuple[str, ...], seed: int) -> tuple[SourceSamples, tuple[str | None, ...]]:
    """Build the source ``data.samples`` for the entries of ``data.train`` or ``data.validation``.

    Returns:
        Its samples, and for each entry the source's fingerprint.

    Raises:
        UserError: the source is not registered, fails with its options, or has no samples.
    """
    options = recipe.data.samples_options
    name = str(recipe.data.samples)
    source = build_named(SOURCES, "data.samples", name, "data.samples_options", options, recipe=recipe, names=names)
    if not len(source):
        raise UserError(f"data.samples={name} has no samples")
    return SourceSamples(source, seed), (getattr(source, "fingerprint", None),) * len(names)
