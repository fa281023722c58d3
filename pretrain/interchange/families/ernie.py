"""ERNIE 4.5 (``ernie4_5_moe``): experts chosen by softmax plus a bias, and rotary positions of interleaved pairs.

The combine weights are divided by their sum. transformers uses at least 1e-12 as the sum, and fmoe at least 1e-20.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fmoe.errors import UserError
from pretrain.config import ModelConfig
from pretrain.interchange.families.deepseek import SHARED_EXPERTS, SIGMOID
from pretrain.interchange.families.llama import (
    COMMON,
    DENSE,
    DROPLESS,
    EXPERT_WIDTH,
    EXPERTS,
    FIXED,
    KEYS,
    LAYER,
    ONLY,
    OUR_LAYER,
    STACKED,
    norm_and_rope,
    read_llama,
    write_llama,
)
from pretrain.interchange.family import Config, Demand, Family, KeyPair, Only, Values, read_int, toml, without
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
        straight = halves[0].reshape(query.shape), halves[1].reshape(key.shape), value
        return QueryKeyValue().join(straight, sizes)


class Row:
    """Transform that exports a vector as a matrix of one row."""

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        return (ours.unsqueeze(0),)

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return theirs[0].squeeze(0)


_ATTENTION = tuple(
    replace(entry, transform=PairedQueryKeyValue()) if isinstance(entry.transform, QueryKeyValue) else entry
    for entry in COMMON
)
_SHARED = tuple(replace(entry, when=lambda model: model.moe.num_shared_experts > 0) for entry in SHARED_EXPERTS)


def _choice_bias(module: str) -> Entry:
    name = f"{LAYER}.mlp.{module}.e_score_correction_bias"
    return Entry("moe", f"{OUR_LAYER}.mlp.gate.expert_bias_E", {name: "1 E"}, Row(), dtype=torch.float32)


_TABLE = (*_ATTENTION, *DENSE, *_SHARED)


def _range(start: int, end: int, interval: int) -> tuple[int, ...]:
    """Return the numbers of the layers with experts: the multiples of ``interval`` from ``start + 1`` to ``end + 1``.

    The numbers count from 1; ``start`` and ``end`` count from 0.
    """
    return tuple(number for number in range(start + 1, end + 2) if number % interval == 0)


def _indices(model: ModelConfig) -> tuple[int, int, int]:
    """Return the first and the last layer with experts, counted from 0, and the step between such layers.

    The step is taken from the first two such layers; 1 if there is only one.
    """
    layers = model.layers_with_experts
    return layers[0] - 1, layers[-1] - 1, layers[1] - layers[0] if len(layers) > 1 else 1


def _is_regular(model: ModelConfig) -> bool:
    layers = model.layers_with_experts
    return not layers or _range(*_indices(model)) == layers


def _write(model: ModelConfig) -> Values:
    start, end, interval = _indices(model)
    return write_llama(model) | {
        "moe_layer_start_index": start,
        "moe_layer_end_index": end,
        "moe_layer_interval": interval,
        "intermediate_size": model.dense_width,
        "moe_num_shared_experts": model.moe.num_shared_experts,
    }


def _read(config: Config) -> Values:
    def number(key: str, default: int, low: int, high: int) -> int:
        value = config.get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise UserError(f"{key}={toml(value)} must be an integer from {low} to {high}")
        return value

    layers = config["num_hidden_layers"]
    start = number("moe_layer_start_index", 1, 0, layers - 1)
    end = number("moe_layer_end_index", -1, -1, layers - 1)
    interval = number("moe_layer_interval", 1, 1, layers)
    if config["moe_k"] == 1:
        raise UserError("moe_k=1 is not supported: it must be at least 2")
    with_experts = _range(start, layers - 1 if end == -1 else end, interval)
    if not with_experts:
        raise UserError(
            f"moe_layer_start_index={start}, moe_layer_end_index={end}, moe_layer_interval={interval} leave no layer "
            "with experts"
        )
    values = {
        **read_llama(config),
        **DROPLESS,
        "moe.gate": "sigmoid",
        "moe.score": "softmax",
        "moe.num_shared_experts": number("moe_num_shared_experts", 2, 0, 1 << 16),
    }
    if len(with_experts) < layers:
        values["moe.layers"] = with_experts
        values["dense_ffn_hidden_size"] = read_int(config, "intermediate_size")
    return values


ERNIE4_5_MOE = Family(
    name="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    tables=(
        (*_TABLE, *EXPERTS, _choice_bias("moe_statics")),
        (*_TABLE, *STACKED, _choice_bias("gate.moe_statics")),
    ),
    keys=(
        *without(KEYS, "moe.top_k", "moe.balance_loss", "tie_embeddings"),
        KeyPair("moe_num_experts", "moe.num_experts", int, alias="num_experts"),
        KeyPair("moe_k", "moe.top_k", int, alias="num_experts_per_tok"),
        EXPERT_WIDTH,
        KeyPair("tie_word_embeddings", "tie_embeddings", bool, True),
        *norm_and_rope(1e-5, 5e5),
    ),
    fixed=FIXED | {"moe.score": "softmax"},
    demands=(
        *without(SIGMOID, "moe.score", "moe.gate_options"),
        Demand("moe.normalize", lambda m: m.moe.normalize is not False, "true: weights that sum to one"),
        Demand("moe.top_k", lambda m: m.moe.top_k > 1, "at least 2, whose weights sum to one"),
        Demand("moe.layers", _is_regular, "the multiples of a number in a range of layers, such as 4, 6, 8"),
    ),
    varies=("attention.head_dim", "moe.every", "moe.num_shared_experts", "moe.jitter", *YARN),
    constants={"use_bias": False, "moe_norm_min": 1e-12},
    only=(*ONLY, Only("use_bias", (False, None)), Only("moe_norm_min", (1e-12, None))),
    read=_read,
    write=_write,
)
