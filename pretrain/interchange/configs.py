"""config.json of a model, and the model of a config.json."""

from collections.abc import Mapping, Sequence
from typing import Any

from fmoe.errors import UserError
from pretrain.config import ModelConfig
from pretrain.interchange.families import FAMILIES, KEYS, Family, Key, told

# Keys of config.json, of any family, that change what a model computes, and the only values that ours has.
_ONLY: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("hidden_act", ("silu", None)),
    ("attention_bias", (False, None)),
    ("mlp_bias", (False, None)),
    ("quantization_config", (None,)),
    ("partial_rotary_factor", (1, 1.0, None)),
    ("is_encoder_decoder", (False, None)),
)


def config_of(family: Family, model: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json of a model; ``dtype`` is torch's name for that of its weights."""
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
    # transformers 5 takes the second, 4 the key of its own.
    config["rope_scaling"] = None
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": model.rope_theta}
    return config


def model_of(config: Mapping[str, Any]) -> tuple[Family, ModelConfig]:
    """The family and the ``[model]`` of a config.json.

    Raises:
        UserError: names the key.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"model_type={told(name)} is none of those that can be imported: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    _check_only(family, config)
    config = {**config, "rope_theta": _rope_theta(config)}
    if config.get("num_key_value_heads", 0) is None:  # as many as there are others
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
    """Without values that our keys have anyway when left open."""
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
        raise UserError(f"{key.theirs}={told(value)} is not {_KINDS[key.kind]}")
    return value


_KINDS = {int: "a positive whole number", float: "a number", bool: "true or false"}


def _rope_theta(config: Mapping[str, Any]) -> Any:
    """Of either form: a key of its own, or among the rope_parameters of transformers 5.

    Raises:
        UserError: positions are scaled, or only a part of a head turns.
    """
    theta = config.get("rope_theta")
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise UserError(f"{key}={told(rope)} is no object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        others = sorted(set(rope) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
        if kind != "default" or others:
            raise UserError(f"{key}={told(rope)}: positions that are not scaled (rope_type=default) can be imported")
        if rope.get("partial_rotary_factor", 1) != 1:
            raise UserError(f"{key} has partial_rotary_factor={told(rope['partial_rotary_factor'])}: only 1 can be")
        theta = rope.get("rope_theta", theta)
    return theta


def _check_only(family: Family, config: Mapping[str, Any]) -> None:
    """Raises UserError where the model computes what ours does not."""
    for key, allowed in _ONLY:
        value = config.get(key)
        if not any(value == one and type(value) is type(one) for one in allowed):
            can_be = " or ".join(told(one) for one in allowed if one is not None) or "none"
            raise UserError(f"{key}={told(value)}: only {can_be} can be imported")
    if family.has_window(config):
        window = told(config.get("sliding_window"))
        raise UserError(f"sliding_window={window}: only attention to all tokens before can be imported")
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, Sequence) or any(kind != "full_attention" for kind in kinds)):
        raise UserError(f"layer_types={told(kinds)}: only full_attention can be imported")
