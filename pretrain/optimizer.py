"""The recipe's optimizer: which class, with which options."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from fmoe import optim
from pretrain.config import Recipe


def make_optimizer(recipe: Recipe) -> Callable[[list[dict[str, Any]]], Optimizer] | None:
    """What makes it of parameter groups; None for AdamW on a GPU, or partly there, which is Megatron-core's business.

    On a CPU that would be torch's loop, which reads and writes each tensor ten times; the fused one does so once.
    """
    own = recipe.optimizer
    adam = {"betas": (own.beta1, own.beta2), "eps": own.eps}
    trust = {"max_trust": own.max_trust}
    kinds: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
        "adamw": (torch.optim.AdamW, adam | {"fused": True}),
        "lamb": (optim.Lamb, adam | trust),
        "lars": (optim.Lars, trust | {"momentum": own.momentum, "trust_coefficient": own.trust_coefficient}),
        "adafactor": (optim.Adafactor, {"beta2_decay": own.beta2_decay, "d": own.update_clip}),
        "adamw8bit": (optim.AdamW8bit, adam),
        "sgd": (torch.optim.SGD, {"momentum": own.momentum}),
    }
    if own.name == "adamw" and (torch.cuda.is_available() or own.cpu_offload):
        return None
    kind, options = kinds[own.name]
    return lambda groups: kind(groups, lr=recipe.max_lr, weight_decay=own.weight_decay, **options)
