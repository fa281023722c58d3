"""GPT-OSS (``gpt_oss``, arXiv 2508.10925): sliding windows in every second layer, attention sinks, biases, and clamped
gated experts.

Except in MXFP4, its expert matrices are [in, out]. Gates and values alternate along ``out``.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fmoe.errors import UserError
from pretrain.config import ModelConfig
from pretrain.interchange.families.llama import (
    ATTENTION,
    COMMON,
    DROPLESS,
    EQUAL_BIASES,
    EVERY_LAYER,
    FIXED,
    KEYS,
    LAYER,
    ONLY,
    OUR_LAYER,
    OUTPUT_BIAS,
    QKV_BIAS,
    SOFTMAX,
    SUM_TO_ONE,
    WIDTH,
    norm_and_rope,
    write_llama,
)
from pretrain.interchange.families.mxfp4 import FromMXFP4
from pretrain.interchange.family import (
    Config,
    Demand,
    Family,
    KeyPair,
    Only,
    Values,
    read_bool,
    read_int,
    toml,
    without,
)
from pretrain.interchange.folder import HuggingFaceFolder
from pretrain.interchange.rope import YARN
from pretrain.interchange.tensors import Entry, Same, Sizes, Transform


class Transposed:
    """Transform that exports a stack of matrices [E, out, in] as [E, in, out]."""

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        return (ours.transpose(1, 2).contiguous(),)

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return theirs[0].transpose(1, 2).contiguous()


class InTurn:
    """Transform that exports the experts' gate and value matrices [E, 2 * H, ...] as [E, ..., 2 * H].

    In fmoe, the H rows of the gate come before the H rows of the value. In GPT-OSS, gate and value alternate.
    """

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        rows = torch.stack(ours.chunk(2, dim=1), dim=2).flatten(1, 2)
        return (rows.movedim(1, -1).contiguous(),)

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        rows = theirs[0].movedim(-1, 1)
        return torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1)


_OURS = f"{OUR_LAYER}.mlp"
_THEIRS = f"{LAYER}.mlp"
ATTENTION_TABLE = (
    *COMMON,
    QKV_BIAS,
    OUTPUT_BIAS,
    Entry("layer", f"{OUR_LAYER}.self_attention.core_attention.softmax_offset", {f"{ATTENTION}.sinks": "Q"}),
    Entry("moe", f"{_OURS}.gate.weight", {f"{_THEIRS}.router.weight": "E D"}),
    Entry("moe", f"{_OURS}.gate.bias", {f"{_THEIRS}.router.bias": "E"}),
    Entry("moe", f"{_OURS}.experts.bias_in", {f"{_THEIRS}.experts.gate_up_proj_bias": "E 2H"}, InTurn()),
    Entry("moe", f"{_OURS}.experts.bias_out", {f"{_THEIRS}.experts.down_proj_bias": "E D"}),
)
TABLE = (
    *ATTENTION_TABLE,
    Entry("moe", f"{_OURS}.experts.weight_in", {f"{_THEIRS}.experts.gate_up_proj": "E D 2H"}, InTurn()),
    Entry("moe", f"{_OURS}.experts.weight_out", {f"{_THEIRS}.experts.down_proj": "E H D"}, Transposed()),
)


def _packed(ours: str, name: str, rows: str, blocks: str, of_rows: Transform) -> Entry:
    theirs = {f"{_THEIRS}.experts.{name}_blocks": f"{rows} {blocks} 16"}
    theirs |= {f"{_THEIRS}.experts.{name}_scales": f"{rows} {blocks}"}
    return Entry("moe", f"{_OURS}.experts.{ours}", theirs, FromMXFP4(of_rows), dtype=torch.uint8)


class _RowsInTurn(InTurn):
    """`InTurn` that imports [E, 2 * H, ...], with gate and value alternating along axis 1."""

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return super().join([theirs[0].movedim(1, -1)], sizes)


# As published, in MXFP4.
PACKED_TABLE = (
    *ATTENTION_TABLE,
    _packed("weight_in", "gate_up_proj", "E 2H", "X", _RowsInTurn()),
    _packed("weight_out", "down_proj", "E D", "Y", Same()),
)

_KINDS = ("full_attention", "sliding_attention")
_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_WINDOW = 128  # written for a model without windows: transformers needs a number


def _write(model: ModelConfig) -> Values:
    return write_llama(model) | {
        "sliding_window": model.attention.sliding_window or _WINDOW,
        "layer_types": [_KINDS[n in model.layers_with_window] for n in model.layer_numbers],
    }


def _read(config: Config) -> Values:
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types", [_KINDS[n % 2] for n in range(1, layers + 1)])
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _KINDS for kind in kinds):
        raise UserError(f"layer_types={toml(kinds)} must be a list of {layers} entries, each {' or '.join(_KINDS)}")
    sliding = tuple(n for n, kind in enumerate(kinds, start=1) if kind == "sliding_attention")
    windows: Values = {}
    if sliding:
        windows["attention.sliding_window"] = read_int(config, "sliding_window")
        windows["attention.sliding_layers"] = sliding if len(sliding) < layers else ()
    return DROPLESS | {
        "attention.head_dim": read_int(config, "head_dim", 64),
        "attention.output_bias": read_bool(config, "attention_bias", True),
        "moe.normalize": True,
        "moe.expert_options": {"bias": True},
        **windows,
    }


def _adapt(config: Config, folder: HuggingFaceFolder) -> Config:
    """Return config.json without the quantization settings of MXFP4.

    If it has no settings for rotary positions, add the default ones (YaRN).
    """
    config = dict(config)
    if config.get("rope_parameters") is None and not config.get("rope_scaling"):  # {} is rope_type=default
        config["rope_scaling"] = _ROPE
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4":
        del config["quantization_config"]
    return config


GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    tables=(TABLE, PACKED_TABLE),
    keys=(
        *KEYS,
        KeyPair("num_local_experts", "moe.num_experts", int, alias="num_experts"),
        WIDTH,
        *norm_and_rope(1e-5, 150000.0),
        KeyPair("attention_bias", "attention.qkv_bias", bool, True),
    ),
    fixed=FIXED | {"activation": "swiglu_oai", "attention.sinks": True, "moe.gate_options": {"bias": True}},
    demands=(
        *without(SOFTMAX, "moe.expert_options"),
        *EVERY_LAYER,
        *SUM_TO_ONE,
        Demand(
            "moe.expert_options",
            lambda m: (
                m.moe.expert_options.get("bias") is True and not m.moe.expert_options.keys() - {"bias", "dropout"}
            ),
            "moe.expert_options.bias=true, and no other option except dropout",
        ),
        EQUAL_BIASES,
    ),
    varies=("attention.head_dim", "attention.sliding_window", "attention.sliding_layers", *YARN),
    constants={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    only=(
        *without(ONLY, "attention_bias", "mlp_bias"),
        Only("swiglu_alpha", (1.702, None)),
        Only("swiglu_limit", (7.0, 7, None)),
    ),
    read=_read,
    write=_write,
    adapt=_adapt,
)
