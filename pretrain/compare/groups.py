"""Runs of one recipe with different seeds as one curve, and the step at which a curve reaches a loss."""

import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from fmoe.errors import UserError
from pretrain.compare.runs import Run, ValidationLoss

T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """Validation losses of a group's runs at one step; ``tokens`` is the number of training tokens until then."""

    step: int
    tokens: int
    losses: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the runs; not finite if any loss is not."""
        return sum(self.losses) / len(self.losses)

    @property
    def std(self) -> float | None:
        """Sample standard deviation (n - 1); None for a single run, NaN if any loss is not finite."""
        if len(self.losses) < 2:
            return None
        return statistics.stdev(self.losses) if all(map(math.isfinite, self.losses)) else math.nan

    @property
    def low(self) -> float:
        """Lowest loss; NaN if any loss is NaN."""
        return math.nan if any(map(math.isnan, self.losses)) else min(self.losses)

    @property
    def high(self) -> float:
        """Highest loss; NaN if any loss is NaN."""
        return math.nan if any(map(math.isnan, self.losses)) else max(self.losses)


@dataclass(frozen=True)
class Reach:
    """First point at which a curve is at or below a loss."""

    step: float
    tokens: float


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed.

    Attributes:
        name: the common part of the runs' folder names. If it is empty or not unique, the first run's folder.
        runs: ordered by seed.
    """

    name: str
    runs: tuple[Run, ...]

    @cached_property
    def curve(self) -> tuple[Point, ...]:
        """Losses at the steps at which all runs have validated."""
        of_step: dict[int, list[ValidationLoss]] = {}
        for run in self.runs:
            for validation in run.validations:
                of_step.setdefault(validation.step, []).append(validation)
        return tuple(
            Point(step, validations[0].tokens, tuple(validation.loss for validation in validations))
            for step, validations in sorted(of_step.items())
            if len(validations) == len(self.runs)
        )

    @property
    def last(self) -> Point:
        """The group's last common validation."""
        return self.curve[-1]

    @property
    def flops_per_token(self) -> float:
        """FLOPs of a training step per token; see `Run`."""
        return self.runs[0].flops_per_token

    @property
    def flops(self) -> float:
        """FLOPs of one run's training until `last`."""
        return self.flops_per_token * self.last.tokens

    @property
    def unfinished(self) -> tuple[Run, ...]:
        """Runs that have not completed all their steps."""
        return tuple(run for run in self.runs if not run.is_finished)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs that have equal `Run.keys` and different seeds, in the order of their first runs.

    Raises:
        UserError: the runs of a group have no validated step in common.
    """
    groups = []
    for name, members in grouped(
        runs, lambda run: (run.keys(), run.recipe.train.seed), lambda run: run.folder.resolve().name
    ):
        by_seed = sorted(members, key=lambda run: run.recipe.train.seed)
        groups.append(Group(name or str(members[0].folder), tuple(by_seed)))
    for joined in groups:
        if not joined.curve:
            folders = ", ".join(str(run.folder) for run in joined.runs)
            raise UserError(
                f"{folders} are runs of one recipe with different train.seed, but have no validated step in common: "
                "compare them separately"
            )
    return groups


def grouped(
    runs: Iterable[T], experiment_of: Callable[[T], tuple[Any, int | None]], name_of: Callable[[T], str]
) -> list[tuple[str, list[T]]]:
    """Group runs that have equal keys and different seeds.

    A run with the keys and the seed of an earlier one begins another group: in one group, they would understate the
    spread over seeds. So does a run without a seed.

    Args:
        experiment_of: returns the keys and the seed of a run.
        name_of: returns the name of a run.

    Returns:
        Name and runs of each group, in the order of their first runs. The name of a group of one is that of its run.
        Else it is the beginning that all names share, without a ``seed`` or separator at its end. A name that is not
        unique is empty.
    """
    groups: list[tuple[Any, list[int | None], list[T]]] = []
    for run in runs:
        keys, seed = experiment_of(run)
        for other_keys, seeds, members in groups:
            if seed is not None and seed not in seeds and keys == other_keys:
                seeds.append(seed)
                members.append(run)
                break
        else:
            groups.append((keys, [seed], [run]))
    names = [_common_name(list(map(name_of, members))) for _, _, members in groups]
    return [
        (name if names.count(name) == 1 else "", members) for name, (_, _, members) in zip(names, groups, strict=True)
    ]


def _common_name(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    common = os.path.commonprefix(names)  # noqa: RUF071 - names, not paths
    if any(name[len(common) : len(common) + 1].isdigit() for name in names):
        common = common.rstrip("0123456789")  # the 1 that 11 and 12 share is not part of the name
    return re.sub(r"((^|[-_.= /])(seed|s))?[-_.= /]*$", "", common)


def reach(curve: Sequence[Point], loss: float) -> Reach | None:
    """Return the first point at which the mean of a curve is at or below a loss; None if there is none.

    The point is interpolated linearly between two validations. If the earlier one is missing or its mean is not finite,
    the point is the later validation. A loss that is not finite is never reached.
    """
    before: Point | None = None
    for point in curve if math.isfinite(loss) else ():
        if point.mean <= loss:
            if before is None or not math.isfinite(before.mean):
                return Reach(point.step, point.tokens)
            share = (before.mean - loss) / (before.mean - point.mean)
            step = before.step + share * (point.step - before.step)
            return Reach(step, before.tokens + share * (point.tokens - before.tokens))
        before = point
    return None


def differing_keys(groups: Sequence[Group]) -> list[str]:
    """Return the recipe keys whose values, as returned by `Run.keys`, differ between groups."""
    keys = [group.runs[0].keys() for group in groups]
    return [key for key in keys[0] if any(other.get(key) != keys[0][key] for other in keys[1:])]
