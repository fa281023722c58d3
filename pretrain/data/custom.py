"""Samples of registered sources: sentence pairs, images with classes, rows of features."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fmoe.errors import UserError, add_name, build_named, known_names, one_line
from pretrain.config import Recipe
from pretrain.data.samples import epoch_order

SOURCES: dict[str, Callable[..., Any]] = {}
"""Registered factories of sources by name."""

ARRAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gpt": (("tokens", "labels"), ("loss_mask", "documents")),
    "bert": (("tokens", "labels"), ("loss_mask", "documents")),
    "t5": (("tokens", "decoder_tokens", "labels"), ("loss_mask", "documents", "decoder_documents")),
}
"""Required and optional arrays of a sample, each int [model.sequence_length], by ``model.kind``."""


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
    """The endless sequence of a source's samples. Each epoch has all of them, in an order that depends on ``seed``.

    Args:
        name: value of ``data.samples``, for messages.
    """

    source: Any
    seed: int
    name: str = ""

    @property
    def samples_per_epoch(self) -> int:
        return len(self.source)

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        """Return sample ``n`` of the endless sequence, with integers and booleans as int64.

        Raises:
            UserError: the source fails; the sample is not a dictionary of arrays; or its arrays have other names,
                shapes or types than those of the source's sample 0.
        """
        i = self.index(n)
        sample = self.read(i)
        if _types(sample) != self._types_of_first:
            raise self.error(i, f"has the arrays {_types(sample)}, unlike sample 0: {self._types_of_first}")
        return sample

    def read(self, i: int) -> dict[str, np.ndarray]:
        """Return sample ``i`` of the source, as `__getitem__`; not compared with sample 0."""
        try:
            sample = self.source[i]
        except Exception as error:
            raise self.error(i, f"fails: {one_line(error, with_type=True)}") from error
        if not isinstance(sample, dict):
            raise self.error(i, f"must be a dictionary of arrays, not {type(sample).__name__}")
        arrays = {}
        for name, value in sample.items():
            if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
                kind = getattr(value, "dtype", type(value).__name__)
                raise self.error(i, f"has {name} of {kind}, which must be an array of numbers")
            arrays[name] = value if value.dtype.kind == "f" else value.astype(np.int64)
        documents = arrays.get("decoder_documents")
        if documents is not None and not np.isin(documents, arrays.get("documents", ())).all():
            raise self.error(i, "has decoder_documents that are not among documents")
        return arrays

    def error(self, i: int, problem: str) -> UserError:
        """Return an error about sample ``i`` of the source."""
        return UserError(f"data.samples={self.name}: sample {i} {problem}")

    @functools.cached_property
    def _types_of_first(self) -> dict[str, str]:
        return _types(self.read(0))

    def index(self, n: int) -> int:
        """Return the number in the source of sample ``n``."""
        epoch, position = divmod(n, len(self.source))
        return int(_order(len(self.source), self.seed, epoch)[position])


def _types(sample: dict[str, np.ndarray]) -> dict[str, str]:
    return {name: f"{array.dtype} {list(array.shape)}" for name, array in sorted(sample.items())}


_order = functools.lru_cache(maxsize=4)(epoch_order)  # training and validation, each at the turn of an epoch


def open_source(recipe: Recipe, names: tuple[str, ...], seed: int) -> tuple[SourceSamples, tuple[str | None, ...]]:
    """Build the source ``data.samples`` for the entries of ``data.train`` or ``data.validation``.

    Returns:
        Its samples, and for each entry the source's fingerprint.

    Raises:
        UserError: the source is not registered, fails with its options, or has no samples; or its sample 0 does not
            have the arrays of ``model.kind``.
    """
    options = recipe.data.samples_options
    name = str(recipe.data.samples)
    source = build_named(SOURCES, "data.samples", name, "data.samples_options", options, recipe=recipe, names=names)
    if not len(source):
        raise UserError(f"data.samples={name} has no samples")
    samples = SourceSamples(source, seed, name)
    _check_arrays(samples, recipe)
    return samples, (getattr(source, "fingerprint", None),) * len(names)


def _check_arrays(samples: SourceSamples, recipe: Recipe) -> None:
    kind = recipe.model.kind
    sample = samples.read(0)
    required, optional = ARRAYS.get(kind, (("labels",), tuple(sample)))  # others name the arrays that they take
    for name in required:
        if name not in sample:
            raise samples.error(0, f"lacks {name}, which model.kind={kind} needs")
    for name, array in sample.items():
        if name not in required + optional:
            raise samples.error(
                0, f"has {name}, which model.kind={kind} does not take; {known_names(name, required + optional)}"
            )
        length = recipe.model.sequence_length
        if kind in ARRAYS and (array.shape != (length,) or array.dtype != np.int64):
            raise samples.error(
                0, f"has {name} of {_types(sample)[name]}, which must be integers [model.sequence_length={length}]"
            )
    if kind == "classifier" and (sample["labels"].shape != (1,) or sample["labels"].dtype != np.int64):
        raise samples.error(0, f"has labels of {_types(sample)['labels']}, which must be the class, an integer [1]")
    if "documents" in sample and kind == "t5" and "decoder_documents" not in sample:
        raise samples.error(0, "has documents without decoder_documents")
