"""Names of recipe keys before version 0.1.0, such as those of ``[model]`` that other sections have today."""

from collections.abc import Mapping
from typing import Any

from pretrain.config.sections import MODEL_SECTIONS, keys

_OTHER_NAMES = {
    "attention.output_bias": "attention_output_bias",
    "attention.sinks": "attention_sinks",
    "attention.scale": "attention_scale",
    "position.encoding": "position",
    "moe.layers": "moe_layers",
    "moe.every": "moe_every",
}
RENAMED = {
    f"model.{_OTHER_NAMES.get(name, key.name)}": name
    for name, key in keys().items()
    if name.partition(".")[0] in MODEL_SECTIONS
} | {"optimizer.distributed": "parallel.shard"}
"""New name of a key by its old one. Recipes of runs and checkpoints of before load through this table."""


def with_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a stored recipe with today's names.

    In the section ``model``, keys of other sections may also have the names of `ModelConfig.values`, such as
    ``moe.top_k``.
    """
    renamed = {name: dict(section) if isinstance(section, Mapping) else section for name, section in values.items()}
    for old_section in ("model", "optimizer"):
        keys_of_section = renamed.get(old_section)
        if not isinstance(keys_of_section, dict):
            continue
        for key in list(keys_of_section):
            old = f"{old_section}.{key}"
            name = RENAMED.get(old, key)
            section, _, new = name.rpartition(".")
            if section:
                value = keys_of_section.pop(key)
                if old == "optimizer.distributed":
                    value = "optimizer" if value else "none"
                renamed.setdefault(section, {})[new] = value
    return renamed
