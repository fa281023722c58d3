"""The recipe's sections about data, training, checkpoints, guards, tracking and the run's folder."""

from dataclasses import dataclass
from typing import Literal

from fmoe.errors import UserError
from pretrain.config.checks import divides

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
        if self.ramp_batch is not None and self.ramp_increment is not None:
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
