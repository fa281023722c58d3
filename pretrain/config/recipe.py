"""A recipe: its sections, and values derived from several sections.

Every field of a section is a key of the TOML file and an option of the command line. `Recipe.check` reports invalid
values before any process group is created, in one line that names the keys.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

from fmoe.errors import UserError
from pretrain.config import counts
from pretrain.config.batches import Batches
from pretrain.config.checks import check_values, divides
from pretrain.config.model import ModelConfig
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.parallel import ParallelConfig
from pretrain.config.sections import (
    CheckpointConfig,
    DataConfig,
    GuardConfig,
    RunConfig,
    TrackingConfig,
    TrainConfig,
)
from pretrain.data.blend import whole_weights
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

    @property
    def spans(self) -> Spans:
        """Lengths of a t5's samples, in tokens."""
        return Spans.of(self.model.sequence_length, self.data.noise_density, self.data.mean_span)

    @property
    def decoder_length(self) -> int:
        """Tokens per sample in a t5's decoder; 0 for other models."""
        return self.spans.targets if self.model.kind == "t5" else 0

    @property
    def streams(self) -> int:
        """Number of contiguous streams of text that are read side by side; 0 for sequences in random order."""
        return self.train.global_batch if self.model.memory_length else 0

    @property
    def tokens_per_sequence(self) -> int:
        """Number of tokens of a sample that enter the model, in a t5's encoder and decoder together."""
        return self.model.sequence_length + self.decoder_length

    def num_params(self) -> int:
        """Return the total number of parameters."""
        return counts.num_params(self.model, self.model.num_experts, self.decoder_length)

    def num_active_params(self) -> int:
        """Return the number of parameters that a token uses, with ``model.top_k`` routed experts and all shared ones
        per layer."""
        return counts.num_params(self.model, self.model.top_k, self.decoder_length)

    def flops_per_token(self) -> float:
        """Return the floating point operations of a training step per token; see `counts.flops_per_token`."""
        return counts.flops_per_token(self.model, self.decoder_length)

    def check(self) -> None:
        """Raise UserError for the first invalid value or combination of values."""
        model, parallel, optimizer = self.model, self.parallel, self.optimizer
        check_values(self)
        model.check()
        self._check_kind()
        parallel.check(model)
        self._check_batches()
        if parallel.overlap_parameters and not (optimizer.distributed and parallel.overlap_gradients):
            raise UserError(
                "parallel.overlap_parameters=true needs optimizer.distributed=true and parallel.overlap_gradients=true"
            )
        self._check_deepep()
        optimizer.check()
        optimizer.check_precision(self.train.precision)
        if optimizer.name == "adafactor" and parallel.tensor > 1:
            raise UserError(
                f"parallel.tensor={parallel.tensor} must be 1 with optimizer.name=adafactor, which factors the second "
                "moments of whole matrices"
            )
        guard = self.guard
        if guard.spike_window and guard.spike_history > guard.spike_window:
            raise UserError(
                f"guard.spike_history={guard.spike_history} exceeds guard.spike_window={guard.spike_window}"
            )
        if not guard.collapse_dead <= 1:
            raise UserError(f"guard.collapse_dead={guard.collapse_dead} is not in [0, 1]")
        if self.warmup_steps >= self.decay_steps:
            key = "optimizer.decay_steps" if optimizer.decay_steps is not None else "train.steps"
            name, value = "optimizer.warmup_steps", str(optimizer.warmup_steps)
            if optimizer.warmup_tokens is not None:
                name, value = "optimizer.warmup_tokens", f"{optimizer.warmup_tokens} ({self.warmup_steps} steps)"
            raise UserError(f"{name}={value} must be less than {key}={self.decay_steps}: shorten the warmup")
        if model.position == "relative" and parallel.recompute == "full":
            raise UserError(
                "parallel.recompute=full is not supported with model.position=relative, whose biases all layers of a "
                "stack share: use parallel.recompute=selective"
            )
        if not self.data.train:
            raise UserError("data.train is empty: set at least one .bin/.idx prefix")

    def _check_deepep(self) -> None:
        model, parallel = self.model, self.parallel
        if parallel.exchange != "deepep" or parallel.expert == 1:
            return
        from fmoe.exchange.deepep import MOST_CHOICES, MULTIPLE  # imports torch, which reading a recipe does not need

        sent = parallel.wire or self.train.precision
        if sent != "bf16":
            raise UserError(f"parallel.exchange=deepep sends rows in bf16, not {sent}: set parallel.wire=bf16")
        if model.hidden_size % MULTIPLE:
            raise UserError(
                f"model.hidden_size={model.hidden_size} must be a multiple of {MULTIPLE} with parallel.exchange=deepep"
            )
        if model.chosen_experts > MOST_CHOICES:
            name = "model.top_k" + (" x model.granularity" if model.granularity > 1 else "")
            raise UserError(
                f"{name}={model.chosen_experts} must be at most {MOST_CHOICES} with parallel.exchange=deepep"
            )

    def _check_kind(self) -> None:
        model, data = self.model, self.data
        decoder_layers = model.num_decoder_layers
        if model.kind != "t5" and decoder_layers is not None:
            raise UserError(f"model.num_decoder_layers={decoder_layers} needs model.kind=t5, not {model.kind}")
        for key in ("document_mask", "bos"):
            if model.objective != "gpt" and getattr(data, key):
                raise UserError(f"data.{key}=true needs model.kind=gpt, not {model.kind}")
        if model.mtp_layers and data.document_mask:
            raise UserError(
                f"data.document_mask=true is not supported with model.mtp_layers={model.mtp_layers}: at the end "
                "of a document, MTP layers would predict tokens of the next one"
            )
        if model.memory_length:
            self._check_memory()
        if not data.noise_density > 0:
            raise UserError(f"data.noise_density={data.noise_density} is not positive")
        if not 1 <= data.mean_span < math.inf:
            raise UserError(f"data.mean_span={data.mean_span} must be a finite number of at least 1")
        if model.kind == "t5":
            _ = self.spans  # raises for a sequence that is too short
            if self.parallel.is_sequence_parallel:
                divides("parallel.tensor", self.parallel.tensor, "decoder tokens per sample", self.decoder_length)
        if model.kind == "bert" and model.sequence_length < 3:
            raise UserError(f"model.sequence_length={model.sequence_length} must be at least 3: CLS, text and SEP")
        if data.weights and len(data.weights) != len(data.train):
            raise UserError(
                f"data.weights has {len(data.weights)} entries, but data.train has {len(data.train)}: set one weight "
                "per corpus"
            )
        if data.weights:
            try:
                whole_weights(data.weights)
            except UserError as error:
                raise UserError(f"data.{error}") from error

    def _check_memory(self) -> None:
        data, train, key = self.data, self.train, f"model.memory_length={self.model.memory_length}"
        if data.document_mask:
            raise UserError(f"data.document_mask=true is not supported with {key}")
        if data.weights:
            raise UserError(f"data.weights={list(data.weights)} is not supported with {key}: use data.weights=[]")
        if train.ramp_batch is not None:
            raise UserError(
                f"train.ramp_batch={train.ramp_batch} is not supported with {key}: use train.ramp_batch=none"
            )
        if data.validation:
            of = f"train.validation_sequences={train.validation_sequences}"
            if train.validation_sequences % train.global_batch:
                raise UserError(f"{key} needs {of} to be a multiple of train.global_batch={train.global_batch}")

    def _check_batches(self) -> None:
        parallel, train = self.parallel, self.train
        share, name = train.micro_batch * parallel.dense_data, f"train.micro_batch x {parallel.dense_data_name}"
        keys = ["global_batch"]
        if train.check_ramp():
            keys += ["ramp_batch", "ramp_increment"]  # if these are multiples, so is every batch size in between
        if self.data.validation:
            keys.append("validation_sequences")
        for key in keys:
            sequences = getattr(train, key)
            divides(name, share, f"train.{key}", sequences)
            if parallel.model_chunks > 1 and sequences // share % parallel.pipeline:
                raise UserError(
                    f"train.{key}={sequences} is {sequences // share} micro batches per data parallel rank, which "
                    f"must be a multiple of parallel.pipeline={parallel.pipeline} with parallel.virtual_pipeline="
                    f"{parallel.virtual_pipeline}"
                )

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
