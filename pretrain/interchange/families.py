"""The supported families of Hugging Face models, and the choice of one for a recipe."""

from fmoe.errors import UserError
from pretrain.config import ModelConfig
from pretrain.interchange.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from pretrain.interchange.deepseek_moe import DEEPSEEK_MOE
from pretrain.interchange.ernie import ERNIE4_5_MOE
from pretrain.interchange.family import Family, toml
from pretrain.interchange.glm4 import GLM4_MOE
from pretrain.interchange.llama import MIXTRAL, QWEN3_MOE

# In the order in which "auto" tries them.
FAMILIES = {
    family.name: family
    for family in (MIXTRAL, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_MOE, GLM4_MOE, ERNIE4_5_MOE)
}


def family_for(model: ModelConfig, name: str = "auto") -> Family:
    """Return the family to export a model as; "auto" picks the first that fits.

    Raises:
        UserError: no family fits; the message names the nearest, and the first key that differs with its allowed
            values.
    """
    if name == "auto":
        family = min(FAMILIES.values(), key=lambda family: len(family.misfits(model)))
    elif name in FAMILIES:
        family = FAMILIES[name]
    else:
        raise UserError(f"--format {name} is invalid: use auto, {', '.join(FAMILIES)}")
    for key, allowed in family.misfits(model):
        value, nearest = toml(getattr(model, key)), ", the nearest family" if name == "auto" else ""
        raise UserError(f"model.{key}={value} is not supported by {family.name}{nearest}: use {allowed}")
    return family
