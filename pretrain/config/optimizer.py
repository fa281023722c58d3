"""The recipe's optimizer and its learning rate."""

import math
from dataclasses import dataclass
from typing import Literal

from fmoe.errors import UserError

# Optimizers whose state is not of one number, or not of one size, an element: flat shards cannot hold it.
_WANTS_WHOLE = {
    "adafactor": "factors the second moments of matrices",
    "adamw8bit": "quantizes blocks of 256 elements",
}

# The dynamic loss scale where the recipe does not say. That of the first step and the hysteresis are torch.amp's:
# Megatron-core's own, 2^32, would skip the first 16 steps.
_DYNAMIC_SCALE = {"initial_loss_scale": 2.0**16, "min_loss_scale": 1.0, "loss_scale_window": 1000, "hysteresis": 1}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedule (docs/large-batch.md)."""

    name: Literal["adamw", "lamb", "lars", "adafactor", "adamw8bit", "sgd"] = "adamw"
    """LAMB and LARS have a trust ratio an expert; adamw8bit is torchao's AdamW with 8-bit moments."""
    lr: float = 2e-3
    """Highest learning rate, at base_batch."""
    min_lr: float = 2e-4
    """At the end of the decay, at base_batch."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """What train.global_batch / base_batch does to lr and min_lr: nothing, multiply them, by its square root."""
    base_batch: int | None = None
    """Sequences of the batch that lr and min_lr are meant for, with lr_scaling."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after the warmup."""
    warmup_steps: int = 30
    """Steps of linear growth from zero."""
    warmup_tokens: int | None = None
    """The same in tokens, rounded up to steps; takes the place of warmup_steps."""
    decay_steps: int | None = None
    """Step at which the decay ends; None for the last."""
    beta1: float = 0.9
    """Of adamw, adamw8bit, lamb."""
    beta2: float = 0.95
    """The same."""
    eps: float = 1e-8
    """The same."""
    momentum: float = 0.9
    """Of lars and sgd."""
    trust_coefficient: float = 1e-3
    """Of lars: its ratio is so many times |weights| / |gradient|."""
    max_trust: float | None = None
    """Highest trust ratio of lamb and lars; None for no bound."""
    beta2_decay: float = -0.8
    """Of adafactor: the second moments forget by 1 - step^this."""
    update_clip: float = 1.0
    """Of adafactor: highest root mean square of an update, before the learning rate."""
    weight_decay: float = 0.1
    """Decoupled, but in lars and sgd part of the gradient; biases and norms have none."""
    clip_grad: float = 1.0
    """Highest norm of the gradient, every expert counted once; 0 for no clipping."""
    distributed: bool = False
    """Shard the optimizer state over data parallel ranks (Megatron's distributed optimizer, ZeRO-1)."""
    cpu_offload: float = 0.0
    """Share of the moments of adamw, with masters of their own, that are kept and stepped in host memory (Megatron's
    optimizer_offload_fraction); whole tensors, at least so much of them."""
    loss_scale: float | None = None
    """Of train.precision=fp16: what the loss is multiplied by, the same in every step; None for a dynamic scale."""
    initial_loss_scale: float | None = None
    """The dynamic scale of the first step; None for 65,536."""
    min_loss_scale: float | None = None
    """The lowest dynamic scale; None for 1."""
    loss_scale_window: int | None = None
    """Steps without an overflow after which the dynamic scale doubles; None for 1,000."""
    hysteresis: int | None = None
    """Overflows since it last doubled from which on each halves the dynamic scale; None for 1, the first."""

    @property
    def has_trust_ratios(self) -> bool:
        """Whether it scales the update of each matrix."""
        return self.name in ("lamb", "lars")

    def lr_factor(self, global_batch: int) -> float:
        """What a batch of so many sequences multiplies the learning rate by."""
        if self.lr_scaling == "none" or self.base_batch is None:
            return 1.0
        ratio = global_batch / self.base_batch
        return ratio if self.lr_scaling == "linear" else math.sqrt(ratio)

    @property
    def dynamic_scale(self) -> dict[str, float | int]:
        """Megatron-core's options of a dynamic loss scale."""
        given = {name: getattr(self, name) for name in _DYNAMIC_SCALE}
        return {name: _DYNAMIC_SCALE[name] if value is None else value for name, value in given.items()}

    def check_precision(self, precision: str) -> None:
        """Raises UserError for a key that cannot be, or is of no use, with train.precision."""
        if self.cpu_offload and precision == "fp32":
            raise UserError(
                f"optimizer.cpu_offload={self.cpu_offload} is for masters of train.precision=bf16 or fp16: in fp32 "
                "megatron-core steps views of the weights, which it cannot offload"
            )
        given = [name for name in ("loss_scale", *_DYNAMIC_SCALE) if getattr(self, name) is not None]
        for name in given:
            value = getattr(self, name)
            if precision != "fp16":
                raise UserError(f"optimizer.{name}={value} is for train.precision=fp16, not {precision}")
            if name != "loss_scale" and self.loss_scale is not None:
                raise UserError(
                    f"optimizer.{name}={value} is for a dynamic scale, optimizer.loss_scale={self.loss_scale} is fixed"
                )
            if name.endswith("scale") and not 2.0**-126 <= value <= 2.0**126:  # of which float32 has the inverse
                raise UserError(f"optimizer.{name}={value} is not between 2^-126 and 2^126")
        scale = self.dynamic_scale
        if scale["min_loss_scale"] > scale["initial_loss_scale"]:
            raise UserError(
                f"optimizer.min_loss_scale={scale['min_loss_scale']} is more than "
                f"optimizer.initial_loss_scale={scale['initial_loss_scale']}"
            )

    def check(self) -> None:
        """Raises UserError for the first value that cannot be, alone or with another of the section."""
        for name in ("beta1", "beta2", "momentum"):
            if not getattr(self, name) < 1:
                raise UserError(f"optimizer.{name}={getattr(self, name)} is not less than 1")
        for name in ("lr", "trust_coefficient", "max_trust"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"optimizer.{name}={value} is not positive")
        if self.min_lr > self.lr:
            raise UserError(f"optimizer.min_lr={self.min_lr} is more than optimizer.lr={self.lr}")
        if not self.beta2_decay <= 0:
            raise UserError(f"optimizer.beta2_decay={self.beta2_decay} is not 0 or less")
        if not self.update_clip >= 1:
            raise UserError(f"optimizer.update_clip={self.update_clip} is not 1 or more")
        if self.lr_scaling != "none" and self.base_batch is None:
            raise UserError(f"optimizer.lr_scaling={self.lr_scaling} needs optimizer.base_batch")
        if self.lr_scaling == "none" and self.base_batch is not None:
            raise UserError(f"optimizer.base_batch={self.base_batch} is nothing at optimizer.lr_scaling=none")
        if not self.cpu_offload <= 1:
            raise UserError(f"optimizer.cpu_offload={self.cpu_offload} is not in [0, 1]")
        if self.cpu_offload and self.name != "adamw":
            raise UserError(
                f"optimizer.cpu_offload={self.cpu_offload}: megatron-core steps Adam on the host, no "
                f"optimizer.name={self.name}"
            )
        if self.cpu_offload and not self.distributed:
            raise UserError(f"optimizer.cpu_offload={self.cpu_offload} is for optimizer.distributed=true")
        if self.distributed and self.name in _WANTS_WHOLE:
            raise UserError(
                f"optimizer.name={self.name} {_WANTS_WHOLE[self.name]}, which the flat shards of "
                "optimizer.distributed=true cut: use false"
            )
