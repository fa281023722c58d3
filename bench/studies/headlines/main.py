"""``python -m bench headlines``: models with experts against their dense twins, at equal active FLOPs.

Trains each pair of models, and the variants of each study, with each seed, two runs at once. Then runs the benchmarks
whose figures are compared with those of publications, one after the other, and prints all tables. Finished runs and
reports are kept, and stopped runs resume. See docs/headlines.md.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, linear_regression, median, stdev
from typing import Any

from bench.convergence import study
from bench.convergence.study import Job
from bench.intervals import student_t
from bench.studies.headlines import numbers
from fmoe.errors import UserError, known_names
from pretrain.compare import figure
from pretrain.compare.groups import Group, group_runs, reach
from pretrain.compare.runs import Run, read_run
from pretrain.config import Recipe, load_recipe
from pretrain.formats import markdown
from pretrain.tracking import read_metrics

HERE = Path(__file__).parent
DENSE = "dense"
EXPERTS = "experts"
HALF = "half"


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
    return ("--moe.num_experts", "0", "--model.ffn_hidden_size", width, "--parallel.expert", "1", *more)


PAIRS = {
    "gpt-64-bytes": Pair(_without_experts(256), "gpt-64-bytes", _without_experts(2048)),
    # Each model at its best rate: docs/headlines.md.
    "gpt-96": Pair(_without_experts(256, "--optimizer.lr", "2e-2"), "gpt-96", _without_experts(4096)),
    "transformer-xl-64": Pair(_without_experts(256), "transformer-xl-64", _without_experts(2048)),
    "switch-t5": Pair(
        _without_experts(
            256,
            *[
                "--model.dense_ffn_hidden_size",
                "none",
                "--moe.every",
                "1",
                "--moe.group_size",
                "none",
                "--optimizer.lr",
                "1e-2",
            ],
        ),
        "switch-base",
        _without_experts(3072, "--moe.every", "1"),
    ),
}


@dataclass(frozen=True)
class Study:
    """Variants of a scaled-down recipe of equal active FLOPs.

    Attributes:
        recipe: name of the pair whose recipe with experts is varied.
        seeds: seeds of the runs, unless ``--seeds`` chooses others.
        base: the variant that the others are compared with.
        variants: options by name.
        curve: numbers of experts by variant, for the exponent of the loss over them.
    """

    recipe: str
    seeds: tuple[int, ...]
    base: str
    variants: dict[str, tuple[str, ...]]
    curve: dict[str, int] = field(default_factory=dict)


def _short(*options: str) -> tuple[str, ...]:
    return ("--train.steps", "1000", *options)


def _experts(count: int, width: int, *more: str) -> tuple[str, ...]:
    """Return the options of a short run with ``count`` experts of hidden width ``width``."""
    return _short("--moe.num_experts", str(count), "--model.ffn_hidden_size", str(width), *more)


def _rates(name: str, dense: Sequence[str], experts: Sequence[str]) -> Study:
    """Return a sweep of learning rates of both models of a pair, with a seed that the pair's runs do not have."""
    variants = {f"dense-{rate}": (*PAIRS[name].dense, "--optimizer.lr", rate) for rate in dense}
    variants |= {f"experts-{rate}": ("--optimizer.lr", rate) for rate in experts}
    return Study(name, (4,), f"dense-{dense[1]}", variants)


# A router has as many multiplications per token as it has experts times the width, so more experts are narrower.
_FINE = _experts(128, 48, "--moe.top_k", "4")


def _half_of_steps(prefix: str, rates: Sequence[str], *corpus: str) -> Study:
    """Return short runs of gpt-64-bytes beside dense ones of twice the steps, at the pair's rate and at ``rates``; the
    first of these is the base."""
    dense = (*PAIRS["gpt-64-bytes"].dense, *corpus)
    variants = {f"{prefix}dense-{rate}": (*dense, "--optimizer.lr", rate) for rate in rates} | {
        f"{prefix}{DENSE}": dense,
        f"{prefix}{HALF}": _short(*corpus),
        f"{prefix}fine-and-balance-over-micro-batch": (*_FINE, "--moe.balance_scope", "data_parallel", *corpus),
    }
    return Study("gpt-64-bytes", (1, 2, 3), f"{prefix}dense-{rates[0]}", variants)


STUDIES = {
    "rates-of-gpt-64-bytes": _rates(
        "gpt-64-bytes", ["5e-3", "1e-2", "2e-2", "4e-2"], ["2.5e-3", "5e-3", "1e-2", "2e-2"]
    ),
    "rates-of-gpt-96": _rates("gpt-96", ["1e-2", "2e-2", "4e-2"], ["2.5e-3", "5e-3", "1e-2"]),
    "rates-of-transformer-xl-64": _rates("transformer-xl-64", ["5e-3", "1e-2", "2e-2"], ["5e-3", "1e-2", "2e-2"]),
    "rates-of-switch-t5": _rates("switch-t5", ["5e-3", "1e-2", "2e-2"], ["2.5e-3", "5e-3", "1e-2"]),
    # The base is the third run of the pair gpt-64-bytes.
    "variants-of-gpt-64-bytes": Study(
        "gpt-64-bytes",
        (1, 2, 3),
        HALF,
        {
            HALF: _short(),
            "dense-half": (*PAIRS["gpt-64-bytes"].dense, *_short()),
            "8-experts": _experts(8, 126),
            "16-experts": _experts(16, 124),
            "32-experts": _experts(32, 120),
            "128-experts": _experts(128, 96),
            "256-experts": _experts(256, 64),
            "128-fine-experts-top-4": _FINE,
            "switch-top-1": _experts(64, 224, "--moe.top_k", "1", "--moe.gate", "switch"),
            "switch-top-1-without-jitter": _experts(
                64, 224, "--moe.top_k", "1", "--moe.gate", "switch", "--moe.jitter", "0"
            ),
            "sigmoid-bias": _short("--moe.gate", "sigmoid", "--moe.balance_loss", "0"),
            "gshard-capacity-2": _short("--moe.gate", "gshard", "--moe.capacity_factor", "2"),
            "gshard-dropless": _short("--moe.gate", "gshard"),
            "shared-expert": _short("--moe.top_k", "1", "--moe.gate", "switch", "--moe.num_shared_experts", "1"),
            "no-balance-loss": _short("--moe.balance_loss", "0"),
            "balance-over-micro-batch": _short("--moe.balance_scope", "data_parallel"),
            "capacity-1.25": _short("--moe.capacity_factor", "1.25"),
            "bf16": _short("--train.precision", "bf16"),
        },
        curve={"8-experts": 8, "16-experts": 16, "32-experts": 32, HALF: 64, "128-experts": 128, "256-experts": 256},
    ),
    "half-of-the-steps": _half_of_steps("", ["2e-2"]),
    "half-of-the-steps-on-docs": _half_of_steps(
        "docs-",
        ["2e-2", "4e-2"],
        "--data.train",
        "data/bytes/out/docs/train",
        "--data.validation",
        "data/bytes/out/docs/validation",
    ),
}

NAMES = [*PAIRS, *STUDIES, *numbers.NUMBERS]


def main(argv: Sequence[str]) -> int:
    """Return 0, or the code that ended the training early (see `study.train`), or that of a failed benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench headlines", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"pairs and studies to train, benchmarks to run; by default all: {', '.join(NAMES)}",
    )
    study.add_options(parser, folder="runs/headlines", seeds=[])
    parser.add_argument("--table", action="store_true", help="train nothing: the tables of the runs that are finished")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the rows as JSON")
    arguments = parser.parse_args(argv)
    options = study.check_options(arguments)
    for name in arguments.names:
        if name not in NAMES:
            raise UserError(f"unknown pair, study or benchmark {name!r}; {known_names(name, NAMES)}")
    names = list(dict.fromkeys(arguments.names)) or NAMES
    jobs = plan(names, arguments.seeds, arguments.folder, options)
    once = list({job.folder: job for job in jobs.values()}.values())  # a study may have a run of a pair
    code = 0 if arguments.table else study.train(once, at_once=arguments.at_once, threads=arguments.threads)
    if code:
        return code
    measured = [name for name in numbers.NUMBERS if name in names]
    reports = arguments.folder / "numbers"
    failed = 0 if arguments.table else numbers.measure(measured, reports)
    groups = {name: _groups(name, jobs) for name in names if name not in measured}
    rows = [_row(name, groups[name]) for name in names if name in PAIRS and groups[name]]
    of_studies = {name: _study_rows(name, groups[name]) for name in names if name in STUDIES and groups[name]}
    finished = numbers.reports(measured, reports)
    if not rows and not of_studies and not finished and not failed:
        raise UserError(f"{arguments.folder} has no finished pair of runs")
    drawn = [row["pair"] for row in rows] + list(of_studies)
    for name in drawn:
        figure.draw(list(groups[name].values()), arguments.folder / f"{name}.svg")
    if rows:
        print(table(rows))
    for name, variants in of_studies.items():
        print(f"\n{name}, compared with {STUDIES[name].base}:\n\n{study_table(variants)}")
        exponent = _exponent(STUDIES[name].curve, variants)
        if exponent:
            print(f"\nloss ~ experts ** {_shown(exponent)}")
    for text in finished:
        print(f"\n{text}")
    if drawn:
        print(f"curves: {', '.join(str(arguments.folder / name) + '.svg' for name in drawn)}", file=sys.stderr)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        every = [*rows, *(row for variants in of_studies.values() for row in variants)]
        arguments.out.write_text(json.dumps(every, indent=1, allow_nan=False) + "\n")
    return failed


def plan(
    names: Sequence[str], seeds: Sequence[int], folder: Path, more: Sequence[str] = ()
) -> dict[tuple[str, str, int], Job]:
    """Return the runs by pair or study, model and seed: first the pairs, all with the first seed before any with the
    second, then the studies.

    Args:
        seeds: seeds of all runs; if empty, 1 to 3 for pairs, and each study's own.

    Raises:
        UserError: a recipe is invalid, or differs from the recipe of the existing run.
    """
    jobs = {}

    def add(name: str, recipe: str, models: dict[str, tuple[str, ...]], seed: int) -> None:
        for model, options in models.items():
            path = str(HERE / f"{recipe}.toml")
            job = study.make_job(path, f"{recipe}-{model}-seed{seed}", seed, folder, [*more, *options])
            jobs[name, model, seed] = job

    for seed in seeds or (1, 2, 3):
        for name in names:
            if name in PAIRS:
                steps = load_recipe(str(HERE / f"{name}.toml"), list(more)).train.steps
                half = ("--train.steps", str(steps // 2))
                add(name, name, {DENSE: PAIRS[name].dense, EXPERTS: (), HALF: half}, seed)
    for name in names:
        if name in STUDIES:
            for seed in seeds or STUDIES[name].seeds:
                add(name, STUDIES[name].recipe, STUDIES[name].variants, seed)
    return jobs


def _groups(name: str, jobs: dict[tuple[str, str, int], Job]) -> dict[str, Group]:
    """Return the finished runs of a pair or study by model: of the seeds with which both models of a pair, or the base
    of a study, are finished; empty without one."""
    runs: dict[str, dict[int, Run]] = {}
    for (of, model, seed), job in jobs.items():
        if of == name:
            job.look()
            runs.setdefault(model, {})
            if job.is_done:
                runs[model][seed] = read_run(job.folder)
    needed = (DENSE, EXPERTS) if name in PAIRS else (STUDIES[name].base,)
    seeds = set.intersection(*(set(runs[model]) for model in needed))
    found = {model: [run for seed, run in of_seed.items() if seed in seeds] for model, of_seed in runs.items()}
    return {model: group_runs(of_model)[0] for model, of_model in found.items() if of_model}


def _row(name: str, groups: dict[str, Group]) -> dict[str, Any]:
    """Return the figures of a pair."""
    dense = groups[DENSE]
    experts = groups[EXPERTS]
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


def _study_rows(name: str, groups: dict[str, Group]) -> list[dict[str, Any]]:
    """Return the figures of a study's variants."""
    base = groups[STUDIES[name].base]
    return [
        {
            "study": name,
            "variant": variant,
            "seeds": list(_of_seed(group)),
            "params": group.runs[0].params,
            "flops_per_token": group.flops_per_token,
            "losses": list(_of_seed(group).values()),
            "difference": _difference(_of_seed(group), _of_seed(base)),
            "entropy_share": _entropy_share(group),
            "seconds_per_token_ratio": _seconds_per_token(group) / _seconds_per_token(base),
        }
        for variant, group in groups.items()
    ]


def _entropy_share(group: Group) -> float | None:
    """Return the mean entropy of the routers over the last 100 steps, as a share of its maximum; None if dense."""
    experts = group.runs[0].recipe.model.moe.num_experts
    if not experts:
        return None
    rows = [row for run in group.runs for row in read_metrics(run.folder / "metrics.jsonl")[-100:]]
    return fmean(row["moe/entropy"] for row in rows if "moe/entropy" in row) / math.log(experts)


def _exponent(curve: dict[str, int], rows: Sequence[dict[str, Any]]) -> dict[str, float | None] | None:
    """Return the exponent of the loss as a power of the number of experts, fitted to each seed's runs by least squares
    in logarithms: mean and Student's 95% interval over the seeds. None unless every variant of the curve is finished.

    Source: with a dense model of fixed size, Clark et al. 2022 (arXiv 2202.01169), equation 4 without saturation.
    """
    losses = {row["variant"]: dict(zip(row["seeds"], row["losses"], strict=True)) for row in rows}
    if not curve or not losses.keys() >= curve.keys():
        return None
    slopes = {}
    for seed in set.intersection(*(set(losses[variant]) for variant in curve)):
        x = [math.log(count) for count in curve.values()]
        slopes[seed] = linear_regression(x, [math.log(losses[variant][seed]) for variant in curve]).slope
    return _difference(slopes, dict.fromkeys(slopes, 0.0)) if slopes else None


def study_table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the variants of a study as Markdown."""
    lines = [["variant", "parameters", "seeds", "loss", "difference", "router entropy", "time per token"]]
    for row in rows:
        entropy = row["entropy_share"]
        lines.append(
            [
                f"`{row['variant']}`",
                f"{row['params'] / 1e6:.2f} M",
                ", ".join(map(str, row["seeds"])),
                f"{fmean(row['losses']):.4f}",
                _shown(row["difference"]),
                "-" if entropy is None else f"{entropy:.3f} of the maximum",
                f"{row['seconds_per_token_ratio']:.2f} times",
            ]
        )
    return markdown(lines)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows of pairs as Markdown."""
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
        params = row["params"]
        recipe = row["params_of_recipe"]
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
