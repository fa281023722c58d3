"""A recipe: its sections, and values derived from several sections.

Every field of a section is a key of the TOML file and an option of the command line. `Recipe.check` reports invalid
values before any process group is created, in one line that names the keys.
"""

import copy
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fmoe.errors import UserError
from pretrain.config import counts
from pretrain.config.batches import Batches
from pretrain.config.keys import Section
from pretrain.config.model import ModelConfig
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.parallel import ParallelConfig
from pretrain.config.rules import check_rules
from pretrain.config.sections import (
    MODEL_SECTIONS,
    SECTIONS,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    GuardConfig,
    RunConfig,
    TrackingConfig,
    TrainConfig,
    keys,
)
from pretrain.config.validation import validated
from pretrain.data.spans import Spans


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a pretraining run, by section."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    @property
    def spans(self) -> Spans:
        """Lengths of a t5's samples, in tokens."""
        return Spans.of(self.model.sequence_length, self.data.noise_density, self.data.mean_span)

    @property
    def decoder_length(self) -> int:
        """Tokens per sample in a t5's decoder; 0 for other models."""
        if self.model.kind != "t5":
            return 0
        return self.spans.targets if self.data.samples is None else self.model.sequence_length

    @property
    def streams(self) -> int:
        """Number of contiguous streams of text that are read side by side; 0 for sequences in random order."""
        return self.train.global_batch if self.model.position.memory_length else 0

    @property
    def tokens_per_sequence(self) -> int:
        """Number of tokens of a sample that enter the model, in a t5's encoder and decoder together."""
        return self.model.sequence_length + self.decoder_length

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Number of layers of each pipeline chunk, in the order of the layers."""
        chunks = self.parallel.pipeline * self.parallel.model_chunks
        if self.parallel.balance_stages:
            return counts.balanced_stages(self.model, chunks)
        return self.parallel.stage_layers or (len(self.model.stack_numbers) // chunks,) * chunks

    def num_params(self) -> int:
        """Return the total number of parameters."""
        return counts.num_params(self.model, self.model.moe.num_experts, self.decoder_length)

    def num_active_params(self) -> int:
        """Return the number of parameters that a token uses, with ``moe.top_k`` routed experts and all shared ones
        per layer."""
        return counts.num_params(self.model, self.model.moe.top_k, self.decoder_length)

    def flops_per_token(self) -> float:
        """Return the floating point operations of a training step per token; see `counts.flops_per_token`."""
        return counts.flops_per_token(self.model, self.decoder_length)

    def section(self, name: str) -> Section:
        """Return a section by its name in the TOML file."""
        section: Section = getattr(self.model if name in MODEL_SECTIONS else self, name)
        return section

    def values(self) -> dict[str, dict[str, Any]]:
        """Return the values of all keys, by section and key as in the TOML file."""
        values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for name in keys():
            section, _, key = name.partition(".")
            values[section][key] = copy.deepcopy(getattr(self.section(section), key))
        return values

    def value(self, name: str) -> Any:
        """Return the value of a key such as ``moe.top_k``, or of a property of a section."""
        section, _, key = name.partition(".")
        return getattr(self.section(section), key)

    def default(self, name: str) -> Any:
        """Return the default of a key; False for a property of a section."""
        return keys()[name].default if name in keys() else False

    def check(self) -> None:
        """Raise UserError for the first invalid value or combination of values."""
        validated(self.values())
        check_rules(self)

    @cached_property
    def batches(self) -> Batches:
        """Global batch of every step."""
        train = self.train
        if train.ramp_batch is None or train.ramp_increment is None or train.ramp_samples is None:
            return Batches(train.global_batch, train.global_batch, 1, 0)
        return Batches(train.global_batch, train.ramp_batch, train.ramp_increment, train.ramp_samples)

    @property
    def max_lr(self) -> float:
        """Peak learning rate of this run, scaled to its batch."""
        return self.optimizer.lr * self.optimizer.lr_factor(self.train.global_batch)

    @property
    def min_lr(self) -> float:
        """Learning rate after the decay, scaled to the run's batch."""
        return self.optimizer.min_lr * self.optimizer.lr_factor(self.train.global_batch)

    @property
    def warmup_steps(self) -> int:
        """Number of warmup steps, computed from ``optimizer.warmup_tokens`` if that is set."""
        if self.optimizer.warmup_tokens is None:
            return self.optimizer.warmup_steps
        return self.batches.steps_of(math.ceil(self.optimizer.warmup_tokens / self.tokens_per_sequence))

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate decay ends."""
        return self.train.steps if self.optimizer.decay_steps is None else self.optimizer.decay_steps

    def check_world_size(self, world_size: int) -> None:
        """Raise UserError unless ``[parallel]`` needs exactly ``world_size`` ranks."""
        parallel = self.parallel
        if world_size != parallel.world_size:
            raise UserError(
                f"world size {world_size} is not {parallel.world_size}, the product {parallel.world_size_name}: start "
                f"{parallel.world_size} ranks in all, over all nodes (docs/launch.md), or change [parallel]"
            )
