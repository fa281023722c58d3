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
    """Return the code of `fmoe compare`, or the one that ended the study before it: see `study.train`."""
    parser = argparse.ArgumentParser(prog="python -m bench convergence", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "recipes",
        nargs="*",
        default=RECIPES,
        metavar="RECIPE",
        help="recipes to train; by default those of make compare",
    )
    study.add_options(parser, folder="runs/compare", seeds=[1, 2])
    arguments = parser.parse_args(argv)
    options = study.check_options(arguments)
    stems = [Path(recipe).stem for recipe in arguments.recipes]
    if len(set(stems)) < len(stems):
        raise UserError(f"recipes must have different names, because folders are named after them: {', '.join(stems)}")
    jobs = study.plan(arguments.recipes, arguments.seeds, arguments.folder, options)
    # Longest runs first (recipes are in ascending order), because a long run at the end would leave a core idle.
    code = study.train(jobs[::-1], at_once=arguments.at_once, threads=arguments.threads)
    if code:
        return code
    return compare([*(str(job.folder) for job in jobs), "--out", str(arguments.folder / "curves.svg")])
