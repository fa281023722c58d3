"""``fmoe train RECIPE``: starts as many processes as the recipe's splits need, here or its share of several nodes, and
trains; or, with ``--dry-run``, says what the run would be."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fmoe.cli import run
from fmoe.errors import UserError
from pretrain import process, supervise
from pretrain.__main__ import main as train
from pretrain.__main__ import parse
from pretrain.config import Recipe, load_recipe


def main(argv: Sequence[str]) -> int:
    """Checks the recipe and its inputs, then runs torchrun, or trains in this process if one is enough."""
    options, argv = split_options(argv)
    arguments, overrides = parse(argv, "fmoe train", _USAGE, _ABOUT)
    recipe = load_recipe(arguments.recipe, overrides, f"fmoe train {arguments.recipe}")
    nodes, here = spread(options, recipe)
    if options.dry_run:
        return dry_run(recipe, nodes, is_json=options.json)
    _check(options, nodes, arguments.resume)
    if process.world_size() > 1 or recipe.parallel.world_size == 1:
        return train(argv)
    if check(recipe, arguments.resume, arguments.fallback):
        return 0
    environment = dict(os.environ)
    # Threads of all processes together are the machine's cores.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // here)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", *_rendezvous(options, nodes)]
    torchrun += ["--nproc-per-node", str(here), "--max-restarts", str(options.max_restarts or 0)]
    sys.stdout.flush()
    return supervise.run([*torchrun, "-m", "pretrain", *argv], environment)


_USAGE = (
    "[--dry-run [--json]] [--nodes N --node-rank R --rendezvous HOST:PORT] [--processes-per-node M] [--max-restarts K]"
)
_ABOUT = """\
  --dry-run             print the resolved recipe, the process grid and bytes a rank, and stop; --json for figures alone
  --nodes N             nodes of the run, on each of which this command is given
  --node-rank R         which of them this is, from 0
  --rendezvous HOST:PORT
                        a free port of node 0, where they meet
  --processes-per-node M
                        checked: the splits of the recipe say how many there are
  --max-restarts K      start processes that died again, K times at most; with --resume auto

"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


_NUMBERS = {"nodes": 1, "node_rank": 0, "processes_per_node": 1, "max_restarts": 0}


def split_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """What concerns the launch, and what a process of the run is told.

    Raises:
        UserError: a value that cannot be.
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
                raise UserError(f"{_option(name)}={text} is not a whole number from {least}")
            setattr(options, name, int(text))
    if options.rendezvous is not None:
        host, _, port = options.rendezvous.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise UserError(
                f"--rendezvous={options.rendezvous} is not HOST:PORT, a free port of the machine with --node-rank 0"
            )
    if options.json and not options.dry_run:
        raise UserError("--json is for --dry-run")
    return options, rest


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def spread(options: argparse.Namespace, recipe: Recipe) -> tuple[int, int]:
    """Nodes, and processes on each.

    Raises:
        UserError: the splits of the recipe do not multiply to as many.
    """
    size, here = recipe.parallel.world_size, options.processes_per_node
    nodes = options.nodes or 1
    if options.dry_run and options.nodes is None:
        nodes = max(size // (here or recipe.parallel.node_size or GPUS_OF_A_NODE), 1)
        nodes = nodes if size % nodes == 0 else 1
    if here is not None and here * nodes != size:
        raise UserError(
            f"--nodes={nodes} x --processes-per-node={here} are {nodes * here} processes, not "
            f"{recipe.parallel.world_size_name} = {size}"
        )
    if size % nodes:
        raise UserError(f"--nodes={nodes} does not divide {recipe.parallel.world_size_name} = {size} processes")
    return nodes, size // nodes


def _check(options: argparse.Namespace, nodes: int, resume: str | None) -> None:
    """Raises UserError for options of a run, on so many nodes, that do not belong together."""
    of_several = ("node_rank", "rendezvous")
    for name in of_several:
        value = getattr(options, name)
        if nodes == 1 and value:
            raise UserError(f"{_option(name)}={value} is for --nodes of 2 or more")
        if nodes > 1 and value is None:
            raise UserError(f"--nodes={nodes} needs {_option(name)}")
    if nodes > 1 and options.node_rank >= nodes:
        raise UserError(f"--node-rank={options.node_rank} is not less than --nodes={nodes}")
    if options.max_restarts and resume != "auto":
        raise UserError(
            f"--max-restarts={options.max_restarts} needs --resume auto: processes that start again go on from the "
            "newest checkpoint"
        )


def _rendezvous(options: argparse.Namespace, nodes: int) -> list[str]:
    """How torchrun's agents, one a node, find each other. Ranks follow the node's rank."""
    if nodes == 1:
        return ["--standalone", "--local-addr", "127.0.0.1"]
    host, _, port = options.rendezvous.rpartition(":")
    node = ["--nnodes", str(nodes), "--node-rank", str(options.node_rank)]
    return [*node, "--master-addr", host, "--master-port", port]


GPUS_OF_A_NODE = 8
"""What a dry run takes a node to have where nobody says."""


def dry_run(recipe: Recipe, nodes: int, *, is_json: bool = False) -> int:
    """Prints what the run would be: resolved recipe, process grid, sizes. Reads no data and writes nothing."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the sizes are the same, and everything is on the meta device
    from pretrain import dryrun  # here, because it imports megatron-core

    plan = dryrun.make_plan(recipe, nodes)
    text = json.dumps(dryrun.as_json(plan), indent=1) + "\n" if is_json else dryrun.describe(plan)
    sys.stdout.write(text)
    return 0


def check(recipe: Recipe, resume: str | None, fallback: bool = False) -> bool:
    """Meets every wrong input that can be met before processes are started, where it is one line and exit code 2.

    Returns:
        Whether the run is finished already, which it then says.
    """
    from pretrain import session  # here, because it imports megatron-core

    inputs = session.open_inputs(recipe)
    checkpoint = session.find_checkpoint(Path(recipe.run.folder), resume, fallback=fallback)
    if checkpoint is None:
        session.open_weights(recipe)
    if not session.is_finished(recipe, inputs, checkpoint) or fallback:
        return False
    session.summarize(recipe)
    return True


if __name__ == "__main__":  # where the command is not on the path: `python -m pretrain.launch`
    sys.exit(run("fmoe train", lambda: main(sys.argv[1:])))
