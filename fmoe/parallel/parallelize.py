"""`parallelize`: a model of transformers or torch on the ranks of a job, in one call."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fmoe.convert import fmoefy, own_experts
from fmoe.errors import UserError
from fmoe.moe import MoE
from fmoe.parallel import pretrained
from fmoe.parallel.ddp import DistributedDataParallel
from fmoe.parallel.fsdp import fully_shard
from fmoe.parallel.groups import ParallelGroups, init, moe_layers

SHARDS = ("none", "full")
PRECISIONS = ("fp32", "bf16")


def parallelize(
    model: Any,
    ep: int | None = None,
    *,
    shard: str = "none",
    shard_size: int | None = None,
    weights: str | Path | None = None,
    precision: str = "fp32",
    recompute: bool = False,
    groups: ParallelGroups | None = None,
    **options: Any,
) -> Any:
    """Split a model over the ranks of the job: its experts over ``ep`` ranks, the batch over all.

    Steps: `fmoe.fmoefy` takes over the model's own experts; weights are loaded; `fully_shard` shards each block, or
    `DistributedDataParallel` wraps the model. Each step is also a function of its own.

    Args:
        model: a model of transformers, or any module with `MoE` layers that use the groups' ``moe_group``. On the meta
            device, it needs ``weights``.
        ep: number of ranks over which experts are split, by default 1; not with ``groups``.
        shard: "none", every rank holds all parameters except other ranks' experts; or "full", parameters, gradients and
            optimizer state are sharded over the ranks (FSDP2).
        shard_size: with "full", number of adjacent ranks over which parameters are sharded, and of which others hold
            copies (HSDP). A multiple or a divisor of ``ep``; by default all ranks. Not with ``groups``.
        weights: folder of a Hugging Face model to load (`load_hf`); None to keep the weights that the model has.
        precision: "fp32", the model's dtype; or "bf16", forward and backward passes in bfloat16, with parameters in the
            model's dtype and reductions in float32.
        recompute: recompute the activations of each block in the backward pass.
        groups: groups of `init`; None to make them.
        options: options of `fmoe.fmoefy` for a model with experts: ``exchange``, ``exchange_options``, ``backend``, ...

    Returns:
        The model, wrapped with ``shard="none"``. Its attribute ``groups`` has the groups, for
        `fmoe.parallel.clip_grad_norm_`, `state_dict` and `save_hf`.

    Raises:
        UserError: an argument is invalid, ``ep`` does not divide the number of experts, the experts have an unknown
            form, or the folder is incomplete. Raised before a process group is made.
    """
    if shard not in SHARDS:
        raise UserError(f"shard={shard!r} must be one of {', '.join(SHARDS)}")
    if precision not in PRECISIONS:
        raise UserError(f"precision={precision!r} must be one of {', '.join(PRECISIONS)}")
    for key, value in (("ep", ep), ("shard_size", shard_size)):
        if value is not None and (type(value) is not int or value < 1):
            raise UserError(f"{key}={value!r} must be a positive whole number")
        if value is not None and groups is not None:
            raise UserError(f"{key}={value} must not be set together with groups: pass it to fmoe.parallel.init")
    if shard_size is not None and shard != "full":
        raise UserError(f"shard_size={shard_size} needs shard='full'")
    has_layers = any(isinstance(module, MoE) for module in model.modules())
    blocks = [] if has_layers else own_experts(model, **options)
    size = groups.ep if groups is not None else ep or 1
    for name, _, block in blocks:
        if block.num_experts % size:
            raise UserError(f"ep={size} does not divide the {block.num_experts} experts of {name}")
    if not blocks and options:
        raise UserError(f"{next(iter(options))} is an option for a model's own experts, and the model has none")
    if not blocks and not has_layers and size > 1:
        raise UserError(f"ep={size} needs a model with experts: convert it with fmoe.fmoefy and moe_group first")
    if weights is not None:
        pretrained.files_of(Path(weights))
    elif pretrained.has_meta(model):
        raise UserError("the model is on the meta device: pass weights=FOLDER")
    from torch.distributed.fsdp import MixedPrecisionPolicy

    groups = groups or init(ep or 1, shard_size=shard_size)
    if blocks:
        fmoefy(model, moe_group=groups.moe_group, **options)
    moe_layers(model, groups)  # raises if experts are split over other ranks

    device = groups.mesh.device_type
    if weights is not None:
        pretrained.materialize(model, device)
        pretrained.load_hf(model, weights)
    model.to(device)
    if recompute:
        _recompute(model)
    if shard == "none":
        if precision == "bf16":
            model.forward = torch.autocast(device, torch.bfloat16)(model.forward)
        model = DistributedDataParallel(model, groups)
    else:
        sharding: dict[str, Any] = {}
        if precision == "bf16":
            sharding["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for part in (*blocks_of(model), model):
            fully_shard(part, groups, **sharding)
        model.groups = groups
    model._is_accelerate_prepared = True  # Accelerate, and so Trainer, leaves the model as it is
    return model


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model whose parameters are gathered together: transformers' layers, or items of lists."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    if names:
        yield from (module for module in model.modules() if type(module).__name__ in names)
        return
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif not isinstance(child, MoE):
            yield from blocks_of(child)


def _recompute(model: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable()
        return
    blocks = set(blocks_of(model))
    apply_activation_checkpointing(model, check_fn=lambda module: module in blocks)
