"""The command ``fmoe train RECIPE``.

It starts the ranks that the recipe's ``[parallel]`` needs, or this node's share of them, and trains. With
``--dry-run``, it prints the plan of the run instead.
"""

from pretrain import leave_working_folder, safe_environment

if __name__ == "__main__":
    leave_working_folder()  # before anything else is imported

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fmoe.cli import run
from fmoe.errors import EXIT_USAGE, UserError
from pretrain.__main__ import main as train
from pretrain.__main__ import parse
from pretrain.config import Recipe
from pretrain.config.imports import import_plugins
from pretrain.config.load import find_recipe, read_recipe
from pretrain.start import lock, process, torchrun
from pretrain.start.process import EXIT_DIVERGED, EXIT_REQUEUE


def main(argv: Sequence[str]) -> int:
    """Check the recipe and its inputs, train, and return the exit code.

    A single rank trains in this process, unless ``--max-restarts`` is set. So does a rank that torchrun started. In all
    other cases, torchrun starts the ranks. Nothing is trained with ``--dry-run``, or if the run is finished already.
    """
    given = argv
    options, argv = split_options(argv)
    arguments, overrides = parse(argv, "fmoe train", _USAGE, _ABOUT)
    recipe = import_plugins(read_recipe(arguments.recipe, overrides), find_recipe(arguments.recipe).parent)
    recipe.check()
    nodes, here = spread(options, recipe)
    if options.dry_run:
        return dry_run(recipe, nodes, is_json=options.json)
    _check(options, nodes, arguments.resume)
    if process.world_size() > 1 or (recipe.parallel.world_size == 1 and not options.max_restarts):
        return train(argv)
    from pretrain.start.resume import check_exists  # imports packages that may be missing

    folder, environment = Path(recipe.run.folder), safe_environment()
    check_exists(folder, arguments.resume)
    with contextlib.ExitStack() as stack:
        if not options.node_rank:
            try:
                environment[lock.TOKEN] = stack.enter_context(lock.hold(folder, is_launcher=True))
            except UserError as error:
                if nodes == 1:
                    raise
                environment[lock.REFUSED] = str(error)  # rank 0 raises it, which informs the other nodes
        if lock.REFUSED not in environment and check(recipe, arguments.resume, arguments.fallback):
            return 0
        # All ranks together use as many threads as the machine has cores.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // here)))
        words = [*_rendezvous(options, nodes), "--nproc-per-node", str(here)]
        words += ["--max-restarts", str(options.max_restarts or 0), "-m", "pretrain", *argv]
        sys.stdout.flush()
        log = folder / (f"torchrun-{options.node_rank}.log" if options.node_rank else "torchrun.log")
        code = torchrun.run(torchrun.command(words), environment, log)
        if code not in _SAID:
            _print_how_to_resume(folder, given, arguments.recipe)
        return code


_SAID = (0, EXIT_USAGE, EXIT_DIVERGED, EXIT_REQUEUE, 128 + signal.SIGINT)  # the run printed what to do


def _print_how_to_resume(folder: Path, argv: Sequence[str], recipe: str) -> None:
    from pretrain.checkpoint import latest  # imports packages that may be missing
    from pretrain.tracking.folder import CHECKPOINTS

    words: list[str] = []
    for word, before in zip(argv, ["", *argv], strict=False):
        if not (word.startswith("--resume=") or word == "--resume" or (before == "--resume" and word[:1] != "-")):
            words.append(word)
    if recipe not in words:  # given as --resume RECIPE
        words.insert(0, recipe)
    newest = latest(folder / CHECKPOINTS)
    sys.stderr.write(
        f"  newest checkpoint  {newest or 'none: the run starts over'}\n"
        f"  to resume          {shlex.join(['fmoe', 'train', *words, '--resume', 'auto'])}\n"
    )
    sys.stderr.flush()


_USAGE = (
    "[--dry-run [--json]] [--nodes N --node-rank R --rendezvous HOST:PORT] [--processes-per-node M] [--max-restarts K]"
)
_ABOUT = """\
  --dry-run             print the resolved recipe, the process grid and the bytes per rank; with --json, as JSON
  --nodes N             number of nodes of the run; run this command on each
  --node-rank R         number of this node, from 0
  --rendezvous HOST:PORT
                        host name of node 0 and a free port on it, where the nodes meet
  --processes-per-node M
                        number of ranks on each node, checked against [parallel] of the recipe
  --max-restarts K      restart the ranks after a failure, at most K times; needs --resume auto

"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


_NUMBERS = {"nodes": 1, "node_rank": 0, "processes_per_node": 1, "max_restarts": 0}


def split_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Separate the launcher's own options from the arguments that every rank gets.

    Raises:
        UserError: an option has an invalid value, or ``--json`` comes without ``--dry-run``.
    """
    parser = _Parser(prog="fmoe train", allow_abbrev=False, add_help=False)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rendezvous")
    for name in _NUMBERS:
        parser.add_argument(_option(name))
    options, rest = parser.parse_known_args(argv)
    for name, least in _NUMBERS.items():
        text = getattr(options, name)
        if text is not None:
            if not text.isdecimal() or int(text) < least:
                raise UserError(f"{_option(name)}={text} must be an integer of at least {least}")
            setattr(options, name, int(text))
    if options.rendezvous is not None:
        host, _, port = options.rendezvous.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise UserError(
                f"--rendezvous={options.rendezvous} must be HOST:PORT, the name of the node with --node-rank 0 "
                "and a free port on it"
            )
    if options.json and not options.dry_run:
        raise UserError("--json needs --dry-run")
    return options, rest


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def spread(options: argparse.Namespace, recipe: Recipe) -> tuple[int, int]:
    """Return the number of nodes, and the number of ranks on each.

    Raises:
        UserError: the options set another number of ranks than the recipe's ``[parallel]``, or the number of nodes does
            not divide the number of ranks.
    """
    size, here = recipe.parallel.world_size, options.processes_per_node
    nodes = options.nodes or 1
    if options.dry_run and options.nodes is None:
        nodes = max(size // (here or recipe.parallel.node_size or GPUS_OF_A_NODE), 1)
        nodes = nodes if size % nodes == 0 else 1
    if here is not None and here * nodes != size:
        of_nodes = f"--nodes={nodes} x " if options.nodes else f"{nodes} nodes x " if nodes > 1 else ""
        raise UserError(
            f"{of_nodes}--processes-per-node={here} is {nodes * here} processes, but the recipe needs {size} "
            f"({recipe.parallel.world_size_name})"
        )
    if size % nodes:
        name = recipe.parallel.world_size_name
        raise UserError(f"--nodes={nodes} does not divide the {size} processes that the recipe needs ({name})")
    return nodes, size // nodes


def _check(options: argparse.Namespace, nodes: int, resume: str | None) -> None:
    of_several = ("node_rank", "rendezvous")
    for name in of_several:
        value = getattr(options, name)
        if nodes == 1 and value:
            raise UserError(f"{_option(name)}={value} needs --nodes of at least 2")
        if nodes > 1 and value is None:
            raise UserError(f"--nodes={nodes} needs {_option(name)}")
    if nodes > 1 and options.node_rank >= nodes:
        raise UserError(f"--node-rank={options.node_rank} must be less than --nodes={nodes}")
    if nodes > 1 and options.node_rank == 0:
        try:
            socket.create_server(("", int(options.rendezvous.rpartition(":")[2]))).close()
        except OSError as error:
            raise UserError(
                f"--rendezvous={options.rendezvous}: the port is not free here: {error.strerror}"
            ) from error
    if options.max_restarts and resume != "auto":
        raise UserError(
            f"--max-restarts={options.max_restarts} needs --resume auto: restarted ranks resume from the newest "
            "checkpoint"
        )


def _rendezvous(options: argparse.Namespace, nodes: int) -> list[str]:
    """Return the torchrun options by which the nodes of a run find each other."""
    if nodes == 1:
        return ["--standalone", "--local-addr", "127.0.0.1"]
    host, _, port = options.rendezvous.rpartition(":")
    node = ["--nnodes", str(nodes), "--node-rank", str(options.node_rank)]
    return [*node, "--master-addr", host, "--master-port", port]


GPUS_OF_A_NODE = 8
"""GPUs per node that a dry run assumes if none of --nodes, --processes-per-node and parallel.node_size is set."""


def dry_run(recipe: Recipe, nodes: int, *, is_json: bool = False) -> int:
    """Print the plan of the run: the resolved recipe, the process grid and the bytes per rank. Return exit code 0.

    Reads no data, writes no files and needs no GPU.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # sizes do not depend on GPUs, and everything is on the meta device
    from pretrain import dryrun  # imports megatron-core

    plan = dryrun.make_plan(recipe, nodes)
    text = json.dumps(dryrun.as_json(plan), indent=1) + "\n" if is_json else dryrun.describe(plan)
    sys.stdout.write(text)
    return 0


def check(recipe: Recipe, resume: str | None, fallback: bool = False) -> bool:
    """Check the recipe's callbacks, data and checkpoint before any rank starts.

    Returns:
        True if the run is finished already; its summary is then printed. Always False with ``fallback``: the ranks then
        look for an intact checkpoint first.

    Raises:
        UserError: an input is invalid.
    """
    from pretrain.callbacks import build_callbacks  # imports megatron-core, like the next lines
    from pretrain.engine.model import check_parts
    from pretrain.start.run import find_checkpoint, is_finished, open_inputs, open_weights, summarize

    check_parts(recipe)
    build_callbacks(recipe)
    inputs = open_inputs(recipe)
    checkpoint = find_checkpoint(Path(recipe.run.folder), resume, fallback=fallback)
    if checkpoint is None:
        open_weights(recipe)
    if not is_finished(recipe, inputs, checkpoint) or fallback:
        return False
    summarize(recipe)
    return True


if __name__ == "__main__":  # for installations without the command fmoe: `python -m pretrain.start.launch`
    sys.exit(run("fmoe train", lambda: main(sys.argv[1:])))
