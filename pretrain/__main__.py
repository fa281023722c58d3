"""``python -m pretrain RECIPE.toml [--section.key value] [--resume [WHERE]]``, alone or under torchrun."""

import argparse
import os
import sys
import time
from collections.abc import Sequence

import torch.distributed as dist

from fmoe.cli import run
from fmoe.errors import EXIT_USAGE, UserError
from pretrain import process, supervise
from pretrain.config import load_recipe
from pretrain.config.load import shipped_recipes
from pretrain.exit_codes import EXIT_DIVERGED, Diverged

_SECONDS_FOR_THE_FIRST = 30


def parse(argv: Sequence[str], program: str, usage: str = "", about: str = "") -> tuple[argparse.Namespace, list[str]]:
    """The recipe, ``--resume``, and the rest: options over the recipe. ``usage`` is what the program takes beside,
    ``about`` what the help says of that."""
    shipped = ", ".join(shipped_recipes())
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        add_help=False,
        usage=f"{program} RECIPE [--resume [WHERE] [--fallback]] {usage} [--section.key value ...]".replace("  ", " "),
        epilog=f"{about}{program} RECIPE --help lists every key.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", help=f"a TOML file, or the name of a recipe that is shipped: {shipped}")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="run",
        metavar="WHERE",
        help="go on from the newest checkpoint of the run's folder; from the folder WHERE; "
        "or, with 'auto', from the newest if there is one",
    )
    parser.add_argument(
        "--fallback",
        action="store_true",
        help="with --resume: pass over damaged checkpoints, to the newest that is intact",
    )
    arguments, overrides = parser.parse_known_args(argv)
    if arguments.recipe is None:
        if set(overrides) & {"-h", "--help"}:
            parser.print_help()
            raise SystemExit(0)
        raise UserError(f"no recipe: {program} RECIPE (a TOML file, or {shipped})")
    if arguments.fallback and arguments.resume is None:
        raise UserError("--fallback without --resume: a new run has no checkpoint to pass over")
    return arguments, overrides


def main(argv: Sequence[str]) -> int:
    """One process of a run; the codes are in `pretrain.exit_codes`. Raises UserError for what the user can mend."""
    supervise.join()
    try:
        arguments, overrides = parse(argv, "python -m pretrain")
        recipe = load_recipe(arguments.recipe, overrides)
        recipe.check_world_size(process.world_size())
        from pretrain.session import train  # here, because it imports megatron-core

        code = train(recipe, arguments.resume, fallback=arguments.fallback)
    except Diverged as error:
        if dist.get_rank() == 0:
            print(f"pretrain: error: {error}", file=sys.stderr)
        code = EXIT_DIVERGED
    except (UserError, ModuleNotFoundError):
        # Until the processes have met, all of a machine find the same thing wrong: one of them says so.
        if process.local_rank() != 0 and not dist.is_initialized():
            if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun ends all with the first that goes: that one goes first
                time.sleep(_SECONDS_FOR_THE_FIRST)
            supervise.report(EXIT_USAGE)
            return EXIT_USAGE
        supervise.report(EXIT_USAGE)
        raise
    finally:
        process.stop()
    return supervise.report(code)


if __name__ == "__main__":
    sys.exit(run("pretrain", lambda: main(sys.argv[1:])))
