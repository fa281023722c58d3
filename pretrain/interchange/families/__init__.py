"""The supported families of Hugging Face models, and the choice of one for a recipe."""

from fmoe.errors import UserError
from pretrain.config import ModelConfig
from pretrain.config.model import full_name
from pretrain.interchange.families.bert import MEGATRON_BERT
from pretrain.interchange.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from pretrain.interchange.families.deepseek_moe import DEEPSEEK_MOE
from pretrain.interchange.families.ernie import ERNIE4_5_MOE
from pretrain.interchange.families.glm4 import GLM4_MOE
from pretrain.interchange.families.gpt_oss import GPT_OSS
from pretrain.interchange.families.granite import GRANITE_MOE
from pretrain.interchange.families.llama import MIXTRAL, QWEN3_MOE
from pretrain.interchange.families.olmoe import OLMOE
from pretrain.interchange.families.own import FMOE
from pretrain.interchange.families.phimoe import PHIMOE
from pretrain.interchange.families.qwen2 import QWEN2_MOE
from pretrain.interchange.families.t5 import SWITCH, T5
from pretrain.interchange.family import Family, toml

_TRANSFORMERS = (
    MIXTRAL,
    QWEN3_MOE,
    QWEN2_MOE,
    OLMOE,
    GRANITE_MOE,
    PHIMOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_MOE,
    GLM4_MOE,
    ERNIE4_5_MOE,
    GPT_OSS,
    SWITCH,
    T5,
    MEGATRON_BERT,
)
# In the order in which "auto" tries them; the last one is for models that transformers does not have.
FAMILIES = {family.name: family for family in (*_TRANSFORMERS, FMOE)}


def family_for(model: ModelConfig, name: str = "auto") -> Family:
    """Return the family in whose format a model is exported.

    Args:
        name: a key of `FAMILIES`, or "auto" for the first family of transformers that supports the model and, if there
            is none, `FMOE`.

    Raises:
        UserError: ``name`` is unknown, or the family does not support the model. The message names a key of the model
            and its allowed values.
    """
    if name == "auto":
        family = _nearest(model)
        # `FMOE` takes most GPTs; if it does not take this one, its reason is the one to name.
        family = FMOE if family.misfits(model) and model.kind == "gpt" else family
    elif name in FAMILIES:
        family = FAMILIES[name]
    else:
        raise UserError(f"--format {name} is invalid: use auto, {', '.join(FAMILIES)}")
    misfit = _misfit(family, model, is_nearest=name == "auto")
    if misfit:
        raise UserError(misfit)
    return family


def why_own(model: ModelConfig) -> str:
    """Return the reason why no family of transformers supports a model; empty if one does."""
    return _misfit(_nearest(model), model, is_nearest=True)


def _nearest(model: ModelConfig) -> Family:
    """Return the family of transformers with the fewest unsupported keys; ``kind`` and ``num_experts`` count most."""

    def distance(family: Family) -> tuple[bool, bool, int]:
        keys = [key for key, _ in family.misfits(model)]
        return "kind" in keys, "moe.num_experts" in keys, len(keys)

    return min(_TRANSFORMERS, key=distance)


def _misfit(family: Family, model: ModelConfig, is_nearest: bool) -> str:
    misfits = sorted(family.misfits(model), key=lambda misfit: misfit[0] not in ("kind", "moe.num_experts"))
    if not misfits:
        return ""
    key, allowed = misfits[0]
    nearest = ", the nearest family" if is_nearest else ""
    return f"{full_name(key)}={toml(model.value(key))} is not supported by {family.name}{nearest}: use {allowed}"
