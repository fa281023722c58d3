"""Bounds of single recipe values, and checks that sections share. `Recipe.check` compares values with each other."""

import math
import os
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fmoe.errors import UserError

PATHS = ("run.folder", "data.tokenizer", "data.train", "data.validation", "train.init_from")
NOT_EMPTY = (
    "run.folder",
    "run.imports",
    "run.callbacks",
    "data.train",
    "data.validation",
    "train.init_from",
    "model.kind",
    "model.gate",
    "model.expert",
    "parallel.exchange",
    "optimizer.name",
    "tracking.project",
)
MAX_INT = 2**31 - 1
# Upper bounds on values that size a list or enter arithmetic that could overflow. Other integers are at most `MAX_INT`.
LIMITS = {
    "train.seed": 2**63 - 1,
    "train.ramp_samples": 2**53,
    "optimizer.warmup_tokens": 2**53,
    "model.num_layers": 2**16,
    "model.num_decoder_layers": 2**16,
    "model.mtp_layers": 2**8,
    "model.num_experts": 2**20,
    "model.num_shared_experts": 2**20,
    "model.sequence_length": 2**28,
    "model.memory_length": 2**28,
    "model.capacity_factor": 2.0**20,
    "model.eval_capacity_factor": 2.0**20,
    "data.noise_density": 0.99,
    "data.prefetch": 2**16,
    "guard.hang_minutes": 1e6,
    "guard.spike_window": 2**24,
    "guard.spike_history": 2**24,
}
# Keys for which infinity is meaningful: no bound. Their lower bounds refuse -inf and NaN.
MAY_BE_INFINITE = (
    "guard.spike_sigma",
    "guard.collapse_cv",
    "optimizer.clip_grad",
    "optimizer.max_trust",
    "optimizer.update_clip",
)
POSITIVE = {
    "model": (
        "num_layers",
        "num_decoder_layers",
        "moe_every",
        "hidden_size",
        "num_heads",
        "num_query_groups",
        "head_dim",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "rope_original_length",
        "ffn_hidden_size",
        "dense_ffn_hidden_size",
        "shared_ffn_hidden_size",
        "sequence_length",
        "vocab_size",
        "granularity",
        "top_k",
        "group_size",
    ),
    "parallel": (
        "tensor",
        "context",
        "pipeline",
        "virtual_pipeline",
        "expert",
        "expert_tensor",
        "data",
        "chunks",
        "max_rows",
        "node_size",
    ),
    "optimizer": ("ns_steps", "decay_steps", "base_batch", "warmup_tokens", "loss_scale_window", "hysteresis"),
    "train": (
        "steps",
        "global_batch",
        "micro_batch",
        "ramp_batch",
        "ramp_increment",
        "ramp_samples",
        "validation_every",
        "validation_sequences",
    ),
    "checkpoint": ("keep_every",),
    "tracking": ("console_every",),
    "guard": ("max_skips", "spike_history"),
}
NOT_NEGATIVE = {
    "data": ("prefetch",),
    "model": (
        *("num_experts", "num_shared_experts", "bias_step", "balance_loss", "z_loss", "init_std", "mtp_layers"),
        *("rope_mscale_all_dim", "memory_length", "segment_types"),
    ),
    "optimizer": (
        "min_lr",
        "warmup_steps",
        "weight_decay",
        "clip_grad",
        "eps",
        "beta1",
        "beta2",
        "momentum",
        "cpu_offload",
    ),
    "train": ("seed",),
    "checkpoint": ("every", "keep"),
    "parallel": ("shadow",),
    "tracking": ("trust_every", "picture_every"),
    "guard": (
        "spike_sigma",
        "spike_window",
        "collapse_window",
        "collapse_cv",
        "collapse_dead",
        "collapse_uniform",
        "hang_minutes",
    ),
}


def check_values(recipe: Any) -> None:
    """Raise UserError for the first value of a `pretrain.config.recipe.Recipe` that is out of bounds."""
    for section in fields(recipe):
        for entry in fields(config := getattr(recipe, section.name)):
            name, value = f"{section.name}.{entry.name}", getattr(config, entry.name)
            is_table = isinstance(value, Mapping)  # gates, experts, ... check the limits of their options
            for key, item in _leaves(name, value):
                if isinstance(item, float) and not math.isfinite(item) and key not in MAY_BE_INFINITE:
                    raise UserError(f"{key}={item} is not a finite number")
                if isinstance(item, int | float) and not isinstance(item, bool):
                    limit = LIMITS.get(key, MAX_INT if isinstance(item, int) and not is_table else math.inf)
                    if item > limit:
                        raise UserError(f"{key}={item} exceeds {limit}")
                if isinstance(item, str):
                    check_text(key, item)
    for part, names in POSITIVE.items():
        for name in names:
            value = getattr(getattr(recipe, part), name)
            if value is not None and value < 1:
                raise UserError(f"{part}.{name}={value} is not positive")
    for part, names in NOT_NEGATIVE.items():
        for name in names:
            value = getattr(getattr(recipe, part), name)
            if value is not None and not value >= 0:  # NaN too
                raise UserError(f"{part}.{name}={value} must be at least 0")


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (recipe key, item) for the items of a list or table, at any depth. Names in a table are items too."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield key, name
            yield from _leaves(f"{key}.{name}", item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(key, item)
    else:
        yield key, value


def divides(name: str, value: int, of_name: str, of: int) -> None:
    """Raise UserError unless ``value`` divides ``of``. The message contains ``name`` and ``of_name``."""
    if of % value:
        raise UserError(f"{name}={value} does not divide {of_name}={of}")


def check_text(key: str, text: str) -> None:
    """Check the text of a recipe key.

    Raises:
        UserError: the text has control characters (except tab and line feed), line separators or invalid UTF-8; it is
            an invalid path; or it is empty and the key is in `NOT_EMPTY`.
    """
    if any(
        unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text if character not in "\t\n"
    ):
        raise UserError(f"{key}={text!a} has control characters, line separators or invalid UTF-8: remove them")
    if not text and key in NOT_EMPTY:
        raise UserError(f"{key}='' must not be empty")
    if key in PATHS:
        check_path(key, text)


def check_path(key: str, text: str) -> None:
    """Raise UserError for a path that is too long, and for a corpus prefix without a file name, such as ``.``."""
    encoded = os.fsencode(text)
    if len(encoded) >= 4096 or any(len(part) > 255 for part in encoded.split(b"/")):
        raise UserError(f"{key}={text[:40]}... is too long: a path has at most 4095 bytes, each name in it 255")
    if key in ("data.train", "data.validation") and not Path(text).name:
        raise UserError(f"{key}={text} must be the prefix of .bin and .idx files")
