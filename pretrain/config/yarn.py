"""Rotary positions, and their scaling by YaRN (arXiv 2309.00071) for sequences longer than in earlier training.

Attention sees the distance n of two tokens as the angles n f, with a frequency f per pair of elements. YaRN keeps f for
pairs that turn often within the original length, and divides it by ``rope_factor`` for pairs that turn seldom. In
between, it mixes the two. It also multiplies the rotated elements by a factor, which sharpens attention over more
tokens.
"""

import math

import torch
from torch import Tensor

from pretrain.config.model import ModelConfig


def rotary_width(model: ModelConfig) -> int:
    """Return the number of elements of a head that are rotated by position."""
    return model.qk_rope_head_dim or int(model.head_width * model.rotary_fraction)


def rotary_frequencies(model: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """Return the angle per position, in radians, of each pair of elements: float32 [rotary_width / 2]."""
    width = rotary_width(model)
    base = model.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    if model.rope_scaling is None:
        return 1.0 / base
    low, high = _mixed_pairs(model)
    pair = torch.arange(width // 2, dtype=torch.float32, device=device)
    kept = 1 - ((pair - low) / (high - low)).clamp(0, 1)
    return 1.0 / (model.rope_factor * base) * (1 - kept) + 1.0 / base * kept  # rounds like Hugging Face's


def rotary_factor(model: ModelConfig) -> float:
    """Return the factor by which rotated queries and keys are multiplied."""
    return _m(model.rope_factor, model.rope_mscale) / _m(model.rope_factor, model.rope_mscale_all_dim)


def score_factor(model: ModelConfig) -> float:
    """Return the factor by which YaRN multiplies the scores of multi-latent attention; 1 for other attention.

    Source: DeepSeek-V2, arXiv 2405.04434.
    """
    return 1.0 if model.kv_lora_rank is None else _m(model.rope_factor, model.rope_mscale_all_dim) ** 2


def _mixed_pairs(model: ModelConfig) -> tuple[float, float]:
    """Return the range of pairs of elements whose frequencies YaRN divides in part, as indices (low, high).

    Up to ``low``, frequencies are kept. From ``high`` on, they are divided by ``rope_factor``.
    """
    assert model.rope_original_length is not None
    width, length, base = rotary_width(model), model.rope_original_length, 2 * math.log(model.rope_theta)
    low, high = (
        width * math.log(length / (turns * 2 * math.pi)) / base
        for turns in (model.rope_beta_fast, model.rope_beta_slow)
    )
    if model.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    return low, high + 0.001 if low == high else high


def _m(factor: float, scale: float) -> float:
    """Return 0.1 * scale * ln(factor) + 1."""
    return 0.1 * scale * math.log(factor) + 1.0  # YaRN's factor (section 3.4) for scale=1
