"""``fmoe plan``: the size of a model for a budget; ``fmoe plan calibrate`` measures a cluster."""

import json
import math

from fmoe.cli import Parser
from fmoe.errors import UserError
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
    """Calibrate, or print the best sizes for a budget by scaling laws, and recipe keys; return 0. See docs/planner.md.

    Raises:
        UserError: an option is out of bounds or needs another one, or the law of the recipe keys has no size.
    """
    if argv[:1] == ["calibrate"]:
        from pretrain.planner import calibrate  # which imports torch

        return calibrate.main(argv[1:])
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
