"""Comparison of groups as text and as JSON values."""

import math
from collections.abc import Sequence
from typing import Any

from pretrain.compare.groups import Group, Reach, differing_keys, reach
from pretrain.formats import markdown

_CONTENTS = frozenset(["data.tokenizer", "data.train", "data.validation"])  # only their names are shown, not SHA-256


def text(groups: Sequence[Group]) -> str:
    """Return the comparison as Markdown: tables with one row per group, then differing recipe keys and notes.

    The first table has the training tokens, parameters, FLOPs and final loss of each group. For several groups, a
    second table has the steps at which each group reaches the final loss of each other group.
    """
    rows = [
        ["run", "seeds", "step", "tokens", "parameters", "active", "FLOPs/token", "FLOPs", "val loss", "std", "min-max"]
    ]
    for group in groups:
        last = group.last
        step = f"{last.step} of {_steps(group)}" if group.unfinished else str(last.step)
        rows.append(
            [
                group.name,
                str(len(group.runs)),
                step,
                _count(last.tokens),
                _count(group.runs[0].params),
                _count(group.runs[0].active_params),
                _count(group.flops_per_token),
                _count(group.flops),
                f"{last.mean:.4f}",
                "-" if last.std is None else f"{last.std:.4f}",
                "-" if last.std is None else f"{last.low:.4f}-{last.high:.4f}",
            ]
        )
    parts = [markdown(rows)]
    if len(groups) > 1:
        head = [f"{group.name}: {group.last.mean:.4f}" for group in groups]
        rows = [["steps to the loss of", *head]]
        rows += [[group.name, *(_reaches(group, other) for other in groups)] for group in groups]
        parts.append(markdown(rows))
        parts.append("\n".join(_differences(groups)))
    if said := notes(groups):
        parts.append("\n".join(f"note: {line}" for line in said))
    return "\n\n".join(parts)


def values(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the comparison as JSON values.

    The keys are ``groups``, ``reaches`` (where each group reaches the final loss of each other group, or null) and
    ``notes``. Losses are in nats per token. A loss that is not finite is null.
    """
    keys = differing_keys(groups)
    return {
        "groups": [_group_values(group, keys) for group in groups],
        "reaches": [_reach_values(group, of) for group in groups for of in groups if group is not of],
        "notes": notes(groups),
    }


def notes(groups: Sequence[Group]) -> list[str]:
    """Return notes on what limits the comparison, such as unfinished runs, one line each."""
    said = []
    for group in groups:
        for run in group.unfinished:
            said.append(f"{run.folder} is not finished: step {run.step} of {run.recipe.train.steps}")
        for run in group.runs:
            if (path := run.recipe.train.init_from) is not None:
                said.append(f"{run.folder} started from the weights of {path}, whose training is not counted")
        if not math.isfinite(group.last.mean):
            said.append(f"the last validation loss of {group.name} is not finite")
    sizes: dict[str, list[str]] = {}
    for group in groups:
        for run in group.runs:
            train, model = run.recipe.train, run.recipe.model
            size = f"{train.validation_sequences} sequences of {model.sequence_length} tokens"
            sizes.setdefault(size, []).append(str(run.folder))
    if len(sizes) > 1:
        said.append(
            "validated on different amounts of the same text: "
            + "; ".join(f"{size} in {', '.join(folders)}" for size, folders in sizes.items())
        )
    return said


def _differences(groups: Sequence[Group]) -> list[str]:
    keys = differing_keys(groups)
    lines = []
    for group in groups:
        values = group.runs[0].keys()
        shown = [key if key in _CONTENTS else f"{key}={values[key]}" for key in keys]
        lines.append(f"{group.name}: {' '.join(shown) or 'the same recipe and seed'}")
    return lines


def _group_values(group: Group, keys: Sequence[str]) -> dict[str, Any]:
    last, recipe = group.last, group.runs[0].keys()
    return {
        "name": group.name,
        "seeds": [run.recipe.train.seed for run in group.runs],
        "is_finished": not group.unfinished,
        "step": last.step,
        "tokens": last.tokens,
        "params": group.runs[0].params,
        "active_params": group.runs[0].active_params,
        "flops_per_token": group.flops_per_token,
        "flops": group.flops,
        "loss": _finite({"mean": last.mean, "std": last.std, "min": last.low, "max": last.high}),
        "recipe": {key: recipe[key] for key in keys},
        "curve": [
            {"step": point.step, "tokens": point.tokens, "flops": group.flops_per_token * point.tokens}
            | _finite({"mean": point.mean, "std": point.std, "min": point.low, "max": point.high})
            for point in group.curve
        ],
        "runs": [
            {
                "folder": str(run.folder),
                "seed": run.recipe.train.seed,
                "step": run.step,
                "steps": run.recipe.train.steps,
                "is_finished": run.is_finished,
                "validations": [
                    {"step": v.step, "tokens": v.tokens} | _finite({"loss": v.loss}) for v in run.validations
                ],
            }
            for run in group.runs
        ],
    }


def _reach_values(group: Group, of: Group) -> dict[str, Any]:
    found = reach(group.curve, of.last.mean)
    row: dict[str, Any] = {"group": group.name, "of": of.name} | _finite({"loss": of.last.mean})
    if found is None:
        return row | dict.fromkeys(("step", "tokens", "flops", "steps_ratio", "tokens_ratio", "flops_ratio"))
    flops = found.tokens * group.flops_per_token
    return row | {
        "step": found.step,
        "tokens": found.tokens,
        "flops": flops,
        "steps_ratio": _ratio(found.step, of.last.step),
        "tokens_ratio": _ratio(found.tokens, of.last.tokens),
        "flops_ratio": _ratio(flops, of.flops),
    }


def _reaches(group: Group, of: Group) -> str:
    if group is of:
        return "-"
    found: Reach | None = reach(group.curve, of.last.mean)
    if found is None:
        return "not reached"
    ratio = _ratio(found.step, of.last.step)
    share = "" if ratio is None else f", x{ratio:.3f}"
    return f"{found.step:.1f} ({_count(found.tokens)} tokens{share})"


def _ratio(value: float, of: float) -> float | None:
    return value / of if of else None


def _finite(numbers: dict[str, float | None]) -> dict[str, float | None]:
    return {key: value if value is not None and math.isfinite(value) else None for key, value in numbers.items()}


def _steps(group: Group) -> int:
    return group.runs[0].recipe.train.steps


def _count(number: float) -> str:
    """Format a number with three digits and an SI prefix: 2.17 M."""
    for power, unit in enumerate("YZEPTGMk"):
        limit = 1000.0 ** (8 - power)
        if number >= 0.9995 * limit:
            return f"{number / limit:#.3g}".rstrip(".") + f" {unit}"
    return f"{number:.0f}"
