"""Conversion between ``[model]`` of a recipe and config.json of a Hugging Face model."""

import contextlib
from typing import Any

from fmoe.errors import UserError
from pretrain.config import ModelConfig
from pretrain.interchange.families import FAMILIES
from pretrain.interchange.family import Config, Family, KeyPair, Values, toml
from pretrain.interchange.rope import read_rope, read_yarn


def config_of(family: Family, model: ModelConfig, dtype: str) -> Values:
    """Return the config.json of a model; ``dtype`` names the dtype of its weights, such as "bfloat16"."""
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        **{key.theirs: key.of(model) for key in family.keys},
        **family.write(model),
        **family.constants,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }


def family_of(config: Config) -> Family:
    """Return the family of a config.json. Raises UserError if it is not supported."""
    key = "fmoe_format" if "fmoe_format" in config else "model_type"
    name = config.get(key)
    names = [each for each, family in FAMILIES.items() if key == "fmoe_format" or "model_type" not in family.constants]
    if name not in names:
        raise UserError(f"{key}={toml(name)} is not supported: it must be one of {', '.join(names)}")
    return FAMILIES[name]


def model_of(config: Config) -> tuple[Family, ModelConfig]:
    """Return the family of a config.json, and the section ``[model]`` of a recipe for the same model.

    The caller must have applied `Family.adapt` to ``config``.

    Raises:
        UserError: a value is missing, invalid or not supported; the message names the key.
    """
    family = family_of(config)
    config = {**config, **read_rope(config)}
    for only in family.only:
        value = config.get(only.theirs)
        if not any(value == allowed and type(value) is type(allowed) for allowed in only.values):
            choices = " or ".join(toml(allowed) for allowed in only.values if allowed is not None)
            raise UserError(f"{only.theirs}={toml(value)} is not supported: it must be {choices or 'null or missing'}")
    if config.get("num_key_value_heads", 0) is None:  # null means num_attention_heads
        config["num_key_value_heads"] = config.get("num_attention_heads")
    config = {key: value for key, value in config.items() if value is not None}
    values = {key.ours: _value(key, config) for key in family.keys} | read_yarn(config)
    if "position.rope_scaling" in values and "position.rope_scaling" not in family.varies:
        raise UserError(f"rope_type=yarn is not supported by {family.name}: it must be default")
    values = {**family.fixed, **values, **family.read(config)}
    if values.get("attention.num_query_groups") == values["attention.num_heads"]:  # the default of the recipe
        del values["attention.num_query_groups"]
    if values.get("attention.head_dim") == values["hidden_size"] / values["attention.num_heads"]:
        del values["attention.head_dim"]
    return family, ModelConfig().with_values(values)


def _value(key: KeyPair, config: Config) -> Any:
    value = config.get(key.theirs, config.get(key.other or key.theirs, key.default))
    if value is None:
        raise UserError(f"{key.theirs} is missing or null")
    for name in filter(None, (key.other, key.alias)):  # transformers takes the last of them
        if name in config and config[name] != value:
            raise UserError(
                f"{key.theirs}={toml(value)} and {name}={toml(config[name])} must be equal: keep only {key.theirs}"
            )
    if key.kind is float and type(value) is int:
        with contextlib.suppress(OverflowError):
            value = float(value)
    if type(value) is not key.kind or (isinstance(value, int) and key.kind is int and value < 1):
        raise UserError(f"{key.theirs}={toml(value)} must be {_KINDS[key.kind]}")
    return value


_KINDS = {int: "a positive integer", float: "a number", bool: "true or false"}
