"""The section ``[optimizer]`` of a recipe, with the learning rate schedule."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Interval, Le

from pretrain.config.keys import (
    AllowInfinity,
    BelowOne,
    Name,
    NotNegative,
    NotNegativeFloat,
    OnResume,
    Positive,
    PositiveFloat,
    Section,
)

# Defaults of the dynamic loss scale. Initial scale and hysteresis are torch.amp's: Megatron-core's initial 2^32 would
# skip the first 16 steps.
_DYNAMIC_SCALE = {"initial_loss_scale": 2.0**16, "min_loss_scale": 1.0, "loss_scale_window": 1000, "hysteresis": 1}

_Scale = Annotated[float, Interval(ge=2.0**-126, le=2.0**126)]  # float32 can represent the inverse


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The optimizer and its schedule (docs/large-batch.md)."""

    on_resume: ClassVar[str] = "from here on; the schedule continues at its step. `optimizer.name` may not change"

    name: Annotated[Name, OnResume("")] = "adamw"
    """Optimizer: adamw, lamb, lars, muon, adafactor, adamw8bit, sgd, or a registered one. lamb and lars compute a
    trust ratio for each matrix, and muon orthogonalizes the momentum of each hidden matrix; every expert has its own
    matrices. muon updates all other parameters with AdamW; adamw8bit is torchao's AdamW with 8-bit moments."""
    lr: PositiveFloat = 2e-3
    """Peak learning rate, before lr_scaling."""
    min_lr: NotNegativeFloat = 2e-4
    """Learning rate after the decay, before lr_scaling; at most lr."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Factor of lr and min_lr: none for 1, linear for train.global_batch / base_batch, sqrt for the root of
    that ratio."""
    base_batch: Positive | None = None
    """Global batch in sequences at which lr and min_lr apply unscaled; needs lr_scaling."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay from lr to min_lr after the warmup; constant for no decay."""
    warmup_steps: NotNegative = 30
    """Steps of linear warmup from zero."""
    warmup_tokens: Annotated[int, Interval(ge=1, le=2**53)] | None = None
    """Warmup in tokens, rounded up to steps; replaces warmup_steps."""
    decay_steps: Positive | None = None
    """Step at which the decay ends; None for the last step."""
    beta1: BelowOne = 0.9
    """Decay rate of the first moment, for adamw, adamw8bit, lamb and muon's AdamW."""
    beta2: BelowOne = 0.95
    """Decay rate of the second moment, for adamw, adamw8bit, lamb and muon's AdamW."""
    eps: NotNegativeFloat = 1e-8
    """Constant added to the root of the second moment, for adamw, adamw8bit, lamb and muon's AdamW."""
    momentum: BelowOne | None = None
    """Momentum, for muon, lars and sgd; None for 0.95 with muon, and 0.9 with lars and sgd."""
    nesterov: bool = True
    """Nesterov momentum, for muon."""
    ns_steps: Positive = 5
    """Newton-Schulz iterations per step, for muon."""
    muon_scale: Literal["rms", "original"] = "rms"
    """Factor of muon's orthogonal updates of matrices [M, N]: rms for 0.2 sqrt(max(M, N)), original for
    sqrt(max(1, M / N)). With rms, the lr and weight_decay that suit adamw suit muon too."""
    trust_coefficient: PositiveFloat = 1e-3
    """Factor of lars' trust ratio, which is: norm of the weights / (norm of the gradient + weight_decay x norm of the
    weights)."""
    max_trust: Annotated[float, Gt(0), AllowInfinity()] | None = None
    """Upper bound on the trust ratio of lamb and lars; None for no bound."""
    beta2_decay: Annotated[float, Le(0)] = -0.8
    """For adafactor: at step t, the decay rate of the second moments is 1 - t^beta2_decay."""
    update_clip: Annotated[float, Ge(1), AllowInfinity()] = 1.0
    """For adafactor: upper bound on the root mean square of an update before it is multiplied by the learning rate."""
    weight_decay: NotNegativeFloat = 0.1
    """Weight decay: decoupled, but added to the gradient by lars and sgd; not applied to biases and norms."""
    clip_grad: Annotated[float, Ge(0), AllowInfinity()] = 1.0
    """Maximum norm of the gradient, with every expert counted once; 0 disables clipping."""
    cpu_offload: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Share of adamw's moments and master weights that are kept and updated in host memory. Needs a GPU. With
    parallel.shard=optimizer, the share is rounded up to whole tensors, and train.precision must be bf16 or fp16. With
    gradients or parameters it must be 0 or 1, and 1 keeps reduced gradients in host memory too."""
    loss_scale: _Scale | None = None
    """Constant loss scale for train.precision=fp16; None for a dynamic scale."""
    initial_loss_scale: _Scale | None = None
    """Dynamic scale of the first step; None for 65,536."""
    min_loss_scale: _Scale | None = None
    """Lower bound on the dynamic scale; None for 1."""
    loss_scale_window: Positive | None = None
    """Steps without an overflow after which the dynamic scale doubles; None for 1,000."""
    hysteresis: Positive | None = None
    """Number of overflows, since the dynamic scale last doubled, after which the scale halves. Each later overflow
    halves it again. None for 1."""

    @property
    def has_trust_ratios(self) -> bool:
        """True if the optimizer scales the update of each matrix by a trust ratio."""
        return self.name in ("lamb", "lars")

    @property
    def momentum_value(self) -> float:
        """Momentum of muon, lars or sgd."""
        if self.momentum is not None:
            return self.momentum
        return 0.95 if self.name == "muon" else 0.9

    def lr_factor(self, global_batch: int) -> float:
        """Return the factor by which a global batch of ``global_batch`` sequences scales the learning rate."""
        if self.lr_scaling == "none" or self.base_batch is None:
            return 1.0
        ratio = global_batch / self.base_batch
        return ratio if self.lr_scaling == "linear" else math.sqrt(ratio)

    @property
    def dynamic_scale(self) -> dict[str, float | int]:
        """Megatron-core's options for a dynamic loss scale, with defaults for keys that are None."""
        given = {name: getattr(self, name) for name in _DYNAMIC_SCALE}
        return {name: _DYNAMIC_SCALE[name] if value is None else value for name, value in given.items()}
