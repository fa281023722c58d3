"""GGUF files for llama.cpp, written by llama.cpp's own converter from an exported folder.

The converter recognizes byte-level tokenizers by a hash of token ids, and so refuses those that fmoe trained. It reads
sentencepiece models for some families only. `convert` removes both limits.
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
from pretrain.config.model import full_name
from pretrain.data.tokenizers import Tokenizer
from pretrain.data.tokenizers.huggingface import HuggingFaceTokenizer
from pretrain.interchange.families.deepseek import DENSE_FIRST, num_dense
from pretrain.interchange.families.llama import AS_THEY_ARE, in_layers, weights_sum_to_one
from pretrain.interchange.family import PLAIN_HEADS, Demand, Family, toml
from pretrain.interchange.folder import CONFIG
from pretrain.interchange.tokenizer import CONFIG as TOKENIZER_CONFIG
from pretrain.interchange.tokenizer import SENTENCEPIECE, TOKENIZER

SCRIPT = "convert_hf_to_gguf.py"
GGUF = "model.gguf"

# Conditions under which llama.cpp computes the same logits as transformers.
_EVERY_LAYER = in_layers(lambda m: not num_dense(m), "experts in every layer, such as by moe.every=1")
_SUM_TO_ONE = (
    Demand("moe.gate", lambda m: m.moe.gate != "switch", "moe.gate=naive, whose weights sum to one"),
    Demand("moe.normalize", weights_sum_to_one, "moe.normalize=true: weights that sum to one"),
)
_UNTIED = Demand("tie_embeddings", lambda m: not m.tie_embeddings, "model.tie_embeddings=false")
_UNSCALED = Demand("position.rope_scaling", lambda m: m.position.rope_scaling is None, "position.rope_scaling=none")
# Conversions with such layers were not compared.
_NO_MTP = Demand("mtp_layers", lambda m: not m.mtp_layers, "model.mtp_layers=0")
_NO_WINDOW = Demand(
    "attention.sliding_window", lambda m: m.attention.sliding_window is None, "attention.sliding_window=none"
)


def _is_lite(model: ModelConfig) -> bool:
    """Return whether llama.cpp, judging by the model's size, expects queries that are not compressed."""
    return model.num_layers in (26, 27) or (model.num_layers == 48 and model.vocab_size == 128256)


_NO_GROUPS = Demand("moe.gate_options", lambda m: not m.moe.gate_options, "moe.gate_options={}: no groups of experts")
_LITE = Demand(
    "attention.q_lora_rank",
    lambda m: (m.attention.q_lora_rank is None) == _is_lite(m),
    "attention.q_lora_rank=none if model.num_layers is 26 or 27 (or 48, with model.vocab_size=128256), else a number",
)
FAMILIES: Mapping[str, tuple[Demand, ...]] = {
    "mixtral": (*_EVERY_LAYER, *_SUM_TO_ONE, _NO_WINDOW),
    "qwen3_moe": (*_EVERY_LAYER, *_SUM_TO_ONE),
    "qwen2_moe": (*_EVERY_LAYER, AS_THEY_ARE, PLAIN_HEADS, _UNTIED),
    "olmoe": (
        *_EVERY_LAYER,
        AS_THEY_ARE,
        PLAIN_HEADS,
        _UNTIED,
        Demand("norm_eps", lambda m: m.norm_eps == 1e-5, "model.norm_eps=1e-5"),
        Demand(
            "attention.num_query_groups",
            lambda m: m.query_groups == m.attention.num_heads,
            "attention.num_query_groups=none",
        ),
    ),
    "granitemoe": (*_EVERY_LAYER, *_SUM_TO_ONE, PLAIN_HEADS),
    "deepseek_moe": (*DENSE_FIRST, AS_THEY_ARE, PLAIN_HEADS),
    "deepseek_v2": (_LITE, _NO_GROUPS),
    "deepseek_v3": (_LITE, _NO_MTP),
    "glm4_moe": (_NO_MTP,),
    "ernie4_5_moe": (
        *DENSE_FIRST,
        Demand(
            "moe.num_shared_experts",
            lambda m: not m.moe.num_shared_experts or m.shared_width * m.query_groups == m.dense_width,
            "moe.num_shared_experts=0, or shared experts that are together as wide as "
            "model.dense_ffn_hidden_size / attention.num_query_groups",
        ),
    ),
    "gpt_oss": (
        _UNTIED,
        Demand("attention.qkv_bias", lambda m: m.attention.qkv_bias, "attention.qkv_bias=true"),
        Demand(
            "attention.sliding_window",
            lambda m: m.attention.sliding_window is not None,
            "a window in layers 1, 3, 5, ...",
        ),
        Demand(
            "attention.sliding_layers",
            lambda m: m.layers_with_window == tuple(range(1, m.num_layers + 1, 2)),
            "every second layer, from the first",
        ),
    ),
}
"""Families whose converted models were compared with transformers, and the conditions on their recipes."""
_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
# llama.cpp's name for GPT-2's words after single digits. Tokenizers trained here also separate newlines. That makes no
# difference, because their pieces with a newline have no other character.
_DIGITS_AND_WORDS = "smollm"
# Classes of the converter that read the vocabulary of a published tokenizer.
_OWN_VOCABULARY = ("Glm4MoeForCausalLM", "Ernie4_5_MoeForCausalLM")


def check_convertible(
    llama_cpp: Path, family: Family, model: ModelConfig, tokenizer: Tokenizer | None, files: Mapping[str, bytes]
) -> str:
    """Check that llama.cpp supports an exported model and its tokenizer.

    Args:
        llama_cpp: folder of llama.cpp's source.
        files: the export's files by name, including the tokenizer's.

    Returns:
        llama.cpp's name of the pre-tokenizer; empty if its converter detects it.

    Raises:
        UserError: the folder has no converter; llama.cpp does not support the model or the tokenizer.
    """
    if not (llama_cpp / SCRIPT).is_file():
        raise UserError(f"--llama-cpp {llama_cpp} is not a folder of llama.cpp: it has no {SCRIPT}")
    if family.name not in FAMILIES:
        raise UserError(f"--llama-cpp supports {', '.join(FAMILIES)}, but the model is exported as {family.name}")
    for demand in (*FAMILIES[family.name], _UNSCALED):
        if not demand.holds(model):
            value = toml(model.value(demand.ours))
            raise UserError(
                f"{full_name(demand.ours)}={value} is not supported with --llama-cpp for {family.name}: use "
                f"{demand.why}"
            )
    if tokenizer is None:
        raise UserError("--llama-cpp needs the tokenizer: pass its file with --tokenizer")
    if SENTENCEPIECE in files:
        return ""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise UserError(
            f"the tokenizer {tokenizer.path} is not supported with --llama-cpp: a sentencepiece model must be bpe, "
            "with byte fallback and without normalization"
        )
    if not json.loads(files[TOKENIZER])["model"].get("merges"):
        raise UserError(f"the tokenizer {tokenizer.path} is not supported with --llama-cpp: it has no merges")
    return _DIGITS_AND_WORDS if tokenizer.splits_digits_and_words else ""


def write_gguf(llama_cpp: Path, folder: Path, name: str, dtype: torch.dtype, pre: str) -> str:
    """Add a GGUF file to an exported folder, with llama.cpp's converter in another process.

    Args:
        name: name of the model in the file.
        dtype: dtype of the matrices; vectors are in float32.
        pre: llama.cpp's name of the pre-tokenizer, from `check_convertible`.

    Returns:
        The file's name.

    Raises:
        UserError: llama.cpp's converter failed; the message ends with the last line of its stderr.
    """
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="fmoe-") as temporary:
        named = Path(temporary) / name  # the converter takes the model's name from the folder's
        named.symlink_to(folder.resolve(), target_is_directory=True)
        command = [sys.executable, "-c", f"from {__name__} import convert; convert()", str(llama_cpp.resolve()), pre]
        command += [str(named), "--outfile", str(folder / GGUF), "--outtype", _TYPES[dtype]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode or not (folder / GGUF).is_file():
        lines = done.stderr.strip().split("\n")
        raise UserError(f"{llama_cpp / SCRIPT} failed: {printable(lines[-1]) or f'exit code {done.returncode}'}")
    return GGUF


def convert() -> None:
    """Run llama.cpp's converter in this process, extended for the tokenizers and models that fmoe exports.

    ``sys.argv[1:]`` is llama.cpp's folder, the pre-tokenizer's name (empty to detect it), and the converter's
    arguments.
    """
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
        prefix = json.loads((model.dir_model / TOKENIZER_CONFIG).read_bytes()).get("add_prefix_space")
        if prefix is not None:
            model.gguf_writer.add_add_space_prefix(prefix)

    text_model._set_vocab_gpt2 = set_vocab
    config = json.loads((Path(sys.argv[1]) / CONFIG).read_bytes())
    (architecture,) = config["architectures"]
    if architecture in _OWN_VOCABULARY:
        script.get_model_class(architecture).set_vocab = set_vocab
    if config.get("fmoe_format") == "deepseek_moe":
        _name_as_deepseek_moe(script)
    if pre:
        text_model.get_vocab_base_pre = lambda model, tokenizer: pre
    script.main()


def _name_as_deepseek_moe(script: Any) -> None:
    """Make the converter read a DeepSeekMoE as such, although it was exported as a Qwen2-MoE."""
    # llama.cpp's Qwen2-MoE has experts in every layer, and divides by the gate of the shared experts, which is zero in
    # the export.
    load = script.ModelBase.load_hparams

    def load_hparams(*arguments: Any) -> dict[str, Any]:
        config = load(*arguments)
        dense = [
            layer
            for layer in range(config["num_hidden_layers"])
            if layer in config["mlp_only_layers"] or (layer + 1) % config["decoder_sparse_step"]
        ]
        return config | {
            "architectures": ["DeepseekForCausalLM"],
            "first_k_dense_replace": len(dense),
            "n_routed_experts": config["num_experts"],
            "n_shared_experts": config["shared_expert_intermediate_size"] // config["moe_intermediate_size"],
        }

    model: Any = script.get_model_class("DeepseekForCausalLM")
    keep = model.filter_tensors

    def filter_tensors(item: tuple[str, Any]) -> tuple[str, Any] | None:
        name, tensor = item
        if name.endswith(("shared_expert_gate.weight", "_proj.bias")):  # zeros
            return None
        renamed = name.replace("shared_expert.", "shared_experts.")
        is_doubled = name.endswith("shared_expert.down_proj.weight")  # by the export
        return keep((renamed, (lambda: tensor() / 2) if is_doubled else tensor))

    script.ModelBase.load_hparams = staticmethod(load_hparams)
    model.filter_tensors = staticmethod(filter_tensors)
