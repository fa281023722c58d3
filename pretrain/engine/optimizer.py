"""The optimizer and the learning rate schedule of a recipe."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as core
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.optim import Optimizer

from fmoe import optim
from fmoe.errors import UserError, add_name, known_names
from megatron_patch.optimizer import Make, build_optimizer
from pretrain.config import Recipe
from pretrain.engine.compression import warmup_of

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {}
"""Registered optimizers by name."""

SHIPPED = ("adamw", "lamb", "lars", "muon", "adafactor", "adamw8bit", "sgd")


def register_optimizer(name: str, factory: Callable[..., Optimizer]) -> None:
    """Register an optimizer under a new name, for ``optimizer.name`` of a recipe.

    The optimizer needs a tuple ``state_names`` with the names of a parameter's state tensors, each of the parameter's
    shape. An optimizer that counts steps keeps the count as the state ``step``. ``parallel.shard`` needs
    ``is_elementwise = True``: no element's update may depend on another element.

    Args:
        factory: called with parameter groups, the recipe and the options ``lr`` and ``weight_decay``; returns the
            optimizer.

    Raises:
        UserError: the name belongs to another optimizer.
    """
    if name in SHIPPED:
        raise UserError(f"optimizer.name={name!r} is registered already, by fmoe")
    add_name(OPTIMIZERS, "optimizer.name", name, factory)


def check_optimizer(recipe: Recipe) -> None:
    """Raise UserError if the optimizer is unknown, or if a registered one lacks an attribute that the recipe needs."""
    name = recipe.optimizer.name
    if name in SHIPPED:
        return
    if name not in OPTIMIZERS:
        raise UserError(f"optimizer.name={name!r} is not known; {known_names(name, [*SHIPPED, *sorted(OPTIMIZERS)])}")
    optimizer = _registered(recipe, [{"params": [torch.zeros(2, 2, dtype=torch.float32, device="cpu")]}])
    kind = type(optimizer).__name__
    if not isinstance(getattr(optimizer, "state_names", None), tuple):
        raise UserError(f"optimizer.name={name}: checkpoints need the tuple {kind}.state_names")
    if recipe.parallel.shard != "none" and not getattr(optimizer, "is_elementwise", False):
        raise UserError(
            f"optimizer.name={name} needs parallel.shard=none, not {recipe.parallel.shard}: {kind} does not have "
            "is_elementwise = True"
        )


def _registered(recipe: Recipe, groups: list[dict[str, Any]]) -> Optimizer:
    options = recipe.optimizer
    return OPTIMIZERS[options.name](groups, recipe, lr=recipe.max_lr, weight_decay=options.weight_decay)


def make_optimizer(recipe: Recipe) -> Make | None:
    """Return a function from parameter groups to the optimizer; None to let Megatron-core build its AdamW.

    It is None for AdamW with ``cpu_offload``, and for AdamW on a GPU if Transformer Engine's or apex's fused AdamW is
    installed; but never if ``parallel.shard`` is gradients or parameters. Otherwise, Megatron-core has only torch's
    unfused AdamW, slower than the fused one returned here.
    """
    options = recipe.optimizer
    if options.name in OPTIMIZERS:
        return lambda groups: _registered(recipe, groups)
    # torch's unfused AdamW reads and writes each tensor ten times, the fused one once.
    is_fused = torch.cuda.is_available() and core.Adam is not torch.optim.AdamW
    is_fused = is_fused and options.name == "adamw" and recipe.parallel.grad_compress != "onebit"
    if (options.cpu_offload or is_fused) and not recipe.parallel.is_fully_sharded:
        return None
    adam = {"betas": (options.beta1, options.beta2), "eps": options.eps}
    trust = {"max_trust": options.max_trust}
    momentum = {"momentum": options.momentum_value}
    muon = {"nesterov": options.nesterov, "ns_steps": options.ns_steps, "scale": options.muon_scale}
    kinds: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
        "adamw": (torch.optim.AdamW, adam | {"fused": True}),
        "lamb": (optim.Lamb, adam | trust),
        "lars": (optim.Lars, trust | momentum | {"trust_coefficient": options.trust_coefficient}),
        "muon": (optim.Muon, adam | momentum | muon),
        "adafactor": (optim.Adafactor, {"beta2_decay": options.beta2_decay, "d": options.update_clip}),
        "adamw8bit": (optim.AdamW8bit, adam),
        "sgd": (torch.optim.SGD, momentum),
    }
    freeze_step = warmup_of(recipe)
    if freeze_step is not None:
        kinds["adamw"] = (optim.OneBitAdam, adam | {"freeze_step": freeze_step})
        kinds["lamb"] = (optim.OneBitLamb, adam | trust | {"freeze_step": freeze_step})
    kind, arguments = kinds[options.name]
    return lambda groups: kind(groups, lr=recipe.max_lr, weight_decay=options.weight_decay, **arguments)


def optimizer_of(recipe: Recipe, model: Sequence[Any]) -> Any:
    """Build Megatron-core's optimizer for the wrapped chunks of a model."""
    options = recipe.optimizer
    config = OptimizerConfig(
        optimizer="adam",
        lr=recipe.max_lr,
        min_lr=recipe.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.beta1,
        adam_beta2=options.beta2,
        adam_eps=options.eps,
        clip_grad=options.clip_grad,
        bf16=recipe.train.precision == "bf16",
        fp16=recipe.train.precision == "fp16",
        loss_scale=options.loss_scale,
        **options.dynamic_scale,
        params_dtype=model[0].config.params_dtype,
        use_distributed_optimizer=recipe.parallel.shard == "optimizer",
        overlap_param_gather=recipe.parallel.overlap_parameters,
        optimizer_cpu_offload=options.cpu_offload > 0,
        optimizer_offload_fraction=options.cpu_offload,
    )
    is_gloo = dist.get_backend() == "gloo"
    return build_optimizer(config, model, make_optimizer(recipe), use_gloo_process_groups=is_gloo)


def scheduler_of(recipe: Recipe, optimizer: Any) -> OptimizerParamScheduler:
    """Return the schedule of learning rate and weight decay."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=recipe.max_lr,
        min_lr=recipe.min_lr,
        lr_warmup_steps=recipe.warmup_steps,
        lr_decay_steps=recipe.decay_steps,
        lr_decay_style=recipe.optimizer.schedule,
        start_wd=recipe.optimizer.weight_decay,
        end_wd=recipe.optimizer.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
