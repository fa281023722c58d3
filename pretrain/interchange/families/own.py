"""The family ``fmoe``: models in fmoe's own format, which transformers runs with `modeling_fmoe` and the package
fmoe."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from fmoe import random
from fmoe.errors import UserError
from fmoe.experts import EXPERTS
from fmoe.files import write_atomically
from fmoe.gates import GATES
from pretrain.checkpoint.geometry import Shape
from pretrain.config import ModelConfig, build_recipe
from pretrain.config.layer import build_layer, is_shipped
from pretrain.config.model import full_name
from pretrain.interchange.family import Config, Demand, Family, Only, Values, toml
from pretrain.interchange.folder import HuggingFaceFolder
from pretrain.interchange.tensors import Place, Same

_CODE = "modeling_fmoe.py"
_AUTO_MAP = {"AutoConfig": "modeling_fmoe.FMoEConfig", "AutoModelForCausalLM": "modeling_fmoe.FMoEForCausalLM"}


def without_mtp(model: ModelConfig) -> ModelConfig:
    """Return the model without the layers of multi-token prediction, which only training uses."""
    return replace(model, mtp_layers=0, mtp_loss=ModelConfig.mtp_loss)


def tensors(model: ModelConfig) -> Iterator[Place]:
    """Yield the tensors of a model in fmoe's own export format, named after Megatron-core's modules.

    Tensors of multi-token prediction are left out.
    """
    model = without_mtp(model)
    for name, shape in _shapes(model):
        ours = name
        layer = None
        if model.attention.kv_lora_rank is None:  # in a checkpoint, norms belong to the matrices that follow
            ours = ours.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
            ours = ours.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        match = re.search(r"\.layers\.(\d+)\.", name)
        if not model.moe.num_experts and match is not None:  # equal layers are stacked
            ours = ours.replace(match[0], ".layers.")
            layer = int(match[1])
        is_bias = name.endswith(".gate.expert_bias_E")  # float32 in models of 16 bits, too
        yield Place(f"model/{ours}", layer, {name: shape}, Same(), torch.float32 if is_bias else None)


def _shapes(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    width = model.hidden_size
    yield "embedding.word_embeddings.weight", (model.vocab_size, width)
    if model.position.encoding == "learned_absolute":
        yield "embedding.position_embeddings.weight", (model.sequence_length, width)
    with torch.device("meta"), random.keyed("sizes"):
        experts = build_layer(model).state_dict() if model.moe.num_experts else {}
    for number in model.layer_numbers:
        layer = f"decoder.layers.{number - 1}"
        yield from _norm(model, f"{layer}.input_layernorm", width)
        yield from _attention(model, f"{layer}.self_attention")
        yield from _norm(model, f"{layer}.pre_mlp_layernorm", width)
        if number in model.layers_with_experts:
            yield from ((f"{layer}.mlp.{name}", tuple(value.shape)) for name, value in experts.items())
        else:
            yield f"{layer}.mlp.linear_fc1.weight", (model.dense_width * (1 + model.gated), width)
            yield f"{layer}.mlp.linear_fc2.weight", (width, model.dense_width)
    yield from _norm(model, "decoder.final_layernorm", width)
    if not model.tie_embeddings:
        yield "output_layer.weight", (model.vocab_size, width)
    if model.output_bias:
        yield "output_layer.bias", (model.vocab_size,)


def _norm(model: ModelConfig, name: str, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (width,)
    if model.norm == "layer":
        yield f"{name}.bias", (width,)


def _attention(model: ModelConfig, name: str) -> Iterator[tuple[str, Shape]]:
    width = model.hidden_size
    attention = model.attention
    heads = attention.num_heads
    head = model.head_width
    yield f"{name}.linear_proj.weight", (width, heads * model.value_width)
    if attention.kv_lora_rank is None:
        rows = (heads + 2 * model.query_groups) * head
        yield f"{name}.linear_qkv.weight", (rows, width)
        if model.position.encoding == "transformer_xl":
            yield f"{name}.linear_position.weight", (heads * head, width)
            yield from ((f"{name}.biases.{part}", (heads * head,)) for part in ("content", "position"))
        if attention.qkv_bias:
            yield f"{name}.linear_qkv.bias", (rows,)
        if attention.output_bias:
            yield f"{name}.linear_proj.bias", (width,)
        if attention.sinks:
            yield f"{name}.core_attention.softmax_offset", (heads,)
        for part, number in (("q", heads), ("k", model.query_groups)) if attention.qk_norm else ():
            yield from _norm(
                model, f"{name}.{part}_layernorm", head * (number if attention.qk_norm_over == "all" else 1)
            )
        return
    assert attention.qk_head_dim is not None and attention.qk_rope_head_dim is not None
    if attention.q_lora_rank is None:
        yield f"{name}.linear_q_proj.weight", (heads * head, width)
    else:
        yield f"{name}.linear_q_down_proj.weight", (attention.q_lora_rank, width)
        yield from _norm(model, f"{name}.q_layernorm", attention.q_lora_rank)
        yield f"{name}.linear_q_up_proj.weight", (heads * head, attention.q_lora_rank)
    rank = attention.kv_lora_rank
    yield f"{name}.linear_kv_down_proj.weight", (rank + attention.qk_rope_head_dim, width)
    yield from _norm(model, f"{name}.kv_layernorm", rank)
    yield f"{name}.linear_kv_up_proj.weight", (heads * (attention.qk_head_dim + model.value_width), rank)


def _write(model: ModelConfig) -> Values:
    model = without_mtp(model)
    # For tools that read config.json without our code; `FMoEConfig` computes these from the section.
    common = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.attention.num_heads,
        "num_key_value_heads": model.query_groups,
        "max_position_embeddings": model.sequence_length,
        "tie_word_embeddings": model.tie_embeddings,
    }
    return {**common, "auto_map": _AUTO_MAP, "model": model.values()}


def _read(config: Config) -> Values:
    section = config.get("model")
    if not isinstance(section, Mapping):
        raise UserError(f"model={toml(section)} must be an object")
    if "vocab_size" in config:
        section = {**section, "vocab_size": config["vocab_size"]}
    recipe = build_recipe({"model": section})
    recipe.check()
    model = without_mtp(recipe.model)  # an export leaves these layers out
    for demand in FMOE.demands:
        if not demand.holds(model):
            raise UserError(
                f"{full_name(demand.ours)}={toml(model.value(demand.ours))} is not supported: use {demand.why}"
            )
    try:
        list(_shapes(model))
    except (TypeError, ValueError) as error:  # from a constructor, for an option of a wrong type
        raise UserError(f"moe.gate_options or moe.expert_options is invalid: {error}") from error
    return model.values()


def _code() -> dict[str, bytes]:
    return {_CODE: (Path(__file__).parents[1] / _CODE).read_bytes()}


def update_code(folder: Path) -> str:
    """Replace the code in an export of the family ``fmoe`` with that of the installed fmoe; return the file's name.

    Raises:
        UserError: the folder is not such an export, the code does not support its model, or the folder is not writable.
    """
    config = HuggingFaceFolder(folder).config
    if config.get("auto_map") != _AUTO_MAP:
        raise UserError(
            f"{folder} has no code of fmoe: auto_map={toml(config.get('auto_map'))} in config.json; only exports of "
            "the family fmoe have code"
        )
    _read(config)
    try:
        write_atomically(folder / _CODE, _code()[_CODE])
    except OSError as error:
        raise UserError(f"cannot write in {folder}: {error.strerror}") from error
    return _CODE


def _notes(model: ModelConfig) -> tuple[str, ...]:
    notes = ["needs the package fmoe and trust_remote_code=True to load"]
    if model.mtp_layers:
        notes.append(f"without the layers of multi-token prediction (model.mtp_layers={model.mtp_layers})")
    return tuple(notes)


_PLUGIN = "a name from fmoe itself: plugins (modules of run.imports) are not exported"
FMOE = Family(
    name="fmoe",
    architecture="FMoEForCausalLM",
    tables=(),
    keys=(),
    fixed={"kind": "gpt"},
    demands=(
        Demand("moe.gate", lambda m: m.moe.gate in GATES and is_shipped(GATES[m.moe.gate]), _PLUGIN),
        Demand(
            "moe.gate",
            lambda m: m.moe.gate not in ("random", "hash"),
            "a gate that chooses experts by the hidden states",
        ),
        Demand("moe.expert", lambda m: m.moe.expert in EXPERTS and is_shipped(EXPERTS[m.moe.expert]), _PLUGIN),
    ),
    varies=tuple(ModelConfig().values()),
    only=(Only("quantization_config", (None,)),),
    read=_read,
    write=_write,
    places=tensors,
    files=_code,
    notes=_notes,
    left_out="model/mtp.",
    copies={"output_layer.weight": "embedding.word_embeddings.weight"},
)
"""Any GPT without plugins, except those with the gates ``random`` and ``hash``. Loading one needs the package fmoe, so
"auto" tries this family last."""
