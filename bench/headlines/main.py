"""``python -m bench headlines``: models with experts against their dense twins, at equal active FLOPs.

Trains each pair of models with each seed, two runs at once, and prints a table. Finished runs are kept, and stopped
ones resume. See docs/headlines.md.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from bench.convergence import study
from bench.convergence.study import Job
from bench.intervals import student_t
from fmoe.errors import UserError, known_names
from pretrain.compare.groups import Group, group_runs, reach
from pretrain.compare.runs import Run, read_run
from pretrain.compare.table import markdown
from pretrain.tracking import read_metrics

HERE = Path(__file__).parent
NO_EXPERTS = ["--model.num_experts", "0"]
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
    return (*NO_EXPERTS, "--model.ffn_hidden_size", str(ffn_hidden_size), "--parallel.expert", "1", *more)


PAIRS = {
    "gpt-64-bytes": Pair(_without_experts(256), "gpt-64-bytes", _without_experts(2048)),
    "gpt-96": Pair(_without_experts(256), "gpt-96", _without_experts(4096)),
    "transformer-xl-64": Pair(_without_experts(256), "transformer-xl-64", _without_experts(2048)),
    "switch-t5": Pair(
        _without_experts(256, "--model.dense_ffn_hidden_size", "none", "--model.moe_every", "1"),
        "switch-base",
        _without_experts(3072, "--model.moe_every", "1"),
    ),
}


def main(argv: Sequence[str]) -> int:
    """Return 0, or the code that ended the training early: see `study.train`."""
    parser = argparse.ArgumentParser(prog="python -m bench headlines", description=__doc__, allow_abbrev=False)
    parser.add_argument("pairs", nargs="*", metavar="PAIR", help=f"pairs to train; by default all: {', '.join(PAIRS)}")
    parser.add_argument("--folder", type=Path, default=Path("runs/headlines"), help="parent of the run folders")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds; each model gets a run per seed")
    parser.add_argument("--at-once", type=int, default=2, help="number of runs that train at the same time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    parser.add_argument("--table", action="store_true", help="train nothing: the table of the runs that are finished")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the rows as JSON")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="key of the recipes to set in every run"
    )
    arguments = parser.parse_args(argv)
    for name in ("at_once", "threads"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}={getattr(arguments, name)} is not positive")
    if wrong := [setting for setting in arguments.set if "=" not in setting]:
        raise UserError(f"--set {wrong[0]} is not KEY=VALUE")
    for name in arguments.pairs:
        if name not in PAIRS:
            raise UserError(f"unknown pair {name!r}; {known_names(name, PAIRS)}")
    if len(set(arguments.seeds)) < len(arguments.seeds):
        raise UserError(f"--seeds {' '.join(map(str, arguments.seeds))} names one twice")
    names = list(dict.fromkeys(arguments.pairs)) or list(PAIRS)
    jobs = plan(names, arguments.seeds, arguments.folder, [f"--{setting}" for setting in arguments.set])
    if not arguments.table and (
        code := study.train(list(jobs.values()), at_once=arguments.at_once, threads=arguments.threads)
    ):
        return code
    rows = [row for name in names if (row := _row(name, jobs, arguments.seeds))]
    if not rows:
        raise UserError(f"{arguments.folder} has no finished pair of runs")
    print(table(rows))
    if arguments.out is not None:
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


def _row(name: str, jobs: dict[tuple[str, str, int], Job], seeds: Sequence[int]) -> dict[str, Any] | None:
    """Return the figures of a pair over the seeds of which both models are finished; None without such a seed."""
    runs = {}
    for (pair, model, seed), job in jobs.items():
        if pair == name:
            job.look()
            if job.is_done:
                runs[model, seed] = read_run(job.folder)
    both = [seed for seed in seeds if (DENSE, seed) in runs and (EXPERTS, seed) in runs]
    if not both:
        return None
    (dense,) = group_runs([runs[DENSE, seed] for seed in both])
    (experts,) = group_runs([runs[EXPERTS, seed] for seed in both])
    reached = reach(experts.curve, dense.last.mean)
    half = [seed for seed in both if (HALF, seed) in runs]
    full_dense, full = _full(name)
    return {
        "pair": name,
        "seeds": both,
        "params": {DENSE: dense.runs[0].params, EXPERTS: experts.runs[0].params},
        "params_of_recipe": {DENSE: full_dense.num_params(), EXPERTS: full.num_params()},
        "flops_per_token": {DENSE: dense.flops_per_token, EXPERTS: experts.flops_per_token},
        "flops_ratio_of_recipe": full.flops_per_token() / full_dense.flops_per_token(),
        "tokens": dense.last.tokens,
        "losses": {DENSE: _of_seed(dense), EXPERTS: _of_seed(experts)},
        "difference": _difference(_of_seed(experts), _of_seed(dense)),
        "steps": dense.last.step,
        "reached_at": None if reached is None else reached.step,
        "below_from": _below_from(dense, experts),
        "half": {
            "seeds": half,
            "losses": [runs[HALF, seed].validations[-1].loss for seed in half],
            "difference": _difference(
                [runs[HALF, seed].validations[-1].loss for seed in half],
                [runs[DENSE, seed].validations[-1].loss for seed in half],
            ),
        },
        "seconds_per_token_ratio": fmean(_seconds_per_token(run) for run in experts.runs)
        / fmean(_seconds_per_token(run) for run in dense.runs),
    }


def _full(name: str):
    """Return the shipped recipe of a pair without and with experts."""
    from pretrain.config import load_recipe

    pair = PAIRS[name]
    return load_recipe(pair.full, list(pair.full_dense)), load_recipe(pair.full, [])


def _of_seed(group: Group) -> list[float]:
    return list(group.last.losses)


def _difference(losses: Sequence[float], others: Sequence[float]) -> dict[str, float | None]:
    """Return the mean difference, paired by seed, with Student's 95% interval; None for what too few seeds give."""
    each = [a - b for a, b in zip(losses, others, strict=True)]
    if not each:
        return {"mean": None, "low": None, "high": None}
    if len(each) == 1:
        return {"mean": each[0], "low": None, "high": None}
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


def _seconds_per_token(run: Run) -> float:
    rates = [
        row["tokens_per_second"] for row in read_metrics(run.folder / "metrics.jsonl") if row.get("tokens_per_second")
    ]
    return 1 / median(rates)


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
