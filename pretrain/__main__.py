"""Train one rank of a run: ``python -m pretrain RECIPE.toml [--section.key value] [--resume [WHERE]]``.

A run with several ranks needs torchrun, which starts this command once per rank.
"""

from pretrain import leave_working_folder

if __name__ == "__main__":
    leave_working_folder()  # before anything else is imported

import argparse
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from fmoe.cli import refusal, run, unknown_option
from fmoe.errors import EXIT_USAGE, UserError
from pretrain.config.imports import import_plugins
from pretrain.config.load import (
    find_recipe,
    instead_of_key,
    is_recipe,
    read_recipe,
    recipe_keys,
    shipped_recipes,
    split_overrides,
)
from pretrain.config.reference import options_help
from pretrain.start import process, torchrun
from pretrain.start.process import EXIT_DIVERGED, Diverged

_SECONDS_FOR_THE_FIRST = 30  # time for another rank to print the error and end


def parse(
    argv: Sequence[str], program: str, usage: str = "", about: str = ""
) -> tuple[argparse.Namespace, list[tuple[str, Any]]]:
    """Parse the recipe, ``--resume``, ``--fallback`` and the options that set recipe keys, such as ``--train.steps
    100``.

    Args:
        usage: the program's other options, for the usage line.
        about: description of these options, for the help.

    Returns:
        The arguments (``recipe``, ``resume``, ``fallback``), and the recipe keys that options set, with their values.

    Raises:
        UserError: no recipe or several, an unknown option, an invalid value, or ``--fallback`` without ``--resume``.
        SystemExit: after printing ``--help``.
    """
    shipped = ", ".join(shipped_recipes())
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        add_help=False,
        usage=f"{program} RECIPE [--resume [WHERE] [--fallback]] {usage} [--section.key value ...]".replace("  ", " "),
        description=f"RECIPE is a TOML file, or the name of a shipped recipe: {shipped}",
        epilog=f"{about}{program} RECIPE --help lists every key.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="run",
        metavar="WHERE",
        help="resume from the newest checkpoint in the run's folder, or from the checkpoint or run folder WHERE; "
        "with 'auto', from the newest checkpoint if there is one, else start a new run",
    )
    parser.add_argument(
        "--fallback",
        action="store_true",
        help="with --resume: skip damaged checkpoints and use the newest intact one",
    )
    overrides, rest = split_overrides(argv)
    arguments, words = parser.parse_known_args(rest)
    wants_help = bool({"-h", "--help"}.intersection(words))
    options = [word for word in words if word.startswith("-") and word not in ("-h", "--help")]
    if options:
        option = options[0].partition("=")[0]
        if instead := instead_of_key(option):
            raise UserError(f"unknown option {option}; {instead}")
        keys = [f"--{name.replace('_', '-')}" for name in recipe_keys()]
        same = [name for name in keys if name.rpartition(".")[2] == option.lstrip("-").replace("_", "-")]
        flags = re.findall(r"--[a-z-]+", parser.usage or "")
        raise UserError(unknown_option(option, [*flags, *keys], f"{program} RECIPE", same))
    names = [word for word in words if not word.startswith("-")]
    if not names and arguments.resume is not None and is_recipe(arguments.resume):
        names, arguments.resume = [arguments.resume], "run"  # --resume RECIPE
    if len(names) > 1:
        raise UserError(f"got {len(names)} recipes, {' and '.join(map(repr, names))}: pass one")
    arguments.recipe = names[0] if names else None
    if wants_help:
        if arguments.recipe is None:
            parser.print_help()
        else:
            print(options_help(read_recipe(arguments.recipe, overrides), f"{program} {arguments.recipe}"))
        raise SystemExit(0)
    if arguments.recipe is None:
        lists = [key for key, value in overrides if isinstance(value, tuple) and any(map(is_recipe, map(str, value)))]
        greedy = f"--{lists[0].replace('_', '-')}" if lists else ""
        after = f"; put RECIPE before {greedy}, which takes all words up to the next option" if lists else ""
        raise UserError(f"no recipe: run {program} RECIPE, where RECIPE is a TOML file or one of {shipped}{after}")
    if arguments.fallback and arguments.resume is None:
        raise UserError("--fallback needs --resume: a new run has no checkpoints")
    return arguments, overrides


def main(argv: Sequence[str]) -> int:
    """Train one rank of a run, and return its exit code. `pretrain.start.process` lists the codes.

    Raises:
        UserError: an error that the user can fix.
    """
    torchrun.join()
    try:
        arguments, overrides = parse(argv, "python -m pretrain")
        recipe = import_plugins(read_recipe(arguments.recipe, overrides), find_recipe(arguments.recipe).parent)
        recipe.check()
        recipe.check_world_size(process.world_size())
        from pretrain.start.run import train  # imports megatron-core

        try:
            code = train(recipe, arguments.resume, fallback=arguments.fallback)
        except OSError as error:
            if (message := refusal(error)) is not None:
                raise UserError(message) from error
            raise
    except Diverged as error:
        if dist.get_rank() == 0:
            print(f"pretrain: error: {error}", file=sys.stderr)
        code = EXIT_DIVERGED
    except (UserError, ModuleNotFoundError) as error:
        # Before the ranks have met, all ranks of a machine find the same error: only one of them prints it.
        is_printed_elsewhere = isinstance(error, process.RefusedElsewhere)
        if is_printed_elsewhere or (process.local_rank() != 0 and not dist.is_initialized()):
            # torchrun ends all ranks when the first one ends: let the printing rank end first.
            if "TORCHELASTIC_RUN_ID" in os.environ:
                time.sleep(_SECONDS_FOR_THE_FIRST)
            torchrun.report(EXIT_USAGE)
            return EXIT_USAGE
        torchrun.report(EXIT_USAGE)
        raise
    except Exception:
        if not torchrun.keep_error(traceback.format_exc()):
            raise
        return 1
    finally:
        process.stop()
    return torchrun.report(code)


if __name__ == "__main__":
    sys.exit(run("pretrain", lambda: main(sys.argv[1:])))
