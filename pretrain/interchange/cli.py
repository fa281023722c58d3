"""``fmoe export`` and ``fmoe import``: models to and from Hugging Face folders."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from fmoe.cli import Parser
from fmoe.errors import UserError, printable
from pretrain.interchange.families import FAMILIES
from pretrain.interchange.families.own import update_code
from pretrain.interchange.hub import check_upload, upload
from pretrain.interchange.incoming import import_folder
from pretrain.interchange.outgoing import SHARD_BYTES, export_checkpoint

MAX_SHARD_GIB = 2**20


def export_main(argv: Sequence[str]) -> int:
    """Write a checkpoint as a folder that transformers loads, or update the code of such a folder.

    Raises:
        UserError: ``--shard-gib`` or ``--push`` is invalid, or the upload fails; otherwise, see `export_checkpoint` and
            `update_code`.
    """
    parser = Parser(
        prog="fmoe export", description="Write a checkpoint as a model folder that Hugging Face transformers loads."
    )
    parser.add_argument(
        "source",
        type=Path,
        nargs="?",
        metavar="RUN_OR_CHECKPOINT",
        help="a run (its newest checkpoint) or a step folder",
    )
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="a new or empty folder")
    parser.add_argument(
        "--update-code",
        type=Path,
        metavar="EXPORT",
        help="instead of exporting, replace the code in an existing export of format fmoe with the installed version's",
    )
    parser.add_argument(
        "--format",
        default="auto",
        metavar="NAME",
        help=f"{', '.join(FAMILIES)}; auto (default): the first that fits, and fmoe last",
    )
    _add_tokenizer(parser, "new location of the recipe's data.tokenizer")
    parser.add_argument(
        "--shard-gib",
        type=float,
        default=SHARD_BYTES / 2**30,
        metavar="GIB",
        help="maximum size of a weight file in GiB (default: 4)",
    )
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="DIR", help="folder of llama.cpp, whose converter adds model.gguf to OUT"
    )
    parser.add_argument(
        "--no-drops",
        action="store_true",
        help="leave out moe.eval_capacity_factor (few formats support it), so that experts drop no tokens",
    )
    parser.add_argument(
        "--license",
        metavar="ID",
        help="license of the model for README.md, an identifier of the Hugging Face Hub such as apache-2.0",
    )
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="then upload OUT to this repository of the Hugging Face Hub"
    )
    parser.add_argument("--private", action="store_true", help="with --push: create a private repository")
    arguments = parser.parse_args(argv)
    if arguments.update_code is not None:
        if arguments != parser.parse_args(["--update-code", str(arguments.update_code)]):
            parser.error("--update-code EXPORT accepts no other arguments")
        name = update_code(arguments.update_code)
        print(f"{printable(str(arguments.update_code / name))}: updated")
        return 0
    if arguments.out is None:
        parser.error("RUN_OR_CHECKPOINT and OUT are required")
    if not arguments.shard_gib > 0:  # NaN too
        raise UserError(f"--shard-gib {arguments.shard_gib} must be positive")
    if arguments.shard_gib > MAX_SHARD_GIB:
        raise UserError(f"--shard-gib {arguments.shard_gib} exceeds {MAX_SHARD_GIB}")
    if arguments.push is not None:
        check_upload(arguments.push)
    elif arguments.private:
        raise UserError("--private needs --push")
    done = export_checkpoint(
        arguments.source,
        arguments.out,
        arguments.format,
        tokenizer=arguments.tokenizer,
        shard_bytes=int(arguments.shard_gib * 2**30),
        llama_cpp=arguments.llama_cpp,
        no_drops=arguments.no_drops,
        license=arguments.license,
        repo=arguments.push,
    )
    out = printable(str(arguments.out))
    print(f"{out}: {done.family.architecture}, {done.num_params:,} parameters in {len(done.files)} files")
    for note in done.notes:
        print(f"  {note}")
    if "tokenizer.json" not in done.files:
        print("  without a tokenizer: pass --tokenizer PATH to add one")
    if arguments.license is None:
        print("  README.md states no license: pass --license ID to state one")
    if arguments.push is not None:
        print(f"  uploaded to {printable(upload(arguments.out, arguments.push, private=arguments.private))}")
    return 0


def import_main(argv: Sequence[str]) -> int:
    """Convert a Hugging Face model folder to the folder of a run.

    Raises:
        UserError: see `import_folder`.
    """
    parser = Parser(
        prog="fmoe import", description="Convert a Hugging Face model folder to a run: a recipe and a checkpoint."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="model folder with config.json and safetensors")
    parser.add_argument("out", type=Path, metavar="OUT_RUN", help="a new or empty folder")
    _add_tokenizer(parser, "a tokenizer.json or sentencepiece model that replaces FOLDER's")
    arguments = parser.parse_args(argv)
    done = import_folder(arguments.folder, arguments.out, tokenizer=arguments.tokenizer)
    recipe = done.recipe
    out = printable(str(arguments.out))
    print(
        f"{out}: family {done.family.name}, {recipe.num_params():,} parameters, {recipe.num_active_params():,} "
        f"active per token, {recipe.train.precision}"
    )
    if done.tokenizer is None:
        print("  without a tokenizer: set data.tokenizer before training")
    else:
        tokenizer = printable(str(done.tokenizer))
        prefix = printable(recipe.data.train[0])
        bos = " --bos" if recipe.data.bos else ""
        print(f"  prepare text:  fmoe data prepare TEXT --tokenizer {tokenizer} --out {prefix}{bos}")
    print(f"  train further: fmoe train {out}/config.toml --run.folder NEW_RUN")
    return 0


def _add_tokenizer(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--tokenizer", metavar="PATH", help=f'{meaning}; "none" for no tokenizer')
