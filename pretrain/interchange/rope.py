"""Rotary positions in config.json: ``rope_theta`` and ``rope_scaling`` in transformers 4, ``rope_parameters`` in 5."""

import math
import sys
from collections.abc import Mapping
from typing import Any

from fmoe.errors import UserError
from pretrain.config import ModelConfig
from pretrain.config.yarn import rotary_factor
from pretrain.interchange.family import Config, Values, read_bool, read_int, toml

_PLAIN = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# Numbers of YaRN: the name in config.json, our key, and transformers' value of a missing one.
_NUMBERS = (
    ("factor", "position.rope_factor", None),
    ("beta_fast", "position.rope_beta_fast", 32.0),
    ("beta_slow", "position.rope_beta_slow", 1.0),
    ("mscale", "position.rope_mscale", 1.0),
    ("mscale_all_dim", "position.rope_mscale_all_dim", 0.0),
)
_LENGTH = "original_max_position_embeddings"
_YARN = (*_PLAIN, *(theirs for theirs, _, _ in _NUMBERS), _LENGTH, "truncate", "attention_factor")
YARN = (
    "position.rope_scaling",
    "position.rope_original_length",
    "position.rope_truncate",
    *(ours for _, ours, _ in _NUMBERS),
)
"""Keys of ``[position]`` that `write_rope` and `read_yarn` convert."""


def write_rope(model: ModelConfig) -> Values:
    """Return the keys ``rope_scaling`` and ``rope_parameters`` of config.json, for rotary positions.

    The key is ``rope_scaling`` in transformers 4, and ``rope_parameters`` in transformers 5.
    """
    rope: Values = {"rope_type": "default", "rope_theta": model.position.rope_theta}
    if model.position.rope_scaling is None:
        return {"rope_scaling": None, "rope_parameters": rope}
    rope |= {theirs: model.value(ours) for theirs, ours, _ in _NUMBERS}
    rope |= {"rope_type": "yarn", _LENGTH: model.position.rope_original_length}
    if not model.position.rope_mscale_all_dim:
        del rope["mscale"], rope["mscale_all_dim"]
    if not model.position.rope_truncate:
        rope["truncate"] = False
    return {"rope_scaling": rope, "rope_parameters": dict(rope)}


def read_rope(config: Config) -> Values:
    """Return ``rope_theta`` and ``partial_rotary_factor``, each if config.json has it.

    They are read from ``rope_parameters`` or ``rope_scaling`` and, if missing there, from the top level of config.json.

    Raises:
        UserError: ``rope_parameters`` or ``rope_scaling`` is invalid or has a scaling other than YaRN, or the two
            differ.
    """
    rope = _rope(config)
    values = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            values[key] = rope[key]
        elif key in config:
            values[key] = config[key]
            if key == "partial_rotary_factor" and config[key] is None:
                values[key] = 1.0  # unlike a missing key, which has the family's default
    return values


def read_yarn(config: Config) -> Values:
    """Return the keys of the model for YaRN; {} if positions are not scaled.

    Raises:
        UserError: a value is missing, invalid, or not supported.
    """
    rope = {key: value for key, value in _rope(config).items() if value is not None}
    if _kind(rope) == "default":
        return {}
    # transformers takes null for false, unlike a missing key.
    truncate = "truncate" not in _rope(config) if rope.get("truncate") is None else read_bool(rope, "truncate", True)
    values: Values = {"position.rope_scaling": "yarn", "position.rope_truncate": truncate}
    for theirs, ours, default in _NUMBERS:
        values[ours] = _number(theirs, rope.get(theirs, default), 1 if theirs == "factor" else 0)
    # transformers uses mscale and mscale_all_dim only if both are set; others assume a default for a missing one.
    if values["position.rope_mscale_all_dim"] and "mscale" not in rope:
        raise UserError(f"mscale_all_dim={values['position.rope_mscale_all_dim']} is not supported without mscale")
    length = config.get(_LENGTH)
    if length is None:
        length = rope.get(_LENGTH, config.get("max_position_embeddings"))
    values["position.rope_original_length"] = read_int({_LENGTH: length}, _LENGTH)
    if "attention_factor" in rope:
        usual = rotary_factor(ModelConfig().with_values(values))
        if not math.isclose(_number("attention_factor", rope["attention_factor"], 0), usual, rel_tol=1e-9):
            raise UserError(f"attention_factor={toml(rope['attention_factor'])} is not supported: it must be {usual}")
    return values


def _rope(config: Config) -> Mapping[str, Any]:
    """Return ``rope_parameters`` or ``rope_scaling`` of config.json; empty if both are missing."""
    first: Mapping[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):  # transformers replaces the first by the second
        rope = config.get(key)
        if rope in (None, {}):
            continue
        if not isinstance(rope, Mapping):
            raise UserError(f"{key}={toml(rope)} must be an object")
        if _kind(rope) not in ("default", "yarn"):
            raise UserError(f"{key}={toml(rope)} is not supported: rope_type must be default or yarn")
        others = set(rope) - set(_PLAIN if _kind(rope) == "default" else _YARN)
        if others:
            raise UserError(f"{key}={toml(rope)} has the key {min(others)}, which is not supported")
        if first not in ({}, rope):
            raise UserError(f"{key}={toml(rope)} differs from rope_parameters: leave out one of them")
        first = rope
    return first


def _kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _number(key: str, value: Any, least: int) -> float:
    if value is None:
        raise UserError(f"{key} is missing: rope_type=yarn needs it")
    if type(value) not in (int, float) or not least <= value <= sys.float_info.max:
        raise UserError(f"{key}={toml(value)} must be a finite number of at least {least}")
    return float(value)
