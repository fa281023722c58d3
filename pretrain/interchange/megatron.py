"""Checkpoints of Megatron-core's dist_checkpointing (format ``torch_dist``), read under fmoe's names.

Such a checkpoint is a folder in torch.distributed.checkpoint's format, with metadata.json. What is not sharded, such as
the arguments of Megatron-LM, is in the file common.pt or, from megatron-core 0.19 on, in an object of the folder.

Megatron-core saves a tensor of equal layers once, with the layers as a leading axis
(``decoder.layers.mlp.router.weight``, [layers, E, D]). If layers differ, it saves one tensor per layer
(``decoder.layers.3.mlp.router.weight``). The experts of a layer are one tensor, whichever class of Megatron-core held
them.
"""

import re
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fmoe.errors import UserError
from megatron_patch.moe_layer import LIMITS, sharded_names
from pretrain.checkpoint import TensorPiece
from pretrain.checkpoint.geometry import Shape
from pretrain.config import ModelConfig
from pretrain.config.model import GPT_SCALES, full_name
from pretrain.interchange.dcp import METADATA, DcpFolder, chunks_of, pickle_in, reading
from pretrain.interchange.family import toml
from pretrain.interchange.pickled import Made

COMMON = "common.pt"
_COMMON_OBJECT = "common_state/shard_0_1"
_IN_LAYER = re.compile(r"(?P<stack>(?:.*\.)?layers)\.(?:(?P<number>\d+)\.)?(?P<inside>.+)")
# Names that are not the model's: optimizer states, and extra states of modules.
_NOT_THE_MODELS = re.compile(r"(optimizer|chained_\d+)\..*|.*\._extra_state(/.*)?")
Arguments = Mapping[str, Any]  # of Megatron-LM, by name

# Pairs of names of one norm: as a separate module, and within the linear layer after it (Transformer Engine).
_SAME_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)


@dataclass(frozen=True)
class Renamed:
    """A tensor of an fmoe checkpoint, and its location in a checkpoint folder of Megatron-core.

    Attributes:
        name: name in a checkpoint of fmoe, with the prefix ``model/``.
        shape, dtype: shape in fmoe, and the stored dtype.
        theirs: name of Megatron-core's tensor in the folder.
        row: index along the leading axis (layers) of Megatron-core's tensor; None for the whole tensor.
        is_stacked: True if fmoe's tensor has a leading axis of size 1 that Megatron-core's lacks (shared experts).
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    theirs: str
    row: int | None
    is_stacked: bool


def rename(folder: DcpFolder, required: Collection[str]) -> list[Renamed]:
    """Return the model's tensors in a Megatron-core folder, with their names in fmoe.

    The optimizer's tensors are left out.

    Args:
        required: names of the model's tensors in fmoe. They determine the number of layers and the names of norms.

    Raises:
        UserError: a tensor is empty, has no axis of layers, or has another number of layers than the recipe's model.
    """
    renamed = []
    num_layers = _num_layers(required)
    for theirs, tensor in folder.tensors.items():
        if _NOT_THE_MODELS.fullmatch(theirs):
            continue
        if not prod(tensor.shape):
            raise UserError(f"{folder.path}: {theirs} is empty: it has shape {list(tensor.shape)}")
        match = _IN_LAYER.fullmatch(theirs)
        if match is None:
            renamed.append(Renamed(f"model/{theirs}", tensor.shape, tensor.dtype, theirs, None, False))
            continue
        inside, is_stacked = _renamed_in_layer(match["inside"])
        layers: list[tuple[Any, int | None]] = [(match["number"], None)]
        shape = tensor.shape
        if match["number"] is None:
            if not shape:
                raise UserError(f"{folder.path}: {theirs} has no axis of layers")
            count = num_layers.get(match["stack"], 0)
            if shape[0] != count:
                raise UserError(f"{folder.path}: {theirs} has {shape[0]} layers, but the recipe's model has {count}")
            layers = [(row, row) for row in range(count)]
            shape = shape[1:]
        if is_stacked:
            shape = (1, *shape)
        for number, row in layers:
            name = _with_norms_of(required, f"model/{match['stack']}.{number}.", inside)
            renamed.append(Renamed(name, shape, tensor.dtype, theirs, row, is_stacked))
    return renamed


def _num_layers(names: Iterable[str]) -> dict[str, int]:
    """Return the number of layers by the name of their stack, such as ``decoder.layers``."""
    numbers: dict[str, int] = {}
    for name in names:
        match = _IN_LAYER.fullmatch(name.removeprefix("model/"))
        if match is not None and match["number"] is not None:
            numbers[match["stack"]] = max(numbers.get(match["stack"], 0), int(match["number"]) + 1)
    return numbers


def _renamed_in_layer(name: str) -> tuple[str, bool]:
    """Return fmoe's name of a layer's tensor, and the value of `Renamed.is_stacked`."""
    before, mlp, inside = name.rpartition("mlp.")
    ours = sharded_names().get(inside) if mlp else None
    return (name, False) if ours is None else (f"{before}{mlp}{ours}", ours.startswith("shared.expert."))


def _with_norms_of(required: Collection[str], layer: str, name: str) -> str:
    """Return a tensor's full name. If it is not required, replace its norm by the other name of the same norm."""
    for one, other in _SAME_NORMS:
        for candidate in (name, name.replace(one, other), name.replace(other, one)):
            if f"{layer}{candidate}" in required:
                return f"{layer}{candidate}"
    return f"{layer}{name}"


def pieces_of(folder: DcpFolder, tensors: Sequence[Renamed]) -> Iterator[TensorPiece]:
    """Read renamed tensors from a folder chunk by chunk, and yield the data under fmoe's names."""
    rows_of: dict[str, dict[int | None, Renamed]] = {}
    for tensor in tensors:
        rows_of.setdefault(tensor.theirs, {})[tensor.row] = tensor
    for theirs, chunk in chunks_of(folder, rows_of):
        data = folder.read(theirs, chunk)
        rows = rows_of[theirs]
        if None in rows:
            parts = [(rows[None], chunk.offset, data)]
        else:
            parts = [(rows[chunk.offset[0] + n], chunk.offset[1:], part) for n, part in enumerate(data)]
        for ours, offset, part in parts:
            if ours.is_stacked:
                offset = (0, *offset)
                part = part.unsqueeze(0)
            yield TensorPiece(ours.name, ours.shape, offset, tuple(part.shape), part)


def check_arguments(folder: DcpFolder, model: ModelConfig) -> bool:
    """Compare a recipe's model with the arguments of Megatron-LM in a checkpoint.

    Returns:
        True if the arguments were compared. False if there are none, because a program other than Megatron-LM saved the
            checkpoint.

    Raises:
        UserError: an argument differs from the recipe; an argument or a key of the recipe is not supported; the part
            of the checkpoint that would hold the arguments is missing, unreadable or damaged.
    """
    where, arguments = _arguments_in(folder)
    for ours in ("position.rope_scaling", "attention.scale", *GPT_SCALES) if arguments else ():
        # Megatron-LM lacks these settings or, as for its own YaRN, has arguments for them that are not compared here.
        value = model.value(ours)
        default = ModelConfig().value(ours)
        if value != default:
            key = full_name(ours)
            raise UserError(
                f"{key}={toml(value)} is not supported for a checkpoint of Megatron-LM ({where}): if the model was "
                f"trained with {toml(default)}, import with {key}={toml(default)}, then set {key}={toml(value)} in the "
                "recipe of the run that starts from the imported checkpoint"
            )
    for name, ours, key in _same_values(model, arguments):
        theirs = arguments.get(name, ours)
        is_default = (theirs is None and ours in (False, 1.0)) or (theirs is False and ours is None)
        if theirs != ours and not is_default:
            raise UserError(f"{where}: {name}={_brief(theirs)} differs from the recipe, which has {key}")
    for name, holds, why in LIMITS:
        value = arguments.get(name)
        if name != "moe_router_load_balancing_type" and value is not None and not holds(value):
            raise UserError(f"{where}: {name}={_brief(value)} is not supported: {why}")
    return bool(arguments)


def _brief(value: Any) -> str:
    """Format a number, string or flat tuple for a message; of any other value, give only the type."""
    # Values other than these may be cyclic.
    for each in value if isinstance(value, tuple) else (value,):
        if not isinstance(each, int | float | str | None) or (isinstance(each, int) and each.bit_length() > 64):
            return f"a {type(value).__name__}"
    return toml(value)


def _arguments_in(folder: DcpFolder) -> tuple[str, Arguments]:
    """Return the location of the arguments of Megatron-LM, for messages, and the arguments; empty if there are none."""
    path = folder.path / COMMON
    if path.is_file():
        where = str(path)
        with reading(path), zipfile.ZipFile(path) as archive:
            common = pickle_in(archive)
    elif _COMMON_OBJECT in folder.objects:
        where = f"{folder.path}: {_COMMON_OBJECT}"
        stored = folder.read_object(_COMMON_OBJECT)
        common = stored[0] if isinstance(stored, list) and stored else None
    else:
        raise UserError(
            f"{path} is missing, and {METADATA} has no {_COMMON_OBJECT}: the checkpoint is incomplete; copy it again"
        )
    if not isinstance(common, dict):
        raise UserError(f"{where} is damaged: it is not a dict")
    arguments = common.get("args")
    state = arguments.state if isinstance(arguments, Made) else None
    return where, state if isinstance(state, Mapping) else {}


def _same_values(model: ModelConfig, arguments: Arguments) -> Iterator[tuple[str, Any, str]]:
    """Yield each argument of Megatron-LM, the value that the recipe implies, and the recipe's keys in words."""

    def key(name: str) -> str:
        return f"{full_name(name)}={toml(model.value(name))}"

    yield "num_layers", model.num_layers, key("num_layers")
    yield "hidden_size", model.hidden_size, key("hidden_size")
    attention = model.attention
    yield "num_attention_heads", attention.num_heads, key("attention.num_heads")
    if arguments.get("group_query_attention"):
        yield "num_query_groups", model.query_groups, key("attention.num_query_groups")
    if attention.kv_lora_rank is None:
        yield "kv_channels", model.head_width, key("attention.head_dim")
    else:
        yield "rope_type", "rope", "rotary positions without YaRN"
    yield "multi_latent_attention", attention.kv_lora_rank is not None, key("attention.kv_lora_rank")
    yield "qk_layernorm", attention.qk_norm or attention.kv_lora_rank is not None, key("attention.qk_norm")
    yield "position_embedding_type", model.position.encoding, key("position.encoding")
    if model.position.encoding == "rope":
        yield "rotary_base", model.position.rope_theta, key("position.rope_theta")
        yield "rotary_percent", model.position.rotary_fraction, key("position.rotary_fraction")
        yield "use_rope_scaling", False, "no scaled rotary positions"
        yield "rotary_interleaved", False, "no interleaved rotary positions"
        yield "rotary_seq_len_interpolation_factor", None, "no interpolated positions"
    yield "normalization", {"rms": "RMSNorm", "layer": "LayerNorm"}[model.norm], key("norm")
    for name in ("apply_layernorm_1p", "layernorm_zero_centered_gamma"):  # up to megatron-core 0.16, and from 0.17 on
        yield name, False, "norms without an added 1"
    yield "use_mup", False, "no scales of muP"
    for name in ("norm_epsilon", "layernorm_epsilon"):
        yield name, model.norm_eps, key("norm_eps")
    for name in ("squared_relu", "quick_geglu"):
        yield name, False, key("activation")
    else_gelu = "" if arguments.get("swiglu") else f"; without swiglu, Megatron-LM has an ungated {_gelu(arguments)}"
    yield "swiglu", _swiglu(model, arguments), f"{key('gated')}, {key('activation')}{else_gelu}"
    yield (
        "window_size",
        None if attention.sliding_window is None else (attention.sliding_window - 1, 0),
        key("attention.sliding_window"),
    )
    if attention.sliding_stride is not None:
        yield "window_size", "with a stride", key("attention.sliding_stride")
    if attention.sliding_window is not None:
        which = arguments.get("window_attn_skip_freq")
        if isinstance(which, list | tuple):
            near = tuple(n for n, has_window in enumerate(which, start=1) if has_window)
        else:  # every n-th layer has no window
            every = which if isinstance(which, int) and which > 0 else model.num_layers + 1
            near = tuple(n for n in range(1, model.num_layers + 1) if n % every)
        yield (
            "window_attn_skip_freq",
            which if near == model.layers_with_window else "other",
            key("attention.sliding_layers"),
        )
    yield "softmax_type", "learnable" if attention.sinks else "vanilla", key("attention.sinks")
    yield "qk_l2_norm", False, "no L2 norm of queries and keys"
    yield "no_rope_freq", None, "the same positions in every layer"
    yield "apply_residual_connection_post_layernorm", False, "residual connections around the norms"
    yield "untie_embeddings_and_output_weights", not model.tie_embeddings, key("tie_embeddings")
    moe = model.moe
    if not moe.num_experts:
        return
    yield "num_experts", model.routed_experts, key("moe.num_experts")
    yield "moe_router_topk", model.chosen_experts, key("moe.top_k")
    score = moe.score or ("sigmoid" if moe.gate == "sigmoid" else "softmax")
    yield "moe_router_score_function", score, f"{key('moe.gate')}, {key('moe.score')}"
    normalize = moe.gate != "switch" and moe.normalize is not False
    if score == "softmax":
        yield "moe_router_pre_softmax", not normalize, f"{key('moe.gate')}, {key('moe.normalize')}"
    elif normalize != (model.chosen_experts > 1):
        yield "moe_router_topk", None, f"{key('moe.normalize')}: Megatron-LM normalizes sigmoid weights if top_k > 1"
    yield "moe_router_topk_scaling_factor", moe.routed_scale, key("moe.routed_scale")
    yield "moe_router_enable_expert_bias", moe.gate == "sigmoid", key("moe.gate")


def _swiglu(model: ModelConfig, arguments: Arguments) -> bool | str:
    """Return the value of ``swiglu`` that the recipe's activation requires; "neither" if both values are wrong."""
    if model.gated:
        return True if model.activation == "silu" else "neither"
    return False if model.activation == _gelu(arguments) else "neither"


def _gelu(arguments: Arguments) -> str:
    """Return fmoe's name of Megatron-LM's GELU, which is the tanh approximation if fused with the biases."""
    return "gelu_tanh" if arguments.get("bias_gelu_fusion") and arguments.get("add_bias_linear") else "gelu"
