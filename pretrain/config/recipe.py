"""The sections of a recipe. Every field is a key of the TOML file and an option of the command line.

`Recipe.check` says, before any process group is made, what cannot be, in one line that names the keys.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from fmoe.errors import UserError
from pretrain.config import counts
from pretrain.config.batches import Batches
from pretrain.config.bounds import check_values
from pretrain.config.kinds import check_kind
from pretrain.config.model import ModelConfig
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.parallel import ParallelConfig, divides
from pretrain.data.spans import Spans

MAX_RAMP = 100_000  # batch sizes, which are counted in lists


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read. Paths are relative to the current folder."""

    tokenizer: str = "data/pylib/out/tokenizer.model"
    """A sentencepiece model, or a tokenizer.json of Hugging Face tokenizers (fmoe data tokenizer)."""
    train: tuple[str, ...] = ("data/pylib/out/train",)
    """Prefixes of .bin/.idx pairs (fmoe data prepare)."""
    weights: tuple[float, ...] = ()
    """Shares of `train`'s corpora in the samples, in any unit; empty to read them as one, a document as likely as
    another."""
    validation: tuple[str, ...] = ("data/pylib/out/validation",)
    """The same, for validation, read as one; empty for none."""
    document_mask: bool = False
    """gpt: attention and loss do not go beyond the end of a document, and positions begin anew after it."""
    noise_density: float = 0.15
    """Share of the tokens that a t5 or a bert has to find."""
    mean_span: float = 3.0
    """Mean length of a t5's spans, in tokens."""
    prefetch: int = 2
    """Steps whose batches a thread builds ahead; 0 builds them within the step."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Steps, batches, precision."""

    steps: int = 300
    """Optimizer steps."""
    global_batch: int = 16
    """Sequences of a step, over all processes."""
    ramp_batch: int | None = None
    """Sequences of the first step, from which the batch grows to global_batch; None for no ramp."""
    ramp_increment: int | None = None
    """Sequences that it grows by, each time."""
    ramp_samples: int | None = None
    """Sequences over which it grows, by even shares of them."""
    micro_batch: int = 8
    """Sequences of one forward pass of one process; the rest is accumulated."""
    seed: int = 1234
    """Of weights, data order and noise."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the model; masters and router are fp32 in any case. fp16 scales the loss (optimizer.loss_scale)."""
    validation_every: int = 50
    """Steps between validations; one more is made at the end."""
    validation_sequences: int = 64
    """Sequences of a validation, the same every time."""
    init_from: str | None = None
    """A checkpoint, or a run, whose weights alone this run begins with: a warm start. --resume takes everything."""

    def check_ramp(self) -> bool:
        """Whether the batch grows; raises UserError where it cannot grow so."""
        keys = ("ramp_batch", "ramp_increment", "ramp_samples")
        given = [key for key in keys if getattr(self, key) is not None]
        if given and (missing := [key for key in keys if key not in given]):
            raise UserError(f"train.{given[0]}={getattr(self, given[0])} needs train.{missing[0]} beside it")
        if given:
            if self.ramp_batch >= self.global_batch:
                raise UserError(
                    f"train.ramp_batch={self.ramp_batch} is not less than train.global_batch={self.global_batch}"
                )
            growth = self.global_batch - self.ramp_batch
            divides("train.ramp_increment", self.ramp_increment, "train.global_batch - train.ramp_batch", growth)
            if growth // self.ramp_increment > MAX_RAMP:
                raise UserError(
                    f"train.ramp_increment={self.ramp_increment} makes {growth // self.ramp_increment} batch sizes, "
                    f"more than {MAX_RAMP}"
                )
        return bool(given)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept."""

    every: int = 100
    """Steps between checkpoints; one more is written at the end; 0 for none at all."""
    keep: int = 2
    """Newest checkpoints that are kept; 0 for all."""
    keep_every: int | None = None
    """Checkpoints of steps that it divides are kept as well; None for no more than `keep`."""
    asynchronous: bool = True
    """Write while training goes on; takes as much host memory again as the state of a process."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What watches over a run (docs/operations.md)."""

    nonfinite: Literal["stop", "skip"] = "stop"
    """What a NaN or an infinity in loss or gradient of any process does: end the run, or skip the step."""
    max_skips: int = 10
    """Steps skipped in a row, for whatever reason; one more ends the run."""
    spike_sigma: float = 10.0
    """Skip a step whose loss or gradient norm lies so many standard deviations above the median; 0 for never."""
    spike_window: int = 128
    """Steps that the median is taken over; 0 for no such skips."""
    spike_history: int = 64
    """Steps of the window before the first skip."""
    collapse_window: int = 100
    """Steps over which experts' load is summed to tell a collapsed router; 0 for no warning."""
    collapse_cv: float = 1.5
    """Highest coefficient of variation of a layer's load; all tokens in one of E experts is sqrt(E - 1)."""
    collapse_dead: float = 0.25
    """Highest share of a layer's experts that got no token in the window."""
    hang_minutes: float = 8.0
    """Minutes without progress after which all processes write their stacks and end; 0 for never."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where figures go, beside metrics.jsonl."""

    wandb: bool = True
    """Weights & Biases; offline where no key is set."""
    tensorboard: bool = False
    """TensorBoard event files."""
    trackio: bool = False
    """trackio, in a database of the run's folder; TRACKIO_DIR names another for several runs."""
    console_every: int = 10
    """Steps between lines on a console that is no terminal."""
    trust_every: int = 10
    """Steps between summaries of lamb's and lars' trust ratios; 0 for none."""
    picture_every: int = 100
    """Steps between pictures of the experts' load in wandb, TensorBoard and trackio; 0 for none."""
    project: str = "fmoe"
    """Name of the project in wandb and trackio."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The folder of the run."""

    folder: str = "runs/default"
    """Everything that the run writes is below it."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A pretraining run."""

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
        """Lengths of a t5's samples."""
        return Spans.of(self.model.sequence_length, self.data.noise_density, self.data.mean_span)

    @property
    def decoder_length(self) -> int:
        """Tokens of a sequence in a t5's decoder; 0 for a model without one."""
        return self.spans.targets if self.model.kind == "t5" else 0

    @property
    def tokens_per_sequence(self) -> int:
        """Tokens that a sample is worth: those that go into the model."""
        return self.model.sequence_length + self.decoder_length

    def num_params(self) -> int:
        """Parameters in all."""
        return counts.num_params(self.model, self.model.num_experts, self.decoder_length)

    def num_active_params(self) -> int:
        """Parameters that a token meets: those of K experts instead of all."""
        return counts.num_params(self.model, self.model.top_k, self.decoder_length)

    def flops_per_token(self) -> float:
        """See `counts.flops_per_token`."""
        return counts.flops_per_token(self.model, self.decoder_length)

    def check(self) -> None:
        """Raises UserError for the first value that cannot be, alone or with another."""
        model, parallel, optimizer = self.model, self.parallel, self.optimizer
        check_values(self)
        model.check()
        check_kind(self)
        parallel.check(model)
        if model.kind == "t5" and parallel.is_sequence_parallel:
            divides("parallel.tensor", parallel.tensor, "the decoder's sequence length", self.decoder_length)
        self._check_batches()
        if parallel.overlap_parameters and not (optimizer.distributed and parallel.overlap_gradients):
            raise UserError(
                "parallel.overlap_parameters=true is for optimizer.distributed=true and parallel.overlap_gradients=true"
            )
        optimizer.check()
        optimizer.check_precision(self.train.precision)
        if optimizer.name == "adafactor" and parallel.tensor > 1:
            raise UserError(
                "optimizer.name=adafactor factors the second moments of whole matrices, which "
                f"parallel.tensor={parallel.tensor} cuts: use 1"
            )
        guard = self.guard
        if guard.spike_window and guard.spike_history > guard.spike_window:
            raise UserError(
                f"guard.spike_history={guard.spike_history} is more than guard.spike_window={guard.spike_window}"
            )
        if not guard.collapse_dead <= 1:
            raise UserError(f"guard.collapse_dead={guard.collapse_dead} is not in [0, 1]")
        if self.warmup_steps >= self.decay_steps:
            key = "optimizer.decay_steps" if optimizer.decay_steps is not None else "train.steps"
            name, value = "optimizer.warmup_steps", optimizer.warmup_steps
            if optimizer.warmup_tokens is not None:
                name, value = "optimizer.warmup_tokens", f"{optimizer.warmup_tokens}, {self.warmup_steps} steps,"
            raise UserError(f"{name}={value} is not less than {key}={self.decay_steps}: give a shorter warmup too")
        if not self.data.train:
            raise UserError("data.train is empty: name at least one .bin/.idx prefix")

    def _check_batches(self) -> None:
        parallel, train = self.parallel, self.train
        share, name = train.micro_batch * parallel.dense_data, f"train.micro_batch x {parallel.dense_data_name}"
        keys = ["global_batch"]
        if train.check_ramp():
            keys += ["ramp_batch", "ramp_increment"]  # and so every batch between
        if self.data.validation:
            keys.append("validation_sequences")
        for key in keys:
            sequences = getattr(train, key)
            divides(name, share, f"train.{key}", sequences)
            if parallel.model_chunks > 1 and sequences // share % parallel.pipeline:
                raise UserError(
                    f"train.{key}={sequences} is {sequences // share} micro batches a process, which "
                    f"parallel.pipeline={parallel.pipeline} has to divide with parallel.virtual_pipeline="
                    f"{parallel.virtual_pipeline}"
                )

    @cached_property
    def batches(self) -> Batches:
        """The samples of every step."""
        train = self.train
        if train.ramp_batch is None:
            return Batches(train.global_batch, train.global_batch, 1, 0)
        return Batches(train.global_batch, train.ramp_batch, train.ramp_increment, train.ramp_samples)

    @property
    def max_lr(self) -> float:
        """Highest learning rate of this run, at its batch."""
        return self.optimizer.lr * self.optimizer.lr_factor(self.train.global_batch)

    @property
    def min_lr(self) -> float:
        """The same at the end of the decay."""
        return self.optimizer.min_lr * self.optimizer.lr_factor(self.train.global_batch)

    @property
    def warmup_steps(self) -> int:
        """Steps of the warmup, which may be given in tokens."""
        if self.optimizer.warmup_tokens is None:
            return self.optimizer.warmup_steps
        return self.batches.steps_of(math.ceil(self.optimizer.warmup_tokens / self.tokens_per_sequence))

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate has decayed."""
        return self.train.steps if self.optimizer.decay_steps is None else self.optimizer.decay_steps

    def check_world_size(self, world_size: int) -> None:
        """Raises UserError if so many processes are not what the splits multiply to."""
        parallel = self.parallel
        if world_size != parallel.world_size:
            raise UserError(
                f"world size {world_size} is not the product {parallel.world_size_name} = {parallel.world_size}: start "
                f"as many processes (fmoe train does, or torchrun --nproc_per_node {parallel.world_size}), or change "
                "the splits"
            )
