"""Comparison of groups as text and as JSON values."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from pretrain.compare.groups import Group, Point, differing_keys, reach
from pretrain.compare.runs import Run
from pretrain.formats import count_text, finite, markdown

Json = dict[str, Any]

_count = partial(count_text, units=[f" {prefix}" for prefix in "kMGTPEZY"])  # 2.17 M
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
        first = group.runs[0]
        last = group.last
        step = f"{last.step} of {first.recipe.train.steps}" if group.unfinished else str(last.step)
        counts = (last.tokens, first.params, first.active_params, group.flops_per_token, group.flops)
        spread = ["-", "-"] if last.std is None else [f"{last.std:.4f}", f"{last.low:.4f}-{last.high:.4f}"]
        rows.append([group.name, str(len(group.runs)), step, *map(_count, counts), f"{last.mean:.4f}", *spread])
    parts = [markdown(rows)]
    if len(groups) > 1:
        head = [f"{group.name}: {group.last.mean:.4f}" for group in groups]
        rows = [["steps to the loss of", *head]]
        rows += [[group.name, *(_reaches(group, other) for other in groups)] for group in groups]
        parts.append(markdown(rows))
        parts.append("\n".join(_differences(groups)))
    lines = notes(groups)
    if lines:
        parts.append("\n".join(f"note: {line}" for line in lines))
    return "\n\n".join(parts)


def values(groups: Sequence[Group]) -> Json:
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
    lines = []
    for group in groups:
        for run in group.unfinished:
            lines.append(f"{run.folder} is not finished: step {run.step} of {run.recipe.train.steps}")
        for run in group.runs:
            path = run.recipe.train.init_from
            if path is not None:
                lines.append(f"{run.folder} started from the weights of {path}, whose training is not counted")
        if not math.isfinite(group.last.mean):
            lines.append(f"the last validation loss of {group.name} is not finite")
    sizes: dict[str, list[str]] = {}
    for group in groups:
        for run in group.runs:
            num_sequences = run.recipe.train.validation_sequences
            size = f"{num_sequences} sequences of {run.recipe.model.sequence_length} tokens"
            sizes.setdefault(size, []).append(str(run.folder))
    if len(sizes) > 1:
        amounts = "; ".join(f"{size} in {', '.join(folders)}" for size, folders in sizes.items())
        lines.append(f"validated on different amounts of the same text: {amounts}")
    return lines


def _differences(groups: Sequence[Group]) -> list[str]:
    keys = differing_keys(groups)
    lines = []
    for group in groups:
        values = group.runs[0].keys()
        shown = [key if key in _CONTENTS else f"{key}={values[key]}" for key in keys]
        lines.append(f"{group.name}: {' '.join(shown) or 'the same recipe and seed'}")
    return lines


def _group_values(group: Group, keys: Sequence[str]) -> Json:
    first = group.runs[0]
    last = group.last
    recipe = first.keys()
    return {
        "name": group.name,
        "seeds": [run.recipe.train.seed for run in group.runs],
        "is_finished": not group.unfinished,
        "step": last.step,
        "tokens": last.tokens,
        "params": first.params,
        "active_params": first.active_params,
        "flops_per_token": group.flops_per_token,
        "flops": group.flops,
        "loss": _losses(last),
        "recipe": {key: recipe[key] for key in keys},
        "curve": [
            {"step": point.step, "tokens": point.tokens, "flops": group.flops_per_token * point.tokens} | _losses(point)
            for point in group.curve
        ],
        "runs": list(map(_run_values, group.runs)),
    }


def _losses(point: Point) -> dict[str, float | None]:
    losses = {"mean": point.mean, "std": point.std, "min": point.low, "max": point.high}
    return {name: finite(loss) for name, loss in losses.items()}


def _run_values(run: Run) -> Json:
    return {
        "folder": str(run.folder),
        "seed": run.recipe.train.seed,
        "step": run.step,
        "steps": run.recipe.train.steps,
        "is_finished": run.is_finished,
        "validations": [{"step": v.step, "tokens": v.tokens, "loss": finite(v.loss)} for v in run.validations],
    }


def _reach_values(group: Group, of: Group) -> Json:
    row: Json = {"group": group.name, "of": of.name, "loss": finite(of.last.mean)}
    reached = reach(group.curve, of.last.mean)
    if reached is None:
        return row | dict.fromkeys(("step", "tokens", "flops", "steps_ratio", "tokens_ratio", "flops_ratio"))
    flops = reached.tokens * group.flops_per_token
    return row | {
        "step": reached.step,
        "tokens": reached.tokens,
        "flops": flops,
        "steps_ratio": _ratio(reached.step, of.last.step),
        "tokens_ratio": _ratio(reached.tokens, of.last.tokens),
        "flops_ratio": _ratio(flops, of.flops),
    }


def _reaches(group: Group, of: Group) -> str:
    if group is of:
        return "-"
    reached = reach(group.curve, of.last.mean)
    if reached is None:
        return "not reached"
    ratio = _ratio(reached.step, of.last.step)
    share = "" if ratio is None else f", x{ratio:.3f}"
    return f"{reached.step:.1f} ({_count(reached.tokens)} tokens{share})"


def _ratio(value: float, of: float) -> float | None:
    return value / of if of else None
