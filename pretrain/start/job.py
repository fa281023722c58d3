"""A job: what a command line asks for, parsed and checked once."""

import argparse
import dataclasses
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fmoe.cli import unknown_option
from fmoe.errors import UserError
from pretrain.config import Recipe
from pretrain.config.imports import import_plugins
from pretrain.config.load import (
    build_recipe,
    find_recipe,
    is_recipe,
    read_recipe,
    recipe_text,
    shipped_recipes,
    split_overrides,
)
from pretrain.config.sections import keys
from pretrain.config.validation import instead_of_key

GPUS_OF_A_NODE = 8
"""GPUs per node that a dry run assumes if none of --nodes, --processes-per-node and parallel.node_size is set."""


@dataclass(frozen=True)
class Job:
    """A run, and the processes that train it.

    Attributes:
        name: the recipe's file, or the name of a shipped recipe.
        recipe: the recipe with the options of the command line.
        argv: the command line.
        resume: None for a new run. "run" for the newest checkpoint of ``run.folder``. "auto" for the same or, if there
            is none, a new run. Any other value is the path of a checkpoint, of a folder of checkpoints or of a run.
        fallback: skip damaged checkpoints.
        dry_run, json: print the plan of the run instead, as text or JSON.
        nodes, processes_per_node: number of nodes, and of ranks on each.
        node_rank: number of this node.
        rendezvous: HOST:PORT where several nodes meet.
        max_restarts: maximum number of restarts after a failure.
        refusal: reason for which rank 0 must refuse to start; empty to start. Several nodes thus end together.
        program: the command, for messages.
    """

    name: str
    recipe: Recipe
    argv: tuple[str, ...] = ()
    resume: str | None = None
    fallback: bool = False
    dry_run: bool = False
    json: bool = False
    nodes: int = 1
    processes_per_node: int = 1
    node_rank: int = 0
    rendezvous: str = ""
    max_restarts: int = 0
    refusal: str = ""
    program: str = "fmoe train"

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.recipe.run.folder)

    def announce(self) -> None:
        """Print the first line of a run, on rank 0."""
        if os.environ.get("RANK", "0") == "0":
            size = self.recipe.parallel.world_size
            sys.stdout.write(f"{self.name}: {size} process{'es' * (size != 1)}, run folder {self.folder}\n")
            sys.stdout.flush()

    def save(self, path: Path) -> None:
        """Write the job to a file, which `load` reads."""
        path.write_text(json.dumps(dataclasses.asdict(self) | {"recipe": recipe_text(self.recipe)}))


def load(path: Path) -> Job:
    """Read a job from the file that `Job.save` wrote."""
    values = json.loads(path.read_text())
    return Job(**values | {"recipe": build_recipe(tomllib.loads(values["recipe"])), "argv": tuple(values["argv"])})


def parse(argv: Sequence[str], program: str) -> Job:
    """Parse the command line of ``fmoe train`` or, without the options of the launcher, of ``python -m pretrain``.

    Reads the recipe, but does not call `Recipe.check`, and does not import torch.

    Raises:
        UserError: no recipe or several; an unknown option, or an invalid value; options that exclude each other, or
            that need another number of ranks than the recipe's ``[parallel]``.
        SystemExit: after printing ``--help``.
    """
    parser = _parser(program)
    overrides, words = split_overrides(argv)
    options, words = parser.parse_known_args(words)
    for word in words:
        if word.startswith("-"):
            raise _unknown(word.partition("=")[0], program, parser)
    if not words and options.resume is not None and is_recipe(options.resume):
        words = [options.resume]  # --resume RECIPE
        options.resume = "run"
    if len(words) > 1:
        raise UserError(f"got {len(words)} recipes, {' and '.join(map(repr, words))}: pass one")
    if options.help and not words:
        parser.print_help()
        raise SystemExit(0)
    if not words:
        lists = [key for key, value in overrides if isinstance(value, tuple) and any(map(is_recipe, map(str, value)))]
        greedy = f"--{lists[0].replace('_', '-')}" if lists else ""
        after = f"; put RECIPE before {greedy}, which takes all words up to the next option" if lists else ""
        shipped = ", ".join(shipped_recipes())
        raise UserError(f"no recipe: run {program} RECIPE, where RECIPE is a TOML file or one of {shipped}{after}")
    recipe = read_recipe(words[0], overrides)
    if options.help:
        from pretrain.config.reference import options_help  # imports torch

        sys.stdout.write(options_help(recipe, f"{program} {words[0]}") + "\n")
        raise SystemExit(0)
    if program == "fmoe train":
        options.nodes, options.processes_per_node = _spread(options, recipe)
    if options.fallback and options.resume is None:
        raise UserError("--fallback needs --resume: a new run has no checkpoints")
    values = {name: value for name, value in vars(options).items() if value is not None and name != "help"}
    job = Job(words[0], recipe, tuple(argv), **values)
    if job.resume == "run" and not job.dry_run and not job.folder.exists():
        raise UserError(f"run.folder={job.folder} does not exist: omit --resume to start a new run there")
    return job


def check(job: Job) -> Job:
    """Import the recipe's plugins, and check its values. This imports torch.

    Returns:
        The job with absolute paths of plugin files.

    Raises:
        UserError: a plugin raised, or a value is invalid.
    """
    recipe = import_plugins(job.recipe, find_recipe(job.name).parent)
    recipe.check()
    return dataclasses.replace(job, recipe=recipe)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _at_least(minimum: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text} must be an integer of at least {minimum}")
        return int(text)

    return number


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise argparse.ArgumentTypeError(
            f"{text} must be HOST:PORT, the name of the node with --node-rank 0 and a free port on it"
        )
    return text


_LAUNCHER_OPTIONS = (  # name, placeholder, type, help
    ("--nodes", "N", _at_least(1), "number of nodes of the run; run this command on each"),
    ("--node-rank", "R", _at_least(0), "number of this node, from 0"),
    ("--rendezvous", "HOST:PORT", _address, "host name of node 0 and a free port on it, where the nodes meet"),
    (
        "--processes-per-node",
        "M",
        _at_least(1),
        "number of ranks on each node, checked against [parallel]",
    ),
    ("--max-restarts", "K", _at_least(0), "restart the ranks after a failure, at most K times; needs --resume auto"),
)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program,
        allow_abbrev=False,
        add_help=False,
        usage=f"{program} RECIPE [options] [--section.key value ...]",
        description=f"RECIPE is a TOML file, or the name of a shipped recipe: {', '.join(shipped_recipes())}.",
        epilog=f"{program} RECIPE --help lists every key.",
    )
    parser.add_argument("-h", "--help", action="store_true", help="print this help")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="run",
        metavar="WHERE",
        help="resume from the newest checkpoint in the run's folder, or from the checkpoint or run folder WHERE; "
        "with 'auto', from the newest checkpoint if there is one, else start a new run",
    )
    skip = "with --resume: skip damaged checkpoints and use the newest intact one"
    parser.add_argument("--fallback", action="store_true", help=skip)
    if program == "fmoe train":
        plan = "print the resolved recipe, the process grid and the bytes per rank"
        parser.add_argument("--dry-run", action="store_true", help=plan)
        parser.add_argument("--json", action="store_true", help="with --dry-run: as JSON")
        for name, metavar, kind, text in _LAUNCHER_OPTIONS:
            parser.add_argument(name, metavar=metavar, type=kind, help=text)
    return parser


def _unknown(option: str, program: str, parser: argparse.ArgumentParser) -> UserError:
    instead = instead_of_key(option)
    if instead:
        return UserError(f"unknown option {option}; {instead}")
    options = [f"--{name.replace('_', '-')}" for name in keys()]
    same = [name for name in options if name.rpartition(".")[2] == option.lstrip("-").replace("_", "-")]
    flags = set(re.findall(r"--[a-z-]+", parser.format_help()))
    return UserError(unknown_option(option, [*flags, *options], f"{program} RECIPE", same))


def _spread(options: argparse.Namespace, recipe: Recipe) -> tuple[int, int]:
    """Check the launcher's options. Return the number of nodes, and the number of ranks on each."""
    if options.json and not options.dry_run:
        raise UserError("--json needs --dry-run")
    size = recipe.parallel.world_size
    per_node = options.processes_per_node
    nodes = options.nodes or 1
    if options.dry_run and options.nodes is None:
        nodes = max(size // (per_node or recipe.parallel.node_size or GPUS_OF_A_NODE), 1)
        nodes = nodes if size % nodes == 0 else 1
    needs = f"the recipe needs {size} ({recipe.parallel.world_size_name})"
    if per_node is not None and per_node * nodes != size:
        of_nodes = f"{nodes} nodes x " if nodes > 1 else ""
        raise UserError(f"{of_nodes}--processes-per-node={per_node} is {nodes * per_node} processes, but {needs}")
    if size % nodes:
        raise UserError(f"--nodes={nodes} does not divide the number of processes: {needs}")

    if not options.dry_run:
        for option, value in (("--node-rank", options.node_rank), ("--rendezvous", options.rendezvous)):
            if nodes == 1 and value:
                raise UserError(f"{option}={value} needs --nodes of at least 2")
            if nodes > 1 and value is None:
                raise UserError(f"--nodes={nodes} needs {option}")
        if nodes > 1 and options.node_rank >= nodes:
            raise UserError(f"--node-rank={options.node_rank} must be less than --nodes={nodes}")
        if options.max_restarts and options.resume != "auto":
            raise UserError(
                f"--max-restarts={options.max_restarts} needs --resume auto: restarted ranks resume from the newest "
                "checkpoint"
            )
    return nodes, size // nodes
