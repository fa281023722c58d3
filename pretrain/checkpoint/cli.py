"""``fmoe checkpoint``: list, verify, show, export and import checkpoints."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from fmoe.cli import Parser
from fmoe.errors import UserError, printable
from pretrain.checkpoint.folders import step_folders
from pretrain.checkpoint.load import Checkpoint, open_checkpoint
from pretrain.checkpoint.manifest import StoredTensor
from pretrain.checkpoint.shard import name_of


def main(argv: list[str]) -> int:
    """Run a subcommand of ``fmoe checkpoint``.

    Returns:
        Exit code: 0, or 1 when ``ls`` found a damaged checkpoint.

    Raises:
        UserError: the path has no checkpoint, or a damaged one; a folder cannot be imported; the output is not
            a new or empty folder.
    """
    parser = Parser(prog="fmoe checkpoint", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for function, metavar, text in [
        (_ls, "RUN", "list the checkpoints of a run"),
        (_verify, "PATH", "compare every file of a step folder, or of a run's newest checkpoint, with its manifest"),
        (_show, "PATH", "print the state and tensors of a step folder, or of a run's newest checkpoint"),
    ]:
        command = commands.add_parser(function.__name__[1:], help=text, description=text)
        command.add_argument("path", type=Path, metavar=metavar)
        command.set_defaults(function=lambda arguments, function=function: function(arguments.path))
    text = "write a checkpoint as a folder of torch.distributed.checkpoint or safetensors, with the same tensor names"
    command = commands.add_parser("export", help=text, description=text)
    command.add_argument("path", type=Path, metavar="PATH", help="a run (its newest checkpoint) or a step folder")
    command.add_argument("out", type=Path, metavar="OUT", help="a new or empty folder")
    command.add_argument("--format", default="dcp", metavar="NAME", help="dcp (default) or safetensors")
    command.add_argument(
        "--optimizer", action="store_true", help="also write the optimizer's tensors and all else that resuming needs"
    )
    command.set_defaults(function=_export)
    text = "convert a folder that export wrote, or a checkpoint of Megatron-core, to a run"
    command = commands.add_parser("import", help=text, description=text)
    command.add_argument("path", type=Path, metavar="FOLDER")
    command.add_argument("out", type=Path, metavar="OUT_RUN", help="a new or empty folder")
    command.add_argument("--recipe", metavar="RECIPE", help="recipe of the model, instead of FOLDER/recipe.toml")
    command.set_defaults(function=_import)
    arguments = parser.parse_args(argv)
    return arguments.function(arguments)


def _export(arguments: argparse.Namespace) -> int:
    from pretrain.interchange.transfer import export_tensors  # imports torch.distributed.checkpoint

    done = export_tensors(arguments.path, arguments.out, arguments.format, optimizer=arguments.optimizer)
    print(f"{printable(str(arguments.out))}: {done.num_tensors} tensors, {_bytes(done.nbytes)}")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # shapes come from a model on the meta device, which needs the CPU runtime
    from pretrain.interchange.transfer import import_tensors  # imports megatron-core

    done = import_tensors(arguments.path, arguments.out, recipe=arguments.recipe)
    out = printable(str(arguments.out))
    print(f"{out}: {done.num_tensors} tensors, {_bytes(done.nbytes)}")
    if not done.is_checked:
        print("  no arguments of Megatron-LM: routing, positions and norms come from the recipe and were not checked")
    if done.is_resumable:
        print(f"  to resume    fmoe train {out}/config.toml --resume")
    else:
        print(f"  to train on  fmoe train {out}/config.toml --run.folder NEW_RUN")
    return 0


def _ls(run: Path) -> int:
    found = (step_folders(run) or step_folders(run / "checkpoints"))[::-1]
    if not found:
        raise UserError(f"{run} has no checkpoints: neither it nor its checkpoints folder has a step-* folder")
    exit_code = 0
    for path in found:
        try:
            checkpoint = Checkpoint(path)
        except UserError as error:
            print(f"{path.name}  damaged: {printable(str(error))}")
            exit_code = 1
        else:
            print(f"{path.name}  {_summary(checkpoint)}")
    return exit_code


def _verify(path: Path) -> int:
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    print(f"{printable(str(checkpoint.path))}: intact  {_summary(checkpoint)}")
    return 0


def _show(path: Path) -> int:
    checkpoint = open_checkpoint(path)
    print(f"{printable(str(checkpoint.path))}  {_summary(checkpoint)}")
    print("state", json.dumps(checkpoint.state, indent=2, default=_brief))
    tensors = checkpoint.manifest.tensors
    rows = [
        (
            printable(name),
            name_of(tensors[name].dtype),
            str(list(tensors[name].shape)),
            _bytes(tensors[name].nbytes),
            _split(tensors[name]),
        )
        for name in checkpoint.names()
    ]
    rows.insert(0, ("tensor", "dtype", "shape", "bytes", "split"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _summary(checkpoint: Checkpoint) -> str:
    files, tensors = checkpoint.manifest.files, checkpoint.manifest.tensors
    size = _bytes(sum(record.size for record in files.values()))
    return f"{len(tensors)} tensors, {len(files)} files, {size}, written by {checkpoint.num_ranks} ranks"


def _split(tensor: StoredTensor) -> str:
    """Return how a tensor is split: ``2x1`` (blocks along each axis) or ``2x1, 3 flat ranges``."""
    regions = [piece.region for piece in tensor.pieces]
    blocks = "x".join(str(len({region.offset[axis] for region in regions})) for axis in range(len(tensor.shape)))
    num_ranges = sum(not region.is_whole for region in regions)
    return (blocks or "1") + (f", {num_ranges} flat ranges" if num_ranges else "")


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"<{name_of(value.dtype)} tensor {list(value.shape)}>"
    return f"<{len(value)} bytes>"
