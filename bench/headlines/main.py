"""``python -m bench headlines``: models with experts against their dense twins, at equal active FLOPs.

Trains each pair of models with each seed, two runs at once, and prints a table. Finished runs are kept, and stopped
ones resume. See docs/headlines.md.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from bench.convergence import study
from bench.convergence.study import Job
from bench.intervals import student_t
from fmoe.errors import UserError, known_names
from pretrain.compare import figure
from pretrain.compare.groups import Group, group_runs, reach
from pretrain.compare.runs import Run, read_run
from pretrain.compare.table import markdown
from pretrain.config import Recipe, load_recipe
from pretrain.tracking import read_metrics

HERE = Path(__file__).parent
DENSE, EXPERTS, HALF = "dense", "experts", "half"


@dataclass(frozen=True)
class Pair:
    """A model with experts and its dense twin: a recipe, and options that take its experts away.

    Attributes:
        dense: options of the scaled-down twin.
        full: name of the shipped recipe.
        full_dense: options of its twin.
    """

    dense: tuple[str, ...]
    full: str
    full_dense: tuple[str, ...]


def _without_experts(ffn_hidden_size: int, *more: str) -> tuple[str, ...]:
    width = str(ffn_hidden_size)
    return ("--model.num_experts", "0", "--model.ffn_hidden_size", width, "--parallel.expert", "1", *more)


PAIRS = {
    "gpt-64-bytes": Pair(_without_experts(256), "gpt-64-bytes", _without_experts(2048)),
    # Each model at its best rate: docs/headlines.md.
    "gpt-96": Pair(_without_experts(256, "--optimizer.lr", "2e-2"), "gpt-96", _without_experts(4096)),
    "transformer-xl-64": Pair(_without_experts(256), "transformer-xl-64", _without_experts(2048)),
    "switch-t5": Pair(
        _without_experts(
            256,
            *("--model.dense_ffn_hidden_size", "none", "--model.moe_every", "1"),
            *("--model.group_size", "none", "--optimizer.lr", "1e-2"),
        ),
        "switch-base",
        _without_experts(3072, "--model.moe_every", "1"),
    ),
}


def main(argv: Sequence[str]) -> int:
    """Return 0, or the code that ended the training early: see `study.train`."""
    parser = argparse.ArgumentParser(prog="python -m bench headlines", description=__doc__, allow_abbrev=False)
    parser.add_argument("pairs", nargs="*", metavar="PAIR", help=f"pairs to train; by default all: {', '.join(PAIRS)}")
    study.add_options(parser, folder="runs/headlines", seeds=[1, 2, 3])
    parser.add_argument("--table", action="store_true", help="train nothing: the table of the runs that are finished")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the rows as JSON")
    arguments = parser.parse_args(argv)
    options = study.check_options(arguments)
    for name in arguments.pairs:
        if name not in PAIRS:
            raise UserError(f"unknown pair {name!r}; {known_names(name, PAIRS)}")
    names = list(dict.fromkeys(arguments.pairs)) or list(PAIRS)
    jobs = plan(names, arguments.seeds, arguments.folder, options)
    if not arguments.table and (
        code := study.train(list(jobs.values()), at_once=arguments.at_once, threads=arguments.threads)
    ):
        return code
    rows = []
    for name in names:
        if groups := _groups(name, jobs):
            rows.append(_row(name, groups))
            figure.draw(list(groups.values()), arguments.folder / f"{name}.svg")
    if not rows:
        raise UserError(f"{arguments.folder} has no finished pair of runs")
    print(table(rows))
    print(f"curves: {', '.join(str(arguments.folder / row['pair']) + '.svg' for row in rows)}", file=sys.stderr)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n")
    return 0


def plan(
    names: Sequence[str], seeds: Sequence[int], folder: Path, more: Sequence[str] = ()
) -> dict[tuple[str, str, int], Job]:
    """Return the runs by pair, model and seed. All pairs come with the first seed before any comes with the second.

    Raises:
        UserError: a recipe is invalid, or differs from the recipe of the existing run.
    """
    jobs = {}
    for seed in seeds:
        for name in names:
            path = HERE / f"{name}.toml"
            steps = study.make_job(str(path), name, seed, folder, more).recipe.train.steps
            models = {
                DENSE: PAIRS[name].dense,
                EXPERTS: (),
                HALF: ("--train.steps", str(steps // 2)),
            }
            for model, options in models.items():
                job = study.make_job(str(path), f"{name}-{model}-seed{seed}", seed, folder, [*more, *options])
                jobs[name, model, seed] = job
    return jobs


def _groups(name: str, jobs: dict[tuple[str, str, int], Job]) -> dict[str, Group]:
    """Return a pair's finished runs by model, of the seeds with which both models are finished; empty without one."""
    runs: dict[str, dict[int, Run]] = {DENSE: {}, EXPERTS: {}, HALF: {}}
    for (pair, model, seed), job in jobs.items():
        if pair == name:
            job.look()
            if job.is_done:
                runs[model][seed] = read_run(job.folder)
    both = runs[DENSE].keys() & runs[EXPERTS].keys()
    if not both:
        return {}
    found = {model: [run for seed, run in of_seed.items() if seed in both] for model, of_seed in runs.items()}
    return {model: group_runs(of_model)[0] for model, of_model in found.items() if of_model}


def _row(name: str, groups: dict[str, Group]) -> dict[str, Any]:
    """Return the figures of a pair."""
    dense, experts = groups[DENSE], groups[EXPERTS]
    of_dense, of_experts, of_half = (_of_seed(groups[m]) if m in groups else {} for m in (DENSE, EXPERTS, HALF))
    reached = reach(experts.curve, dense.last.mean)
    full_dense, full = _full(name)
    return {
        "pair": name,
        "seeds": list(of_dense),
        "params": {DENSE: dense.runs[0].params, EXPERTS: experts.runs[0].params},
        "params_of_recipe": {DENSE: full_dense.num_params(), EXPERTS: full.num_params()},
        "flops_per_token": {DENSE: dense.flops_per_token, EXPERTS: experts.flops_per_token},
        "flops_ratio_of_recipe": full.flops_per_token() / full_dense.flops_per_token(),
        "tokens": dense.last.tokens,
        "losses": {DENSE: list(of_dense.values()), EXPERTS: list(of_experts.values())},
        "difference": _difference(of_experts, of_dense),
        "steps": dense.last.step,
        "reached_at": None if reached is None else reached.step,
        "below_from": _below_from(dense, experts),
        "half": {
            "seeds": list(of_half),
            "losses": list(of_half.values()),
            "difference": _difference(of_half, of_dense),
        },
        "seconds_per_token_ratio": _seconds_per_token(experts) / _seconds_per_token(dense),
    }


def _full(name: str) -> tuple[Recipe, Recipe]:
    """Return the shipped recipe of a pair without and with experts."""
    pair = PAIRS[name]
    return load_recipe(pair.full, list(pair.full_dense)), load_recipe(pair.full, [])


def _of_seed(group: Group) -> dict[int, float]:
    """Return the last losses by seed."""
    return {run.recipe.train.seed: loss for run, loss in zip(group.runs, group.last.losses, strict=True)}


def _difference(losses: dict[int, float], others: dict[int, float]) -> dict[str, float | None]:
    """Return the mean difference, paired by seed, with Student's 95% interval; None for what too few seeds give."""
    each = [loss - others[seed] for seed, loss in losses.items()]
    if len(each) < 2:
        return {"mean": each[0] if each else None, "low": None, "high": None}
    margin = student_t(0.95, len(each) - 1) * stdev(each) / math.sqrt(len(each))
    return {"mean": fmean(each), "low": fmean(each) - margin, "high": fmean(each) + margin}


def _below_from(dense: Group, experts: Group) -> int | None:
    """Return the first validated step from which on each run with experts is below the dense run of its seed."""
    first = None
    for one, other in zip(reversed(experts.curve), reversed(dense.curve), strict=True):
        if one.step != other.step or not all(a < b for a, b in zip(one.losses, other.losses, strict=True)):
            break
        first = one.step
    return first


def _seconds_per_token(group: Group) -> float:
    """Return the mean over the runs of the median over their steps."""
    of_run = []
    for run in group.runs:
        rows = read_metrics(run.folder / "metrics.jsonl")
        of_run.append(median(1 / row["tokens_per_second"] for row in rows if row.get("tokens_per_second")))
    return fmean(of_run)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows as Markdown."""
    lines = [
        [
            "pair",
            "parameters",
            "ratio",
            "ratio of the recipe",
            "seeds",
            "loss of dense",
            "loss with experts",
            "difference",
            "below from step",
            "dense loss reached",
            "difference after half the steps",
            "time per token",
        ]
    ]
    for row in rows:
        params, recipe = row["params"], row["params_of_recipe"]
        reached = row["reached_at"]
        lines.append(
            [
                f"`{row['pair']}`",
                f"{params[DENSE] / 1e3:.0f} k, {params[EXPERTS] / 1e6:.2f} M",
                f"{params[EXPERTS] / params[DENSE]:.1f}",
                f"{recipe[EXPERTS] / recipe[DENSE]:.1f}",
                ", ".join(map(str, row["seeds"])),
                f"{fmean(row['losses'][DENSE]):.4f}",
                f"{fmean(row['losses'][EXPERTS]):.4f}",
                _shown(row["difference"]),
                "never" if row["below_from"] is None else f"{row['below_from']} of {row['steps']}",
                "not reached" if reached is None else f"{reached / row['steps']:.3f} of its steps",
                _shown(row["half"]["difference"]),
                f"{row['seconds_per_token_ratio']:.2f} times",
            ]
        )
    return markdown(lines)


def _shown(difference: dict[str, float | None]) -> str:
    if difference["mean"] is None:
        return "-"
    if difference["low"] is None:
        return f"{difference['mean']:+.4f}"
    return f"{difference['mean']:+.4f} [{difference['low']:+.4f}, {difference['high']:+.4f}]"
