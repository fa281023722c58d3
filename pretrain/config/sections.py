"""The recipe's sections about data, training, checkpoints, guards, tracking and the run's folder; all keys by name."""

import functools
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Interval, MinLen

from pretrain.config.keys import (
    AllowInfinity,
    AnyPath,
    Corpus,
    Key,
    Name,
    NotNegative,
    NotNegativeFloat,
    OnResume,
    PathName,
    Plan,
    Positive,
    Section,
    Table,
    declared,
)
from pretrain.config.model import AttentionConfig, ModelConfig, MoEConfig, PositionConfig
from pretrain.config.optimizer import OptimizerConfig
from pretrain.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Input files, and how samples are made from them. Paths are relative to the current folder."""

    tokenizer: Annotated[AnyPath, OnResume("none: the content must be the same")] = "data/pylib/out/tokenizer.model"
    """Tokenizer file: a sentencepiece model, or a tokenizer.json of Hugging Face tokenizers; ``fmoe data tokenizer``
    trains both kinds. Empty for no tokenizer (needs samples)."""
    train: Annotated[tuple[Corpus, ...], MinLen(1), OnResume("none: the content must be the same")] = (
        "data/pylib/out/train",
    )
    """Training corpora: prefixes of .bin/.idx pairs, which ``fmoe data prepare`` writes."""
    samples: Name | None = None
    """Name of a registered source of samples, such as sentence pairs or images with classes, which reads the entries of
    `train` and `validation` (docs/plugins.md); None for corpora of tokens."""
    samples_options: Table = field(default_factory=dict)
    """Table of options of the source of samples."""
    weights: tuple[float, ...] = ()
    """Proportions in which samples are taken from the corpora of `train`, in any unit; empty to join the corpora."""
    validation: Annotated[tuple[Corpus, ...], OnResume("validation only")] = ("data/pylib/out/validation",)
    """Validation corpora, read as if joined into one; empty for no validation."""
    document_mask: bool = False
    """Let tokens attend only to their own document, and predict no token of the next document. Positions restart in
    each document. Needs model.kind=gpt or a registered kind."""
    bos: bool = False
    """Begin each document with the tokenizer's BOS token: in corpora (``fmoe data prepare --bos``), in prompts and in
    evaluated text. ``fmoe import`` sets it if the tokenizer adds BOS to texts. Needs model.kind=gpt or a registered
    kind."""
    chat: bool = False
    """Train on conversations (``fmoe data prepare --chat``): samples are whole conversations, packed, and only tokens
    of answers are predicted. As with document_mask, tokens attend only to their own conversation. Needs model.kind=gpt
    or a registered kind."""
    noise_density: Annotated[float, Interval(gt=0, le=0.99)] = 0.15
    """Share of the tokens that a t5 or a bert must predict."""
    mean_span: Annotated[float, Ge(1)] = 3.0
    """Mean length of a t5's masked spans, in tokens."""
    prefetch: Annotated[
        int, Interval(ge=0, le=2**16), OnResume("the time at which batches are built, not their content")
    ] = 2
    """Number of steps whose batches a thread prepares in advance; 0 prepares batches within their step."""

    @property
    def has_validation(self) -> bool:
        """True if the run has validation corpora."""
        return bool(self.validation)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Steps, batches, precision."""

    steps: Annotated[
        Positive,
        OnResume(
            "the run ends later or earlier; without `optimizer.decay_steps`, the decay also ends at the new last step"
        ),
    ] = 300
    """Optimizer steps."""
    global_batch: Positive = 16
    """Sequences per step, over all ranks."""
    ramp_batch: Positive | None = None
    """Global batch of the first step, from which it grows to global_batch; None for no ramp."""
    ramp_increment: Positive | None = None
    """Number of sequences by which the batch grows at a time."""
    ramp_samples: Annotated[int, Interval(ge=1, le=2**53)] | None = None
    """Number of sequences over which the batch grows; each size below global_batch gets an equal share."""
    micro_batch: Annotated[Positive, OnResume("losses agree within rounding")] = 8
    """Sequences per forward pass of a rank; gradients accumulate over the micro batches of a step."""
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1)] = 1234
    """Seed of weights, data order and noise."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of weights and activations; master weights, gradients and the router's arithmetic are always fp32."""
    activations: Annotated[
        Literal["full", "mask", "bf16", "int8", "offload"], OnResume("memory; gradients are rounded with bf16 and int8")
    ] = "full"
    """How activations are kept for the backward pass: as they are (full), zeros and bools as bits (mask), in 16 or 8
    bits, or in host memory (offload). Only bf16 and int8 change gradients (docs/precision.md)."""
    validation_every: Annotated[Positive, OnResume("validation only")] = 50
    """Steps between validations; the model is also validated before the first step and after the last one."""
    validation_sequences: Annotated[Positive, OnResume("validation only")] = 64
    """Sequences per validation, the same ones each time."""
    init_from: Annotated[PathName, OnResume("none: only the start of a new run uses it")] | None = None
    """Folder of a checkpoint or run whose weights initialize this run (warm start); --resume restores all state."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Schedule and retention of checkpoints."""

    on_resume: ClassVar[str] = "from here on"

    every: NotNegative = 100
    """Steps between checkpoints; a run also saves after its last step or after a signal; 0 disables all saves."""
    keep: NotNegative = 2
    """Number of newest checkpoints to keep; 0 for all."""
    keep_every: Positive | None = None
    """Also keep checkpoints whose step is a multiple of this; None keeps only the newest."""
    asynchronous: bool = True
    """Write checkpoints in the background, from a copy of the rank's state in host memory."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig(Section):
    """Detection of failures, and reaction to them (docs/operations.md)."""

    on_resume: ClassVar[str] = "from here on; the spike guard keeps its window of steps"

    nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to a NaN or infinity in any rank's loss or gradient: end the run, or skip the step. Steps with an fp16
    overflow are always skipped, as long as a lower loss scale may cure it."""
    max_skips: Positive = 10
    """Maximum number of steps that the guard skips in a row, not counting fp16 overflows; one more ends the run."""
    spike_sigma: Annotated[float, Ge(0), AllowInfinity()] = 10.0
    """Skip a step whose loss or log gradient norm exceeds the median by more than this number of standard deviations.
    The deviation is estimated from the median absolute deviation and has a lower bound (docs/operations.md). 0
    disables."""
    spike_window: Annotated[int, Interval(ge=0, le=2**24)] = 128
    """Number of latest applied (not skipped) steps over which the median is taken; 0 disables spike skips."""
    spike_history: Annotated[int, Interval(ge=1, le=2**24)] = 64
    """Minimum number of applied steps within spike_window for a step to be skipped as a spike."""
    collapse_window: NotNegative = 100
    """Steps over which expert loads and router entropies are summed to detect collapse; 0 disables the warnings."""
    collapse_cv: Annotated[float, Ge(0), AllowInfinity()] = 1.5
    """Coefficient of variation of a layer's expert loads above which a warning is logged; sqrt(E - 1) is the value if
    one of E experts gets all tokens."""
    collapse_dead: Annotated[float, Interval(ge=0, le=1)] = 0.25
    """Maximum share of a layer's experts without a token within collapse_window; a larger share causes a warning."""
    collapse_uniform: NotNegativeFloat = 5e-4
    """Log a warning if a router's mean entropy is within this distance, in nats, of its maximum, the logarithm of the
    number of experts: the choice of experts is then arbitrary. 0 disables this check; gate=random is exempt."""
    hang_minutes: Annotated[float, Interval(ge=0, le=1e6)] = 8.0
    """Minutes without progress after which all ranks write their stacks and exit; 0 disables."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig(Section):
    """Metric trackers in addition to metrics.jsonl."""

    on_resume: ClassVar[str] = "from here on"

    wandb: bool = True
    """Weights & Biases; offline if no API key is set."""
    tensorboard: bool = False
    """TensorBoard event files."""
    trackio: bool = False
    """trackio, with a database in the run's folder; TRACKIO_DIR sets a shared one for several runs."""
    console_every: Positive = 10
    """Steps between lines on the console, which also shows each validation."""
    trust_every: NotNegative = 10
    """Steps between summaries of the trust ratios of lamb and lars; 0 disables."""
    picture_every: NotNegative = 100
    """Steps between images of the expert loads in wandb, TensorBoard and trackio; 0 disables."""
    profile_step: Positive | None = None
    """First step of a trace by torch's profiler (docs/operations.md); None for traces by SIGUSR2 only."""
    profile_steps: Positive = 3
    """Number of steps in a trace."""
    phases_every: NotNegative = 0
    """Steps between measurements of the time by phase of a step on all ranks (docs/operations.md); 0 disables."""
    slow_rank: Annotated[float, Ge(1), AllowInfinity()] = 1.5
    """Log a warning if the own work of the slowest rank in a measured step takes more than this factor of the mean of
    the other ranks; inf disables."""
    plan: Plan = field(default_factory=dict)
    """What ``fmoe plan --out`` predicts for this recipe: ``seconds`` of a step and of its phases, and ``memory`` in
    bytes. The run compares itself with these (docs/planner.md); empty for no comparison."""
    project: Name = "fmoe"
    """Project name in wandb and trackio."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Section):
    """Evaluation on tasks of lm-evaluation-harness during training (docs/tracking.md)."""

    on_resume: ClassVar[str] = "from here on"

    tasks: tuple[Name, ...] = ()
    """Names of tasks, groups or tags of the harness; empty for no evaluation. Needs model.kind=gpt or a registered
    kind, and the extra lm-eval."""
    every: Positive = 1000
    """Steps between evaluations; the model is also evaluated after the last step."""
    limit: Positive | None = None
    """Maximum number of documents of each task, the first ones; None for all."""
    num_fewshot: NotNegative | None = None
    """Number of examples in a prompt, unless the task fixes it at 0; None for the task's own number, or 0."""
    task_path: PathName | None = None
    """Folder of further tasks in the harness's format, which come before its own of the same name. Like
    run.imports, they may contain code."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """The folder of the run, and the user's own code (docs/plugins.md)."""

    on_resume: ClassVar[str] = "where the run writes; plugins and callbacks, from here on"

    folder: PathName = "runs/default"
    """Folder of the run: its resolved recipe, metrics, logs and checkpoints."""
    imports: tuple[Name, ...] = ()
    """Python files or modules to import, which register gates, experts, callbacks and more by name. Paths are relative
    to the current folder, or to the folder of the recipe's file."""
    callbacks: tuple[Name, ...] = ()
    """Names of registered callbacks to run, in this order, after guards and validation and before tracking."""
    callback_options: Table = field(default_factory=dict)
    """Table of the callbacks' options: ``callback_options.NAME.OPTION``, where NAME names a callback."""


SECTIONS: dict[str, type[Section]] = {
    "run": RunConfig,
    "model": ModelConfig,
    "attention": AttentionConfig,
    "position": PositionConfig,
    "moe": MoEConfig,
    "data": DataConfig,
    "parallel": ParallelConfig,
    "optimizer": OptimizerConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
    "guard": GuardConfig,
    "tracking": TrackingConfig,
    "evaluation": EvaluationConfig,
}
"""Sections of the TOML file, in the order in which a resolved recipe is written."""

MODEL_SECTIONS = ("attention", "position", "moe")
"""Sections that are fields of `ModelConfig`."""


@functools.cache
def keys() -> dict[str, Key]:
    """Return all recipe keys by their full name, such as ``moe.top_k``."""
    return {f"{name}.{key.name}": key for name, section in SECTIONS.items() for key in declared(section)}
