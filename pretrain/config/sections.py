"""The recipe's sections about data, training, checkpoints, guards, tracking and the run's folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fmoe.errors import UserError
from pretrain.config.checks import divides

MAX_RAMP = 100_000  # upper bound on the batch sizes of a ramp, which are kept in a list


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Input files, and how samples are made from them. Paths are relative to the current folder."""

    tokenizer: str = "data/pylib/out/tokenizer.model"
    """Tokenizer file: a sentencepiece model, or a tokenizer.json of Hugging Face tokenizers; ``fmoe data tokenizer``
    trains both kinds."""
    train: tuple[str, ...] = ("data/pylib/out/train",)
    """Training corpora: prefixes of .bin/.idx pairs, which ``fmoe data prepare`` writes."""
    weights: tuple[float, ...] = ()
    """Proportions in which samples are taken from the corpora of `train`, in any unit; empty to join the corpora."""
    validation: tuple[str, ...] = ("data/pylib/out/validation",)
    """Validation corpora, read as if joined into one; empty for no validation."""
    document_mask: bool = False
    """Let tokens attend only to their own document, and predict no token of the next document. Positions restart in
    each document. Needs model.kind=gpt or a registered kind."""
    bos: bool = False
    """Begin each document with the tokenizer's BOS token: in corpora (``fmoe data prepare --bos``), in prompts and in
    evaluated text. ``fmoe import`` sets it if the tokenizer adds BOS to texts. Needs model.kind=gpt or a registered
    kind."""
    noise_density: float = 0.15
    """Share of the tokens that a t5 or a bert must predict."""
    mean_span: float = 3.0
    """Mean length of a t5's masked spans, in tokens."""
    prefetch: int = 2
    """Number of steps whose batches a thread prepares in advance; 0 prepares batches within their step."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Steps, batches, precision."""

    steps: int = 300
    """Optimizer steps."""
    global_batch: int = 16
    """Sequences per step, over all ranks."""
    ramp_batch: int | None = None
    """Global batch of the first step, from which it grows to global_batch; None for no ramp."""
    ramp_increment: int | None = None
    """Number of sequences by which the batch grows at a time."""
    ramp_samples: int | None = None
    """Number of sequences over which the batch grows; each size below global_batch gets an equal share."""
    micro_batch: int = 8
    """Sequences per forward pass of a rank; gradients accumulate over the micro batches of a step."""
    seed: int = 1234
    """Seed of weights, data order and noise."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of weights and activations; master weights, gradients and the router's arithmetic are always fp32."""
    validation_every: int = 50
    """Steps between validations; the model is also validated before the first step and after the last one."""
    validation_sequences: int = 64
    """Sequences per validation, the same ones each time."""
    init_from: str | None = None
    """Folder of a checkpoint or run whose weights initialize this run (warm start); --resume restores all state."""

    def check_ramp(self) -> bool:
        """Return whether the global batch grows from ``ramp_batch``; raise UserError if the ``ramp_*`` keys are
        invalid."""
        keys = ("ramp_batch", "ramp_increment", "ramp_samples")
        given = [key for key in keys if getattr(self, key) is not None]
        if given and (missing := [key for key in keys if key not in given]):
            raise UserError(f"train.{given[0]}={getattr(self, given[0])} needs train.{missing[0]}")
        if self.ramp_batch is not None and self.ramp_increment is not None:
            if self.ramp_batch >= self.global_batch:
                raise UserError(
                    f"train.ramp_batch={self.ramp_batch} must be less than train.global_batch={self.global_batch}"
                )
            growth = self.global_batch - self.ramp_batch
            divides("train.ramp_increment", self.ramp_increment, "train.global_batch - train.ramp_batch", growth)
            if growth // self.ramp_increment > MAX_RAMP:
                raise UserError(
                    f"train.ramp_increment={self.ramp_increment} makes {growth // self.ramp_increment} batch sizes, "
                    f"which exceeds the limit of {MAX_RAMP}: use a larger increment"
                )
        return bool(given)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Schedule and retention of checkpoints."""

    every: int = 100
    """Steps between checkpoints; a run also saves after its last step or after a signal; 0 disables all saves."""
    keep: int = 2
    """Number of newest checkpoints to keep; 0 for all."""
    keep_every: int | None = None
    """Also keep checkpoints whose step is a multiple of this; None keeps only the newest."""
    asynchronous: bool = True
    """Write checkpoints in the background, from a copy of the rank's state in host memory."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Detection of failures, and reaction to them (docs/operations.md)."""

    nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to a NaN or infinity in any rank's loss or gradient: end the run, or skip the step. Steps with an fp16
    overflow are always skipped, as long as a lower loss scale may cure it."""
    max_skips: int = 10
    """Maximum number of steps that the guard skips in a row, not counting fp16 overflows; one more ends the run."""
    spike_sigma: float = 10.0
    """Skip a step whose loss or log gradient norm exceeds the median by more than this number of standard deviations.
    The deviation is estimated from the median absolute deviation and has a lower bound (docs/operations.md). 0
    disables."""
    spike_window: int = 128
    """Number of latest applied (not skipped) steps over which the median is taken; 0 disables spike skips."""
    spike_history: int = 64
    """Minimum number of applied steps within spike_window for a step to be skipped as a spike."""
    collapse_window: int = 100
    """Steps over which expert loads and router entropies are summed to detect collapse; 0 disables the warnings."""
    collapse_cv: float = 1.5
    """Coefficient of variation of a layer's expert loads above which a warning is logged; sqrt(E - 1) is the value if
    one of E experts gets all tokens."""
    collapse_dead: float = 0.25
    """Maximum share of a layer's experts without a token within collapse_window; a larger share causes a warning."""
    collapse_uniform: float = 5e-4
    """Log a warning if a router's mean entropy is within this distance, in nats, of its maximum, the logarithm of the
    number of experts: the choice of experts is then arbitrary. 0 disables this check; gate=random is exempt."""
    hang_minutes: float = 8.0
    """Minutes without progress after which all ranks write their stacks and exit; 0 disables."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Metric trackers in addition to metrics.jsonl."""

    wandb: bool = True
    """Weights & Biases; offline if no API key is set."""
    tensorboard: bool = False
    """TensorBoard event files."""
    trackio: bool = False
    """trackio, with a database in the run's folder; TRACKIO_DIR sets a shared one for several runs."""
    console_every: int = 10
    """Steps between lines on the console, which also shows each validation."""
    trust_every: int = 10
    """Steps between summaries of the trust ratios of lamb and lars; 0 disables."""
    picture_every: int = 100
    """Steps between images of the expert loads in wandb, TensorBoard and trackio; 0 disables."""
    project: str = "fmoe"
    """Project name in wandb and trackio."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The folder of the run, and the user's own code (docs/plugins.md)."""

    folder: str = "runs/default"
    """Folder of the run: its resolved recipe, metrics, logs and checkpoints."""
    imports: tuple[str, ...] = ()
    """Python files or modules to import, which register gates, experts, callbacks and more by name. Paths are relative
    to the current folder, or to the folder of the recipe's file."""
    callbacks: tuple[str, ...] = ()
    """Names of registered callbacks to run, in this order, after guards and validation and before tracking."""
    callback_options: Mapping[str, Any] = field(default_factory=dict)
    """Table of the callbacks' options: ``callback_options.NAME.OPTION``, where NAME names a callback."""
