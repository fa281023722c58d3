"""``python -m bench convergence``: dense against Mixture-of-Experts at equal active FLOPs, trained from scratch.

Each recipe is trained with each seed, then `fmoe compare` shows them. Runs that are finished are kept, one that was
stopped goes on.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.convergence import study
from fmoe.errors import UserError
from pretrain.compare.cli import main as compare

HERE = Path(__file__).parent
RECIPES = [str(HERE / f"{name}.toml") for name in ("dense", "moe-8", "moe-32")]


def main(argv: Sequence[str]) -> int:
    """Returns 0, or what ended it early: see `study.train`."""
    parser = argparse.ArgumentParser(prog="python -m bench convergence", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "recipes", nargs="*", default=RECIPES, metavar="RECIPE", help="by default those of make compare"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/compare"), help="gets a folder for each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="a run each")
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side")
    parser.add_argument("--threads", type=int, default=1, help="of each run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a key of all recipes, e.g. parallel.expert=1"
    )
    arguments = parser.parse_args(argv)
    for name in ("at_once", "threads"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}={getattr(arguments, name)} is not positive")
    if wrong := [setting for setting in arguments.set if "=" not in setting]:
        raise UserError(f"--set {wrong[0]} is not KEY=VALUE")
    if len(set(arguments.seeds)) < len(arguments.seeds):
        raise UserError(f"--seeds {' '.join(map(str, arguments.seeds))} names one twice")
    stems = [Path(recipe).stem for recipe in arguments.recipes]
    if len(set(stems)) < len(stems):
        raise UserError(f"two recipes have one name, which their folders take: {', '.join(stems)}")
    options = [f"--{setting}" for setting in arguments.set]
    jobs = study.plan(arguments.recipes, arguments.seeds, arguments.folder, options)
    # The longest at the end would leave one core without work: the recipes are in the order of their length.
    if code := study.train(jobs[::-1], at_once=arguments.at_once, threads=arguments.threads):
        return code
    return compare([*(str(job.folder) for job in jobs), "--out", str(arguments.folder / "curves.svg")])
