"""ERNIE 4.5 (``ernie4_5_moe``): experts chosen by softmax plus a bias, and rotary positions of interleaved pairs.

The combine weights are divided by their sum. transformers uses at least 1e-12 as the sum, and fmoe at least 1e-20.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fmoe.errors import UserError
from pretrain.config import ModelConfig
from pretrain.interchange.families.deepseek import EXPERTS, SHARED_EXPERTS, SIGMOID
from pretrain.interchange.families.llama import (
    COMMON,
    DENSE,
    DROPLESS,
    FIXED,
    KEYS,
    LAYER,
    ONLY,
    OUR_LAYER,
    STACKED,
    read_llama,
    write_llama,
)
from pretrain.interchange.family import Demand, Family, Key, Only, read_int, toml
from pretrain.interchange.rope import YARN
from pretrain.interchange.tensors import Entry, QueryKeyValue, Sizes


class PairedQueryKeyValue:
    """`QueryKeyValue` for a format whose rotary positions pair elements 2 i and 2 i + 1 of a head.

    fmoe pairs elements i and i + d / 2, for heads of width d.
    """

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        query, key, value = QueryKeyValue().split(ours, sizes)
        pairs = [part.view(-1, 2, sizes["d"] // 2, *part.shape[1:]).transpose(1, 2) for part in (query, key)]
        return pairs[0].reshape(query.shape), pairs[1].reshape(key.shape), value

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        query, key, value = theirs
        halves = [part.view(-1, sizes["d"] // 2, 2, *part.shape[1:]).transpose(1, 2) for part in (query, key)]
        return QueryKeyValue().join((halves[0].reshape(query.shape), halves[1].reshape(key.shape), value), sizes)


class Row:
    """Transform that exports a vector as a matrix of one row."""

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        return (ours.unsqueeze(0),)

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return theirs[0].squeeze(0)


_ATTENTION = tuple(
    Entry(e.where, e.ours, e.theirs, PairedQueryKeyValue()) if isinstance(e.transform, QueryKeyValue) else e
    for e in COMMON
)
_SHARED = tuple(
    Entry(e.where, e.ours, e.theirs, e.transform, when=lambda model: model.num_shared_experts > 0)
    for e in SHARED_EXPERTS
)


def _choice_bias(module: str) -> Entry:
    name = f"{LAYER}.mlp.{module}.e_score_correction_bias"
    return Entry("moe", f"{OUR_LAYER}.mlp.gate.expert_bias_E", {name: "1 E"}, Row(), dtype=torch.float32)


_REST = (*_ATTENTION, *DENSE, *_SHARED)
ERNIE_TABLE = (*_REST, *EXPERTS, _choice_bias("moe_statics"))
ERNIE_STACKED = (*_REST, *STACKED, _choice_bias("gate.moe_statics"))


def _range(start: int, end: int, interval: int) -> tuple[int, ...]:
    """Return the numbers of the layers with experts: the multiples of ``interval`` from ``start + 1`` to ``end + 1``.

    The numbers count from 1; ``start`` and ``end`` count from 0.
    """
    return tuple(number for number in range(start + 1, end + 2) if number % interval == 0)


def _indices(model: ModelConfig) -> tuple[int, int, int]:
    """Return the first and the last layer with experts, counted from 0, and the step between such layers.

    The step is taken from the first two such layers; 1 if there is only one.
    """
    found = model.layers_with_experts
    return found[0] - 1, found[-1] - 1, found[1] - found[0] if len(found) > 1 else 1


def _is_regular(model: ModelConfig) -> bool:
    found = model.layers_with_experts
    return not found or _range(*_indices(model)) == found


def _write(model: ModelConfig) -> dict[str, Any]:
    start, end, interval = _indices(model)
    return write_llama(model) | {
        "moe_layer_start_index": start,
        "moe_layer_end_index": end,
        "moe_layer_interval": interval,
        "intermediate_size": model.dense_width,
        "moe_num_shared_experts": model.num_shared_experts,
    }


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    values = {
        "moe_layer_start_index": (config.get("moe_layer_start_index", 1), 0, layers - 1),
        "moe_layer_end_index": (config.get("moe_layer_end_index", -1), -1, layers - 1),
        "moe_layer_interval": (config.get("moe_layer_interval", 1), 1, layers),
        "moe_num_shared_experts": (config.get("moe_num_shared_experts", 2), 0, 1 << 16),
    }
    for name, (value, low, high) in values.items():
        if type(value) is not int or not low <= value <= high:
            raise UserError(f"{name}={toml(value)} must be an integer from {low} to {high}")
    start, end, interval, shared = (value for value, _, _ in values.values())
    if config["moe_k"] == 1:
        raise UserError("moe_k=1 is not supported: it must be at least 2")
    found = _range(start, layers - 1 if end == -1 else end, interval)
    if not found:
        keys = ", ".join(f"{name}={value}" for name, (value, _, _) in list(values.items())[:3])
        raise UserError(f"{keys} leave no layer with experts")
    read = read_llama(config) | DROPLESS | {"gate": "sigmoid", "score": "softmax", "num_shared_experts": shared}
    if len(found) < layers:
        read |= {"moe_layers": found, "dense_ffn_hidden_size": read_int(config, "intermediate_size")}
    return read


ERNIE4_5_MOE = Family(
    name="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    tables=(ERNIE_TABLE, ERNIE_STACKED),
    keys=(
        *(key for key in KEYS if key.ours not in ("top_k", "balance_loss", "tie_embeddings")),
        Key("moe_num_experts", "num_experts", int, alias="num_experts"),
        Key("moe_k", "top_k", int, alias="num_experts_per_tok"),
        Key("moe_intermediate_size", "ffn_hidden_size", int),
        Key("tie_word_embeddings", "tie_embeddings", bool, True),
        Key("rms_norm_eps", "norm_eps", float, 1e-5),
        Key("rope_theta", "rope_theta", float, 5e5),
    ),
    fixed=FIXED | {"score": "softmax"},
    demands=(
        *(demand for demand in SIGMOID if demand.ours not in ("score", "gate_options")),
        Demand("normalize", lambda m: m.normalize is not False, "true: weights that sum to one"),
        Demand("top_k", lambda m: m.top_k > 1, "at least 2, whose weights sum to one"),
        Demand("moe_layers", _is_regular, "the multiples of a number in a range of layers, such as 4, 6, 8"),
    ),
    varies=("head_dim", "moe_every", "num_shared_experts", "jitter", *YARN),
    constants={"use_bias": False, "moe_norm_min": 1e-12},
    only=(*ONLY, Only("use_bias", (False, None)), Only("moe_norm_min", (1e-12, None))),
    read=_read,
    write=_write,
)
