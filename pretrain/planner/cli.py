"""``fmoe plan``: the split of a recipe, or the size of a model; ``fmoe plan calibrate`` measures a cluster."""

import json
import math
from pathlib import Path

from fmoe.cli import Parser
from fmoe.errors import UserError
from pretrain.config.load import find_recipe, read_recipe, split_overrides
from pretrain.files import refuse_existing
from pretrain.planner import sizing
from pretrain.planner.cluster import load_cluster
from pretrain.planner.laws import LAWS

_BOUNDS = {
    "gpu_days": (1e-3, 1e9),
    "peak_flops": (1e9, 1e18),
    "mfu": (0.01, 1),
    "max_params": (1e6, math.inf),
    "flops": (1e17, 1e27),
}


def main(argv: list[str]) -> int:
    """Calibrate, plan the split of a recipe, or print the best sizes for a budget; return 0. See docs/planner.md.

    Raises:
        UserError: an option is out of bounds or needs another one; the law of the recipe keys has no size; or no split
            of the recipe fits.
    """
    if argv[:1] == ["calibrate"]:
        from pretrain.planner import calibrate  # which imports torch

        return calibrate.main(argv[1:])
    if argv and not argv[0].startswith("-"):
        return _split(argv)
    return _size(argv)


def _split(argv: list[str]) -> int:
    overrides, words = split_overrides(argv)
    parser = Parser(
        prog="fmoe plan RECIPE",
        description="Choose the split of a recipe over the ranks of a cluster, by predictions of time and memory. "
        "Options of the form --section.key change the recipe.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="recipe: a file, or the name of a shipped one")
    parser.add_argument(
        "--cluster", required=True, help="a file of fmoe plan calibrate, or a shipped one with ranks: h100-256"
    )
    parser.add_argument("--ranks", type=int, help="number of ranks (default: all of the cluster)")
    loads = parser.add_mutually_exclusive_group()
    loads.add_argument("--load", type=Path, metavar="RUN", help="folder of a run whose recorded loads of experts count")
    loads.add_argument(
        "--skew", type=float, default=0.0, help="loads by Zipf's law with this exponent (default: 0, equal loads)"
    )
    parser.add_argument("--tokens", type=float, help="training tokens, for days and cost (default: the recipe's)")
    parser.add_argument("--seconds", type=float, default=40.0, help="time of the search (default: %(default)g)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the recipe with the best split")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with all splits that were tried")
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(words)
    refuse_existing([path for path in (options.out, options.html) if path is not None], options.overwrite)
    cluster = load_cluster(options.cluster)
    ranks = cluster.num_ranks if options.ranks is None else options.ranks
    if not 1 <= ranks <= cluster.num_ranks:
        raise UserError(f"--ranks={ranks} must be between 1 and {cluster.num_ranks}, those of --cluster")
    for name, value, low in (("tokens", options.tokens, 1), ("skew", options.skew, 0), ("seconds", options.seconds, 1)):
        if value is not None and not low <= value < math.inf:
            raise UserError(f"--{name}={value:g} must be at least {low}, and finite")
    from pretrain.config.imports import import_plugins
    from pretrain.planner import splits  # which imports torch

    recipe = import_plugins(read_recipe(options.recipe, overrides), find_recipe(options.recipe).parent)
    recipe.check()
    values = splits.plan(recipe, cluster, ranks, options)
    print(json.dumps(values, indent=1) if options.json else splits.as_text(values), end="")
    return 0


def _size(argv: list[str]) -> int:
    parser = Parser(
        prog="fmoe plan",
        description="Size and training tokens of a model for a budget, by scaling laws of mixtures of experts, and the "
        "recipe keys of this size.",
        allow_abbrev=False,
    )
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--flops", type=float, help="training FLOPs, such as 1e21")
    budget.add_argument("--gpu-days", type=float, help="number of GPUs times days (needs --cluster or --peak-flops)")
    parser.add_argument(
        "--cluster", help="cluster of --gpu-days, whose peak in bf16 counts: a file of fmoe plan calibrate, or h100-256"
    )
    parser.add_argument(
        "--peak-flops", type=float, help="peak FLOP/s of a GPU, for --gpu-days: 989e12 for an H100 in bf16"
    )
    parser.add_argument(
        "--mfu",
        type=float,
        default=0.35,
        help="share of the peak that training reaches, for --gpu-days (default: 0.35)",
    )
    parser.add_argument(
        "--max-params", type=float, default=math.inf, help="upper bound on the total number of parameters"
    )
    parser.add_argument("--law", choices=LAWS, default="ludziejewski", help="law of the recipe keys (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(argv)
    if options.flops is None:
        if options.cluster is not None and options.peak_flops is None:
            options.peak_flops = load_cluster(options.cluster).device.peak.get("bf16")
        if options.peak_flops is None:
            raise UserError(f"--gpu-days={options.gpu_days:g} needs --peak-flops, or a --cluster with device.peak.bf16")
        options.flops = options.gpu_days * 86400 * options.peak_flops * options.mfu
    elif options.cluster is not None:
        raise UserError(f"--cluster={options.cluster} needs --gpu-days, not --flops={options.flops:g}")
    for key, (low, high) in _BOUNDS.items():
        value = getattr(options, key)
        if value is not None and not low <= value <= high:
            raise UserError(f"--{key.replace('_', '-')}={value:g} must be between {low:g} and {high:g}")
    planned = sizing.plan(options.flops, options.law, options.max_params)
    print(json.dumps(planned, indent=1) if options.json else sizing.text(planned))
    return 0
