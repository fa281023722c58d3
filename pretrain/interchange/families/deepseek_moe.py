"""DeepSeekMoE (arXiv 2401.06066): shared experts, combine weights from a softmax over all experts, standard attention.

transformers has no class for it, so an export is a Qwen2-MoE with the same logits:

* Qwen2-MoE multiplies the output of the shared experts by the sigmoid of a projection of the token. The exported
  projection is zero, so its sigmoid is 1/2, and the output matrix of the shared experts is doubled. Products with
  powers of two are exact.
* Queries, keys and values get biases of zeros. vLLM's Qwen2-MoE always adds biases, even if ``qkv_bias`` is false.

Import recognizes such an export by ``fmoe_format`` in config.json.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from fmoe.errors import UserError
from pretrain.config import ModelConfig
from pretrain.interchange.families.llama import (
    ATTENTION,
    COMMON,
    DENSE,
    EXPERTS,
    FIXED,
    LAYER,
    QWEN3_MOE,
    SHARED,
    STACKED,
    shared_entries,
)
from pretrain.interchange.family import Config, Only, Values
from pretrain.interchange.tensors import Entry, Sizes


class Twice:
    """Transform that multiplies a matrix by two on export, and divides it by two on import."""

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        doubled = ours * 2
        if not doubled.isfinite().all():
            raise UserError(
                f"an output matrix of the shared experts exceeds half of {ours.dtype}'s maximum, and the export "
                "doubles it"
            )
        return (doubled,)

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return theirs[0] / 2


_NO_BIASES = {f"{ATTENTION}.q_proj.bias": "Qd", f"{ATTENTION}.k_proj.bias": "Gd", f"{ATTENTION}.v_proj.bias": "Gd"}
_TABLE = (
    *COMMON,
    Entry("layer", "", _NO_BIASES),
    *DENSE,
    *shared_entries("shared_expert", Twice()),
    Entry("moe", "", {f"{LAYER}.mlp.shared_expert_gate.weight": "1 D"}),
)


def _write(model: ModelConfig) -> Values:
    width = model.moe.num_shared_experts * model.ffn_hidden_size
    return QWEN3_MOE.write(model) | {"shared_expert_intermediate_size": width}


def _read(config: Config) -> Values:
    width = config.get("shared_expert_intermediate_size")
    expert = config["moe_intermediate_size"]
    if type(width) is not int or width < 1 or width % expert:
        raise UserError(
            f"shared_expert_intermediate_size={width!r} must be a positive multiple of moe_intermediate_size={expert}"
        )
    return QWEN3_MOE.read(config) | {"moe.num_shared_experts": width // expert}


DEEPSEEK_MOE = replace(
    QWEN3_MOE,
    name="deepseek_moe",
    architecture="Qwen2MoeForCausalLM",
    tables=((*_TABLE, *EXPERTS), (*_TABLE, *STACKED)),
    fixed=FIXED,
    demands=(*QWEN3_MOE.demands, SHARED),
    constants={
        "model_type": "qwen2_moe",
        "fmoe_format": "deepseek_moe",
        "qkv_bias": True,
        "use_sliding_window": False,
        "sliding_window": None,
    },
    only=(*QWEN3_MOE.only, Only("qkv_bias", (True,))),
    read=_read,
    write=_write,
)
