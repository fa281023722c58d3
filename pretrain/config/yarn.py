"""Rotary positions, and their scaling by YaRN (arXiv 2309.00071) for sequences longer than in earlier training.

Attention sees the distance n of two tokens as the angles n f, with a frequency f per pair of elements. YaRN keeps f for
pairs that turn often within the original length, and divides it by ``rope_factor`` for pairs that turn seldom. In
between, it mixes the two. It also multiplies the rotated elements by a factor, which sharpens attention over more
tokens.
"""

import math

import torch
from torch import Tensor

from pretrain.config.model import ModelConfig, PositionConfig


def rotary_width(model: ModelConfig) -> int:
    """Return the number of elements of a head that are rotated by position."""
    return model.attention.qk_rope_head_dim or int(model.head_width * model.position.rotary_fraction)


def rotary_frequencies(model: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """Return the angle per position, in radians, of each pair of elements: float32 [rotary_width / 2]."""
    width = rotary_width(model)
    position = model.position
    base = position.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    if position.rope_scaling is None:
        return 1.0 / base
    low, high = _mixed_pairs(width, position)
    pair = torch.arange(width // 2, dtype=torch.float32, device=device)
    kept = 1 - ((pair - low) / (high - low)).clamp(0, 1)
    return 1.0 / (position.rope_factor * base) * (1 - kept) + 1.0 / base * kept  # rounds like Hugging Face's


def rotary_factor(model: ModelConfig) -> float:
    """Return the factor by which rotated queries and keys are multiplied."""
    position = model.position
    return _m(position.rope_factor, position.rope_mscale) / _m(position.rope_factor, position.rope_mscale_all_dim)


def score_factor(model: ModelConfig) -> float:
    """Return the factor by which YaRN multiplies the scores of multi-latent attention; 1 for other attention.

    Source: DeepSeek-V2, arXiv 2405.04434.
    """
    if model.attention.kv_lora_rank is None:
        return 1.0
    return _m(model.position.rope_factor, model.position.rope_mscale_all_dim) ** 2


def _mixed_pairs(width: int, position: PositionConfig) -> tuple[float, float]:
    """Return the range of pairs of elements whose frequencies YaRN divides in part, as indices (low, high).

    Up to ``low``, frequencies are kept. From ``high`` on, they are divided by ``rope_factor``.
    """
    length = position.rope_original_length
    base = 2 * math.log(position.rope_theta)
    assert length is not None
    low, high = (
        width * math.log(length / (turns * 2 * math.pi)) / base
        for turns in (position.rope_beta_fast, position.rope_beta_slow)
    )
    if position.rope_truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, width - 1)
    return low, high + 0.001 if low == high else high


def _m(factor: float, scale: float) -> float:
    """Return 0.1 * scale * ln(factor) + 1."""
    return 0.1 * scale * math.log(factor) + 1.0  # YaRN's factor (section 3.4) for scale=1
