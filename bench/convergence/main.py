"""``python -m bench convergence``: dense against Mixture-of-Experts at equal active FLOPs, trained from scratch.

Each recipe is trained with each seed, then `fmoe compare` compares the runs. Finished runs are kept, and stopped ones
resume.
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
    """Return 0, or the code that ended the study early: see `study.train`."""
    parser = argparse.ArgumentParser(prog="python -m bench convergence", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "recipes",
        nargs="*",
        default=RECIPES,
        metavar="RECIPE",
        help="recipes to train; by default those of make compare",
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/compare"), help="parent of the run folders")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="seeds; each recipe gets a run per seed")
    parser.add_argument("--at-once", type=int, default=2, help="number of runs that train at the same time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="key of the recipes to set in every run, e.g. parallel.expert=1",
    )
    arguments = parser.parse_args(argv)
    for name in ("at_once", "threads"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}={getattr(arguments, name)} is not positive")
    if wrong := [setting for setting in arguments.set if "=" not in setting]:
        raise UserError(f"--set {wrong[0]} is not KEY=VALUE")
    if len(set(arguments.seeds)) < len(arguments.seeds):
        raise UserError(f"--seeds {' '.join(map(str, arguments.seeds))} has a duplicate")
    stems = [Path(recipe).stem for recipe in arguments.recipes]
    if len(set(stems)) < len(stems):
        raise UserError(f"recipes must have different names, because folders are named after them: {', '.join(stems)}")
    options = [f"--{setting}" for setting in arguments.set]
    jobs = study.plan(arguments.recipes, arguments.seeds, arguments.folder, options)
    # Longest runs first (recipes are in ascending order), because a long run at the end would leave a core idle.
    if code := study.train(jobs[::-1], at_once=arguments.at_once, threads=arguments.threads):
        return code
    return compare([*(str(job.folder) for job in jobs), "--out", str(arguments.folder / "curves.svg")])
