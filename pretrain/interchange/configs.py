"""Conversion between ``[model]`` of a recipe and config.json of a Hugging Face model."""

from collections.abc import Mapping, Sequence
from typing import Any

from fmoe.errors import UserError
from pretrain.config import ModelConfig
from pretrain.interchange.families import FAMILIES, KEYS, Family, Key, toml

# Keys of config.json, of any family, that change what a model computes, and the only values that fmoe supports.
_ONLY: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("hidden_act", ("silu", None)),
    ("attention_bias", (False, None)),
    ("mlp_bias", (False, None)),
    ("quantization_config", (None,)),
    ("partial_rotary_factor", (1, 1.0, None)),
    ("is_encoder_decoder", (False, None)),
)


def config_of(family: Family, model: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a model; ``dtype`` is torch's name of its weights' dtype."""
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "hidden_act": "silu",
        "head_dim": model.head_width,
        "attention_dropout": 0.0,
        **{key.theirs: key.of(model) for key in (*KEYS, *family.keys)},
        **family.write(model),
        **family.constants,
        "output_router_logits": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }
    # transformers 5 reads rope_parameters, 4 rope_theta.
    config["rope_scaling"] = None
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": model.rope_theta}
    return config


def model_of(config: Mapping[str, Any]) -> tuple[Family, ModelConfig]:
    """Return the family and the ``[model]`` of a config.json.

    Raises:
        UserError: a value is missing, invalid or not supported; the message names the key.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"model_type={toml(name)} is not supported: use one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    _check_only(family, config)
    config = {**config, "rope_theta": _rope_theta(config)}
    if config.get("num_key_value_heads", 0) is None:  # means num_attention_heads
        config["num_key_value_heads"] = config.get("num_attention_heads")
    config = {key: value for key, value in config.items() if value is not None}
    values = {key.ours: _value(key, config) for key in (*KEYS, *family.keys)}
    values |= family.read(config)
    head = config.get("head_dim")
    if head is not None:
        values["head_dim"] = _value(Key("head_dim", "head_dim", int), config)
    elif values["hidden_size"] % values["num_heads"]:
        raise UserError(
            f"num_attention_heads={values['num_heads']} does not divide hidden_size={values['hidden_size']}"
        )
    values = _as_default(values)
    return family, ModelConfig(
        norm="rms",
        activation="silu",
        gated=True,
        position="rope",
        gate="naive",
        capacity_factor=None,
        eval_capacity_factor=None,
        jitter=0.0,
        z_loss=0.0,
        **values,
    )


def _as_default(values: dict[str, Any]) -> dict[str, Any]:
    """Remove values that equal our keys' defaults."""
    values = dict(values)
    if values["num_query_groups"] == values["num_heads"]:
        del values["num_query_groups"]
    if values.get("head_dim") == values["hidden_size"] / values["num_heads"]:
        del values["head_dim"]
    return values


def _value(key: Key, config: Mapping[str, Any]) -> Any:
    value = config.get(key.theirs, config.get(key.other or key.theirs, key.default))
    if value is None:
        raise UserError(f"{key.theirs} is missing")
    if key.kind is float and type(value) is int:
        value = float(value)
    if type(value) is not key.kind or (isinstance(value, int) and key.kind is int and value < 1):
        raise UserError(f"{key.theirs}={toml(value)} must be {_KINDS[key.kind]}")
    return value


_KINDS = {int: "a positive integer", float: "a number", bool: "true or false"}


def _rope_theta(config: Mapping[str, Any]) -> Any:
    """Return rope_theta from its own key, or from the rope_parameters of transformers 5.

    Raises:
        UserError: positions are scaled, or only part of a head is rotated.
    """
    theta = config.get("rope_theta")
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise UserError(f"{key}={toml(rope)} must be an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        others = sorted(set(rope) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
        if kind != "default" or others:
            raise UserError(f"{key}={toml(rope)} is not supported: only rope_type=default is")
        if rope.get("partial_rotary_factor", 1) != 1:
            raise UserError(f"{key}: partial_rotary_factor={toml(rope['partial_rotary_factor'])} must be 1")
        theta = rope.get("rope_theta", theta)
    return theta


def _check_only(family: Family, config: Mapping[str, Any]) -> None:
    """Raise UserError for a setting of config.json that fmoe does not support."""
    for key, allowed in _ONLY:
        value = config.get(key)
        if not any(value == one and type(value) is type(one) for one in allowed):
            can_be = " or ".join(toml(one) for one in allowed if one is not None) or "none"
            raise UserError(f"{key}={toml(value)} is not supported: only {can_be} is")
    if family.has_window(config):
        window = toml(config.get("sliding_window"))
        raise UserError(f"sliding_window={window} is not supported: only full attention is")
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, Sequence) or any(kind != "full_attention" for kind in kinds)):
        raise UserError(f"layer_types={toml(kinds)} is not supported: only full_attention is")
