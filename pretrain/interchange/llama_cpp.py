"""GGUF files for llama.cpp, written by llama.cpp's own converter from an exported folder.

The converter recognizes byte-level tokenizers by a hash of token ids, and so refuses those that are trained here. It
reads sentencepiece models for some families only. `convert` makes it accept both.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fmoe.errors import UserError, printable
from pretrain.config import ModelConfig
from pretrain.data.tokenizers import Tokenizer
from pretrain.data.tokenizers.huggingface import HuggingFaceTokenizer
from pretrain.interchange.family import Family
from pretrain.interchange.llama import weights_sum_to_one
from pretrain.interchange.tokenizer import CONFIG, SENTENCEPIECE, TOKENIZER

SCRIPT = "convert_hf_to_gguf.py"
GGUF = "model.gguf"
FAMILIES = ("mixtral", "qwen3_moe")
"""Families whose converted models were compared with transformers."""
_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
# llama.cpp's name for GPT-2's words after single digits. Tokenizers trained here also separate newlines. That makes no
# difference, because their pieces with a newline have no other character.
_DIGITS_AND_WORDS = "smollm"


def check_convertible(
    llama_cpp: Path, family: Family, model: ModelConfig, tokenizer: Tokenizer | None, files: Mapping[str, bytes]
) -> str:
    """Check that llama.cpp computes the same logits from the same tokens.

    Args:
        llama_cpp: folder of llama.cpp's source.
        files: from `files_for`.

    Returns:
        llama.cpp's name of the pre-tokenizer; empty if its converter has to find it.

    Raises:
        UserError: the folder has no converter; llama.cpp does not support the model or the tokenizer.
    """
    if not (llama_cpp / SCRIPT).is_file():
        raise UserError(f"--llama-cpp {llama_cpp} is not a folder of llama.cpp: it has no {SCRIPT}")
    if family.name not in FAMILIES:
        raise UserError(f"--llama-cpp supports {' and '.join(FAMILIES)}, but the model is exported as {family.name}")
    if len(model.layers_with_experts) < model.num_layers:
        raise UserError("--llama-cpp needs experts in every layer: model.moe_every=1, and no model.moe_layers")
    if not weights_sum_to_one(model):
        key = "gate" if model.gate == "switch" else "normalize"
        value = str(getattr(model, key)).lower()
        raise UserError(f"model.{key}={value} is not supported with --llama-cpp: there, weights of experts sum to one")
    if model.sliding_window is not None:
        raise UserError(f"model.sliding_window={model.sliding_window} is not supported with --llama-cpp: use none")
    if model.rope_scaling is not None:
        raise UserError(f"model.rope_scaling={model.rope_scaling} is not supported with --llama-cpp: use none")
    if tokenizer is None:
        raise UserError("--llama-cpp needs the tokenizer: pass its file with --tokenizer")
    if SENTENCEPIECE in files:
        return ""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise UserError(
            f"the tokenizer {tokenizer.path} is not supported with --llama-cpp: a sentencepiece model must be one of "
            "bpe, with byte fallback and without normalization"
        )
    if not json.loads(files[TOKENIZER])["model"].get("merges"):
        raise UserError(f"the tokenizer {tokenizer.path} is not supported with --llama-cpp: it has no merges")
    return _DIGITS_AND_WORDS if tokenizer.splits_digits_and_words else ""


def write_gguf(llama_cpp: Path, folder: Path, name: str, dtype: torch.dtype, pre: str) -> str:
    """Convert an exported folder to a GGUF file in it, in another process.

    Args:
        name: name of the model in the file.
        dtype: of the matrices; vectors are in float32.
        pre: from `check_convertible`.

    Returns:
        The file's name.

    Raises:
        UserError: llama.cpp's converter failed; the message ends with its last line.
    """
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="fmoe-") as temporary:
        named = Path(temporary) / name  # the converter takes the model's name from the folder's
        named.symlink_to(folder.resolve(), target_is_directory=True)
        command = [sys.executable, "-c", f"from {__name__} import convert; convert()", str(llama_cpp.resolve()), pre]
        command += [str(named), "--outfile", str(folder / GGUF), "--outtype", _TYPES[dtype]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode or not (folder / GGUF).is_file():
        lines = done.stderr.split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {done.returncode}")
        raise UserError(f"{llama_cpp / SCRIPT} failed: {printable(last)}")
    return GGUF


def convert() -> None:
    """Run llama.cpp's converter; ``sys.argv`` has its folder, the pre-tokenizer's name, and its own arguments."""
    root, pre = sys.argv[1:3]
    del sys.argv[1:3]
    sys.path.insert(0, root)
    script: Any = importlib.import_module(SCRIPT.removesuffix(".py"))
    text_model: Any = next(kind for kind in script.ModelBase.__subclasses__() if hasattr(kind, "get_vocab_base_pre"))
    set_byte_level_vocab = text_model._set_vocab_gpt2

    def set_vocab(model: Any) -> None:
        if not (model.dir_model / SENTENCEPIECE).is_file():
            set_byte_level_vocab(model)
            return
        model._set_vocab_sentencepiece()
        prefix = json.loads((model.dir_model / CONFIG).read_bytes()).get("add_prefix_space")
        if prefix is not None:
            model.gguf_writer.add_add_space_prefix(prefix)

    text_model._set_vocab_gpt2 = set_vocab
    if pre:
        text_model.get_vocab_base_pre = lambda model, tokenizer: pre
    script.main()
