"""Checks of single values by pydantic, and the one-line message of its first error."""

import difflib
import functools
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from fmoe.errors import UserError
from pretrain.config.keys import Key
from pretrain.config.renamed import RENAMED
from pretrain.config.sections import SECTIONS, keys

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_PROBLEMS = {
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "string_type": "must be a string",
    "string_unicode": "has invalid UTF-8: remove it",
    "tuple_type": "must be a list",
    "finite_number": "must be finite",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}
_DEVICE = (
    "a run uses the GPUs that torch finds, one for each rank, or else the CPU: set the environment variable "
    "CUDA_VISIBLE_DEVICES, which is empty for the CPU"
)
_NOT_KEYS = dict.fromkeys(("device", "devices", "accelerator", "gpu", "gpus", "num_gpus", "cpu", "cuda"), _DEVICE)
_NOT_KEYS |= dict.fromkeys(
    ("backend", "kernel", "kernels"), f"{_DEVICE}; moe.expert_options.backend sets the experts' kernels"
)


def validated(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the values of some keys, by section and key, in the types of the sections' fields.

    Lists become tuples, and the string "none" becomes None where a key accepts it.

    Raises:
        UserError: an unknown key; or a value of the wrong type or out of bounds.
    """
    from pydantic import ValidationError

    prepared = {
        section: {name: _prepared(keys().get(f"{section}.{name}"), value) for name, value in of_section.items()}
        if isinstance(of_section, Mapping)
        else of_section
        for section, of_section in values.items()
    }
    try:
        valid: dict[str, dict[str, Any]] = _adapter().validate_python(prepared)
    except ValidationError as error:
        raise UserError(_message(error.errors(include_url=False)[0])) from error
    return valid


def _prepared(key: Key | None, value: Any) -> Any:
    if key is None:
        return value
    if key.is_optional and value in ("none", "None"):
        return None
    return tuple(value) if key.is_list and isinstance(value, list) else value


@functools.cache
def _adapter() -> "TypeAdapter[Any]":
    """Return the validator of recipes. It takes dictionaries, so that a section's class can have invalid values."""
    from pydantic import TypeAdapter
    from typing_extensions import TypedDict

    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, key in keys().items():
        section, _, field = name.partition(".")
        sections[section][field] = key.annotation
    make: Any = TypedDict
    kinds = {name: make(name, annotations, total=False) for name, annotations in sections.items()}
    recipe = make("recipe", kinds, total=False)
    for kind in (recipe, *kinds.values()):
        kind.__pydantic_config__ = {"strict": True, "extra": "forbid", "allow_inf_nan": False}
    return TypeAdapter(recipe)


def _message(error: Mapping[str, Any]) -> str:
    name = ".".join(part for part in error["loc"] if isinstance(part, str))
    value = error["input"]
    context = error.get("ctx", {})
    if error["type"] == "extra_forbidden":
        return unknown_key(name, keys() if "." in name else SECTIONS)
    if error["type"] == "value_error":
        return f"{name}{context['error']}"
    text = repr(value)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    if name in SECTIONS:
        return f"{name}={text} must be a section (a TOML table)"
    key = keys()[name]
    if error["type"] == "literal_error":
        problem = f"must be one of {', '.join(map(str, key.choices))}"
    elif key.kind is Mapping:
        problem = f"must be a table: in TOML {{name = value}}, as arguments --{name.replace('_', '-')}.name value"
    else:
        problem = limit_of(error)
    return f"{name}={text} {problem}{' or none' if key.is_optional else ''}"


def limit_of(error: Mapping[str, Any]) -> str:
    """Return what an error of pydantic requires of the value: "must be at least 1"."""
    limits = {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in error.get("ctx", {}).items()}
    return _PROBLEMS.get(error["type"], error["msg"]).format(**limits)


def instead_of_key(name: str) -> str | None:
    """Return what to do instead of setting a key that recipes of other programs have, such as ``device``."""
    return _NOT_KEYS.get(name.rpartition(".")[2].lstrip("-").replace("-", "_"))


def unknown_key(name: str, similar: Collection[str]) -> str:
    """Return the message for an unknown key or section, with the nearest of the names in ``similar``."""
    old = ".".join(name.replace(".no_", ".").split(".")[:2])
    if old in RENAMED:
        return f"{old} is now {RENAMED[old]}"
    instead = instead_of_key(name)
    if instead:
        return f"unknown key {name}; {instead}"
    last = name.rpartition(".")[2]
    near = difflib.get_close_matches(name, similar, n=3, cutoff=0.7)
    near = near or [key for key in keys() if key.rpartition(".")[2] == last]
    if near:
        others = f" Or {', '.join(near[1:3])}?" if near[1:] else ""
        return f"unknown key {name}; did you mean {near[0]}?{others}"
    return f"unknown key {name}; the sections are {', '.join(SECTIONS)}: fmoe train RECIPE --help lists their keys"
