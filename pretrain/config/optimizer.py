"""The section ``[optimizer]`` of a recipe, with the learning rate schedule."""

import math
from dataclasses import dataclass
from typing import Literal

from fmoe.errors import UserError

# Optimizers whose state is not elementwise: flat shards would cut through it.
_WANTS_WHOLE = {
    "adafactor": "factors the second moments of matrices",
    "adamw8bit": "quantizes blocks of 256 elements",
}

# Defaults of the dynamic loss scale. Initial scale and hysteresis are torch.amp's: Megatron-core's initial 2^32 would
# skip the first 16 steps.
_DYNAMIC_SCALE = {"initial_loss_scale": 2.0**16, "min_loss_scale": 1.0, "loss_scale_window": 1000, "hysteresis": 1}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedule (docs/large-batch.md)."""

    name: str = "adamw"
    """Optimizer: adamw, lamb, lars, muon, adafactor, adamw8bit, sgd, or a registered one. lamb and lars compute a
    trust ratio for each matrix, and muon orthogonalizes the momentum of each hidden matrix; every expert has its own
    matrices. muon updates all other parameters with AdamW; adamw8bit is torchao's AdamW with 8-bit moments."""
    lr: float = 2e-3
    """Peak learning rate, before lr_scaling."""
    min_lr: float = 2e-4
    """Learning rate after the decay, before lr_scaling; at most lr."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Factor of lr and min_lr: none for 1, linear for train.global_batch / base_batch, sqrt for the root of
    that ratio."""
    base_batch: int | None = None
    """Global batch in sequences at which lr and min_lr apply unscaled; needs lr_scaling."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay from lr to min_lr after the warmup; constant for no decay."""
    warmup_steps: int = 30
    """Steps of linear warmup from zero."""
    warmup_tokens: int | None = None
    """Warmup in tokens, rounded up to steps; replaces warmup_steps."""
    decay_steps: int | None = None
    """Step at which the decay ends; None for the last step."""
    beta1: float = 0.9
    """Decay rate of the first moment, for adamw, adamw8bit, lamb and muon's AdamW."""
    beta2: float = 0.95
    """Decay rate of the second moment, for adamw, adamw8bit, lamb and muon's AdamW."""
    eps: float = 1e-8
    """Constant added to the root of the second moment, for adamw, adamw8bit, lamb and muon's AdamW."""
    momentum: float | None = None
    """Momentum, for muon, lars and sgd; None for 0.95 with muon, and 0.9 with lars and sgd."""
    nesterov: bool = True
    """Nesterov momentum, for muon."""
    ns_steps: int = 5
    """Newton-Schulz iterations per step, for muon."""
    muon_scale: Literal["rms", "original"] = "rms"
    """Factor of muon's orthogonal updates of matrices [M, N]: rms for 0.2 sqrt(max(M, N)), original for
    sqrt(max(1, M / N)). With rms, the lr and weight_decay that suit adamw suit muon too."""
    trust_coefficient: float = 1e-3
    """Factor of lars' trust ratio, which is: norm of the weights / (norm of the gradient + weight_decay x norm of the
    weights)."""
    max_trust: float | None = None
    """Upper bound on the trust ratio of lamb and lars; None for no bound."""
    beta2_decay: float = -0.8
    """For adafactor: at step t, the decay rate of the second moments is 1 - t^beta2_decay."""
    update_clip: float = 1.0
    """For adafactor: upper bound on the root mean square of an update before it is multiplied by the learning rate."""
    weight_decay: float = 0.1
    """Weight decay: decoupled, but added to the gradient by lars and sgd; not applied to biases and norms."""
    clip_grad: float = 1.0
    """Maximum norm of the gradient, with every expert counted once; 0 disables clipping."""
    distributed: bool = False
    """Shard the optimizer state over data parallel ranks (Megatron's distributed optimizer, ZeRO-1)."""
    cpu_offload: float = 0.0
    """Share of adamw's moments and master weights that are kept and updated in host memory, rounded up to whole
    tensors. Needs a GPU, distributed=true, and train.precision=bf16 or fp16."""
    loss_scale: float | None = None
    """Constant loss scale for train.precision=fp16; None for a dynamic scale."""
    initial_loss_scale: float | None = None
    """Dynamic scale of the first step; None for 65,536."""
    min_loss_scale: float | None = None
    """Lower bound on the dynamic scale; None for 1."""
    loss_scale_window: int | None = None
    """Steps without an overflow after which the dynamic scale doubles; None for 1,000."""
    hysteresis: int | None = None
    """Number of overflows, since the dynamic scale last doubled, after which the scale halves. Each later overflow
    halves it again. None for 1."""

    @property
    def has_trust_ratios(self) -> bool:
        """True if the optimizer scales the update of each matrix by a trust ratio."""
        return self.name in ("lamb", "lars")

    @property
    def momentum_value(self) -> float:
        """Momentum of muon, lars or sgd."""
        return self.momentum if self.momentum is not None else 0.95 if self.name == "muon" else 0.9

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

    def check_precision(self, precision: str) -> None:
        """Raise UserError for a key that is invalid, or has no effect, with ``train.precision=precision``."""
        if self.cpu_offload and precision == "fp32":
            raise UserError(
                f"optimizer.cpu_offload={self.cpu_offload} needs train.precision=bf16 or fp16: in fp32, megatron-core "
                "updates views of the weights instead of master weights, and cannot offload them"
            )
        given = [name for name in ("loss_scale", *_DYNAMIC_SCALE) if getattr(self, name) is not None]
        for name in given:
            value = getattr(self, name)
            if precision != "fp16":
                raise UserError(f"optimizer.{name}={value} needs train.precision=fp16, not {precision}")
            if name != "loss_scale" and self.loss_scale is not None:
                raise UserError(
                    f"optimizer.{name}={value} has no effect with the fixed scale optimizer.loss_scale="
                    f"{self.loss_scale}: for a dynamic scale, use optimizer.loss_scale=none"
                )
            if name.endswith("scale") and not 2.0**-126 <= value <= 2.0**126:  # float32 can represent the inverse
                raise UserError(f"optimizer.{name}={value} is not between 2^-126 and 2^126")
        scale = self.dynamic_scale
        if scale["min_loss_scale"] > scale["initial_loss_scale"]:
            raise UserError(
                f"optimizer.min_loss_scale={scale['min_loss_scale']} exceeds "
                f"optimizer.initial_loss_scale={scale['initial_loss_scale']}"
            )

    def check(self) -> None:
        """Raise UserError for the first invalid value or combination of values of the section."""
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            if value is not None and not value < 1:
                raise UserError(f"optimizer.{name}={value} is not less than 1")
        for name in ("lr", "trust_coefficient", "max_trust"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"optimizer.{name}={value} is not positive")
        if self.min_lr > self.lr:
            raise UserError(f"optimizer.min_lr={self.min_lr} exceeds optimizer.lr={self.lr}")
        if not self.beta2_decay <= 0:
            raise UserError(f"optimizer.beta2_decay={self.beta2_decay} must be at most 0")
        if not self.update_clip >= 1:
            raise UserError(f"optimizer.update_clip={self.update_clip} must be at least 1")
        if self.lr_scaling != "none" and self.base_batch is None:
            raise UserError(f"optimizer.lr_scaling={self.lr_scaling} needs optimizer.base_batch")
        if self.lr_scaling == "none" and self.base_batch is not None:
            raise UserError(f"optimizer.base_batch={self.base_batch} has no effect with optimizer.lr_scaling=none")
        if not self.cpu_offload <= 1:
            raise UserError(f"optimizer.cpu_offload={self.cpu_offload} is not in [0, 1]")
        if self.cpu_offload and self.name != "adamw":
            raise UserError(
                f"optimizer.cpu_offload={self.cpu_offload} needs optimizer.name=adamw, not {self.name}: megatron-core "
                "runs only Adam on the host"
            )
        if self.cpu_offload and not self.distributed:
            raise UserError(f"optimizer.cpu_offload={self.cpu_offload} needs optimizer.distributed=true")
        if self.distributed and self.name in _WANTS_WHOLE:
            raise UserError(
                f"optimizer.name={self.name} needs optimizer.distributed=false: {self.name} "
                f"{_WANTS_WHOLE[self.name]}, which the distributed optimizer's shards would cut"
            )
