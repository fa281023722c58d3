"""YaRN (`pretrain.config.yarn`) in Megatron-core's GPT.

Megatron-core has YaRN too, but without ``rope_truncate`` in multi-latent attention, and without ``rotary_fraction`` in
standard attention. Megatron-core therefore computes only the factors that `prepare_yarn` sets. This module computes the
rest.
"""

from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from pretrain.config import ModelConfig
from pretrain.config.yarn import rotary_factor, rotary_frequencies, rotary_width


def prepare_yarn(config: TransformerConfig, model: ModelConfig) -> None:
    """Set the attributes of ``config`` from which Megatron-core computes YaRN's attention factor.

    The factor multiplies the rotated elements in standard attention, and the scores in multi-latent attention.
    """
    values: dict[str, Any]
    if model.attention.kv_lora_rank is None:  # the config has no such fields: Megatron-core looks for attributes
        values = {"yarn_rotary_scaling_factor": model.position.rope_factor, "yarn_mscale": model.position.rope_mscale}
        values |= {"yarn_mscale_all_dim": model.position.rope_mscale_all_dim}
    else:
        values = {"rope_type": "yarn", "rotary_scaling_factor": model.position.rope_factor}
        values |= {"mscale_all_dim": model.position.rope_mscale_all_dim}
    for name, value in values.items():
        setattr(config, name, value)


def scale_positions(module: nn.Module, model: ModelConfig) -> None:
    """Set YaRN's frequencies in a GPTModel's rotary positions, also in the layers of multi-token prediction."""
    shared = _LatentRotary(model)  # Megatron-core has one per layer, with equal angles
    for part in list(module.modules()):
        if isinstance(part, MultiLatentAttention):
            part.rotary_pos_emb = shared
        elif isinstance(part, RotaryEmbedding):
            part.inv_freq = rotary_frequencies(model)


class _LatentRotary(RotaryEmbedding):
    """Rotary embedding that returns angles and YaRN's factor, as Megatron-core's multi-latent attention expects."""

    def __init__(self, model: ModelConfig):
        super().__init__(rotary_width(model), rotary_percent=1.0, use_cpu_initialization=True)
        self.inv_freq = rotary_frequencies(model)
        self.factor = rotary_factor(model)

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, float]:
        return super().forward(*args, **options), self.factor
