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
from pretrain.formats import aligned, size_text


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
    newest = "of a step folder, or of a run's newest checkpoint"
    for function, metavar, text in [
        (_ls, "RUN", "list the checkpoints of a run"),
        (_verify, "PATH", f"compare every file {newest}, with its manifest"),
        (_show, "PATH", f"print the state and tensors {newest}"),
        (_export, "PATH", "write a checkpoint as torch.distributed.checkpoint or safetensors, with the same names"),
        (_import, "FOLDER", "convert a folder that export wrote, or a checkpoint of Megatron-core, to a run"),
    ]:
        command = commands.add_parser(function.__name__[1:], help=text, description=text)
        command.add_argument("path", type=Path, metavar=metavar)
        command.set_defaults(function=function)
        if function in (_export, _import):
            command.add_argument("out", type=Path, metavar="OUT", help="a new or empty folder")
        if function is _export:
            command.add_argument("--format", default="dcp", metavar="NAME", help="dcp (default) or safetensors")
            text = "also write the optimizer's tensors and all else that resuming needs"
            command.add_argument("--optimizer", action="store_true", help=text)
        if function is _import:
            text = "recipe of the model, instead of FOLDER/recipe.toml"
            command.add_argument("--recipe", metavar="RECIPE", help=text)
    arguments = parser.parse_args(argv)
    return arguments.function(arguments)


def _export(arguments: argparse.Namespace) -> int:
    from pretrain.interchange.transfer import export_tensors  # imports torch.distributed.checkpoint

    done = export_tensors(arguments.path, arguments.out, arguments.format, optimizer=arguments.optimizer)
    print(f"{printable(str(arguments.out))}: {done.num_tensors} tensors, {size_text(done.nbytes)}")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # shapes come from a model on the meta device, which needs the CPU runtime
    from pretrain.interchange.transfer import import_tensors  # imports megatron-core

    done = import_tensors(arguments.path, arguments.out, recipe=arguments.recipe)
    out = printable(str(arguments.out))
    print(f"{out}: {done.num_tensors} tensors, {size_text(done.nbytes)}")
    if not done.is_checked:
        print("  no arguments of Megatron-LM: routing, positions and norms come from the recipe and were not checked")
    if done.is_resumable:
        print(f"  to resume    fmoe train {out}/config.toml --resume")
    else:
        print(f"  to train on  fmoe train {out}/config.toml --run.folder NEW_RUN")
    return 0


def _ls(arguments: argparse.Namespace) -> int:
    run = arguments.path
    folders = step_folders(run)
    if not folders:
        raise UserError(f"{run} has no checkpoints: neither it nor its checkpoints folder has a step-* folder")
    exit_code = 0
    for path in reversed(folders):
        try:
            text = _summary(Checkpoint(path))
        except UserError as error:
            text = f"damaged: {printable(str(error))}"
            exit_code = 1
        print(f"{path.name}  {text}")
    return exit_code


def _verify(arguments: argparse.Namespace) -> int:
    checkpoint = open_checkpoint(arguments.path)
    checkpoint.verify()
    print(f"{printable(str(checkpoint.path))}: intact  {_summary(checkpoint)}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    checkpoint = open_checkpoint(arguments.path)
    print(f"{printable(str(checkpoint.path))}  {_summary(checkpoint)}")
    print("state", json.dumps(checkpoint.state, indent=2, default=_brief))
    rows = [["tensor", "dtype", "shape", "bytes", "split"]]
    for name in checkpoint.names():
        tensor = checkpoint.manifest.tensors[name]
        shape = str(list(tensor.shape))
        rows.append([printable(name), name_of(tensor.dtype), shape, size_text(tensor.nbytes), _split(tensor)])
    print("\n".join(aligned(rows)))
    return 0


def _summary(checkpoint: Checkpoint) -> str:
    files = checkpoint.manifest.files
    size = size_text(sum(record.size for record in files.values()))
    num_tensors = len(checkpoint.manifest.tensors)
    return f"{num_tensors} tensors, {len(files)} files, {size}, written by {checkpoint.num_ranks} ranks"


def _split(tensor: StoredTensor) -> str:
    """Return how a tensor is split: ``2x1`` (blocks along each axis) or ``2x1, 3 flat ranges``."""
    regions = [piece.region for piece in tensor.pieces]
    offsets = zip(*(region.offset for region in regions), strict=True)  # of each axis
    blocks = "x".join(str(len(set(axis))) for axis in offsets) or "1"
    num_ranges = sum(not region.is_whole for region in regions)
    return f"{blocks}, {num_ranges} flat ranges" if num_ranges else blocks


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"<{name_of(value.dtype)} tensor {list(value.shape)}>"
    return f"<{len(value)} bytes>"
