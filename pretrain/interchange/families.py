"""The supported families of Hugging Face models, and the choice of one for a recipe."""

from fmoe.errors import UserError
from pretrain.config import ModelConfig
from pretrain.interchange.bert import MEGATRON_BERT
from pretrain.interchange.family import Family, toml
from pretrain.interchange.llama import MIXTRAL, QWEN3_MOE
from pretrain.interchange.t5 import SWITCH, T5

# In the order in which "auto" tries them.
FAMILIES = {family.name: family for family in (MIXTRAL, QWEN3_MOE, SWITCH, T5, MEGATRON_BERT)}


def family_for(model: ModelConfig, name: str = "auto") -> Family:
    """Return the family to export a model as; "auto" picks the first that fits.

    Raises:
        UserError: no family fits; the message names the nearest, and the first key that differs with its allowed
            values.
    """
    if name == "auto":
        family = min(FAMILIES.values(), key=lambda family: _distance(family, model))
    elif name in FAMILIES:
        family = FAMILIES[name]
    else:
        raise UserError(f"--format {name} is invalid: use auto, {', '.join(FAMILIES)}")
    # The keys that rank families come first.
    for key, allowed in sorted(family.misfits(model), key=lambda misfit: misfit[0] not in ("kind", "num_experts")):
        value, nearest = toml(getattr(model, key)), ", the nearest family" if name == "auto" else ""
        raise UserError(f"model.{key}={value} is not supported by {family.name}{nearest}: use {allowed}")
    return family


def _distance(family: Family, model: ModelConfig) -> tuple[bool, bool, int]:
    """Rank a family: another kind of model is farther than experts or none of them, and these than any other keys."""
    keys = [key for key, _ in family.misfits(model)]
    return "kind" in keys, "num_experts" in keys, len(keys)
