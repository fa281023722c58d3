"""Optimizers of `fmoe.optim`, or any other torch optimizer, inside Megatron-core's optimizer."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor, nn
from torch.optim import Optimizer

from fmoe import UserError
from fmoe.optim import Adafactor, AdamW8bit, Blocks, Layout, Matrices, Muon, Shards, is_matrix, is_stacked
from fmoe.optim.trust import TrustOptimizer
from fmoe.parallel.gradients import is_expert
from megatron_patch import patches, versions
from megatron_patch.fsdp import FullyShardedDataParallel, ShardedOptimizer, shards_by_kind
from megatron_patch.muon import check_slices, megatron_matrices

# Names to replace while Megatron-core builds its optimizer.
_STAND_INS = (
    (megatron_optimizer, "Adam"),  # called as Adam(params=groups, lr=..., ...)
    (megatron_optimizer, "USING_PYTORCH_OPTIMIZER"),  # if True, torch.optim.AdamW is called instead of Adam
    (distrib_optimizer, "Adam"),  # the distributed optimizer asserts the type of the inner one
)

Make = Callable[[list[dict[str, Any]]], Optimizer]


@dataclass(frozen=True)
class Shard:
    """The range of a flattened parameter that an optimizer of this rank updates.

    Attributes:
        optimizer: torch optimizer, which holds the state of ``main``.
        parameter: parameter of the model.
        main: tensor that the optimizer updates: the parameter, a float32 copy of it, or a flat slice of either.
        start, stop: range of ``main`` in the flattened parameter.
        is_sharded: True if data parallel ranks update different ranges.
        has_master: True if ``main`` is an fp32 copy of 16-bit values.
    """

    optimizer: Optimizer
    parameter: Tensor
    main: Tensor
    start: int
    stop: int
    is_sharded: bool = False
    has_master: bool = False


def optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the inner optimizers with parameters on this rank, such as one for dense layers and one for experts."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if part.optimizer is not None]


def shards(optimizer: MegatronOptimizer) -> Iterator[Shard]:
    """Yield this rank's shards of all inner optimizers."""
    for part in optimizers(optimizer):
        yield from shards_of(part)


def shards_of(part: MegatronOptimizer) -> Iterator[Shard]:
    """Yield this rank's shards of one inner optimizer (`optimizers`)."""
    if isinstance(part, ShardedOptimizer):
        has_master = part.config.bf16 or part.config.fp16
        for local in part.shards:
            stop = local.start + local.main.numel()
            yield Shard(part.optimizer, local.parameter, local.main, local.start, stop, True, has_master)
    elif isinstance(part, DistributedOptimizer):
        for parameter, (group, index) in part.model_param_group_index_map.items():
            where = part._get_model_param_range_map(parameter)["param"]
            main = part.optimizer.param_groups[group]["params"][index]
            has_master = parameter.dtype != torch.float32
            yield Shard(part.optimizer, parameter, main, where.start, where.end, True, has_master)
    else:
        without_master = [group["params"] for group in part.optimizer.param_groups]
        if isinstance(part, Float16OptimizerWithFloat16Params):
            without_master = part.fp32_from_fp32_groups
            for mains, parameters in zip(part.fp32_from_float16_groups, part.float16_groups, strict=True):
                for main, parameter in zip(mains, parameters, strict=True):
                    yield Shard(part.optimizer, parameter, main, 0, parameter.numel(), has_master=True)
        for parameters in without_master:
            for parameter in parameters:
                yield Shard(part.optimizer, parameter, parameter, 0, parameter.numel())


def renew(shard: Shard, state: dict[str, Any] | None = None) -> None:
    """Update the optimizer of a shard after the tensor ``shard.main`` was changed.

    An optimizer that runs on the host keeps copies of its parameters there. These are updated too.

    Args:
        state: new optimizer state of ``shard.main``, by name, such as ``exp_avg``; None keeps the old one.
    """
    optimizer = shard.optimizer
    main = shard.main
    if not isinstance(optimizer, HybridDeviceOptimizer):
        if state is not None:
            optimizer.state[main] = state
        return
    stepped = optimizer.param_to_inner_param[main]
    if stepped is not main:
        stepped.data.copy_(main)
    if state is None:
        return
    for part in optimizer.sub_optimizers:
        if any(stepped is parameter for group in part.param_groups for parameter in group["params"]):
            part.state[stepped] = {name: value.to(stepped.device) for name, value in state.items()}
            optimizer.state[main] = part.state[stepped]


def parameters_of(part: MegatronOptimizer) -> list[Tensor]:
    """Return the model's parameters that an inner optimizer (from `optimizers`) updates.

    With sharded optimizer state, these are the parameters that any data parallel rank updates, in the same order on
    every rank.
    """
    if isinstance(part, DistributedOptimizer):
        # All parameters in the order of the buffers, which is equal on all data parallel ranks.
        return [parameter for buffer in part.buffers for parameter in buffer.params]
    return list(dict.fromkeys(shard.parameter for shard in shards_of(part)))


def sharding_group(part: MegatronOptimizer) -> dist.ProcessGroup | None:
    """Return the data parallel group over which an inner optimizer's state is sharded; None if it is whole."""
    if isinstance(part, DistributedOptimizer | ShardedOptimizer):
        return part.data_parallel_group
    return None


def build_optimizer(
    config: OptimizerConfig, model_chunks: Sequence[nn.Module], make: Make | None = None, **options
) -> MegatronOptimizer:
    """Build Megatron-core's optimizer around the optimizers from ``make``, without weight decay of vectors.

    Vectors are parameters with one axis, and the biases of stacked experts. Such a bias has two axes, so Megatron-core
    alone would decay it.

    Args:
        config: Megatron-core's optimizer config. ``make`` need not use its settings for Adam.
        model_chunks: model chunks, each wrapped in Megatron's DDP, or in the ``FullyShardedDataParallel`` of
            ``megatron_patch.fsdp``, which needs ``make``.
        make: maps parameter groups to an optimizer; called once for dense parameters and once for experts. None for
            Adam, from Transformer Engine or apex if they are installed.
        options: arguments of ``get_megatron_optimizer``.

    Raises:
        UserError: the version of megatron-core is not supported, or it lacks a name that a patch replaces; tensor
            parallelism splits a matrix of Adafactor; Muon does not support a weight.
    """
    patches.install()
    if make is not None and all(isinstance(chunk, FullyShardedDataParallel) for chunk in model_chunks):
        optimizer = _of_local_shards(config, model_chunks, make)
    else:
        decays = {ParamKey(predicate=ParamPredicate("vectors", lambda p: not is_matrix(p))): {"wd_mult": 0.0}}
        with contextlib.nullcontext() if make is None else _standing_in(make):
            optimizer = get_megatron_optimizer(config, list(model_chunks), config_overrides=decays, **options)
    is_muon = any(isinstance(part.optimizer, Muon) for part in optimizers(optimizer))
    matrices = megatron_matrices(model_chunks) if is_muon else {}
    for part in optimizers(optimizer):
        for shard in shards_of(part):
            if isinstance(part.optimizer, Adafactor):
                _check_whole(shard)
            if is_stacked(shard.parameter) and not shard.is_sharded:
                shard.main.is_stacked = True  # type: ignore[attr-defined]  # fp32 copies lack the mark
        if isinstance(part.optimizer, TrustOptimizer):
            part.optimizer.set_layout(_layout(part))
        if isinstance(part.optimizer, Muon):
            part.optimizer.set_shards(matrices, _muon_shards(part, matrices))
        if isinstance(part.optimizer, Adafactor | AdamW8bit) and sharding_group(part) is not None:
            part.optimizer.set_shards(_shards(part))
    return optimizer


def _of_local_shards(config: OptimizerConfig, chunks: Sequence[Any], make: Make) -> ChainedOptimizer:
    parts = []
    for for_experts, shards in shards_by_kind(chunks).items():
        groups = []
        for decay in (1.0, 0.0):
            mains = [shard.main for shard in shards if is_matrix(shard.parameter) == bool(decay)]
            kind = {"wd_mult": decay, "lr_mult": 1.0, "is_expert_parallel": for_experts, "is_decoupled_lr": False}
            if mains:
                groups.append({"params": mains, **kind})
        parts.append(ShardedOptimizer(make(groups), config, shards, for_experts))
    return ChainedOptimizer(parts)


@torch.no_grad()
def clip_gradients(parameters: Sequence[Tensor], max_norm: float, norm: float) -> None:
    """Clip gradients in place, with the same result as Megatron-core's ``clip_grad_by_total_norm_fp32``, bit for bit.

    Without apex, Megatron-core's function allocates a copy of each gradient and copies it back.

    Args:
        norm: norm of the gradients of all parameters together, before clipping.
    """
    factor = max_norm / (norm + 1.0e-6)
    if factor < 1.0:
        torch._foreach_mul_([parameter.grad for parameter in parameters if parameter.grad is not None], factor)


def _check_whole(shard: Shard) -> None:
    """Raise UserError if tensor parallelism splits a parameter of Adafactor."""
    size = max((group.size() for group in _tensor_groups(shard.parameter)), default=1)
    if size > 1:
        key = "expert_tensor_parallel_size" if is_expert(shard.parameter) else "tensor_model_parallel_size"
        raise UserError(
            f"Adafactor factors whole matrices: {key}={size}, which splits them, is not supported: use {key}=1, or "
            "another optimizer"
        )


def _layout(part: MegatronOptimizer) -> Layout:
    parameters = parameters_of(part)
    group = sharding_group(part)
    over = () if group is None else (group,)
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    return Layout(
        [Blocks.of(parameter, (*over, *_tensor_groups(parameter))) for parameter in parameters],
        {shard.main: (numbers[shard.parameter], shard.start) for shard in shards_of(part)},
    )


def _muon_shards(part: MegatronOptimizer, matrices: Mapping[Tensor, Matrices]) -> Shards:
    """Return the ranges of parameters that this rank updates. Raise UserError if a matrix cannot be gathered."""
    for shard in shards_of(part):
        if shard.parameter in matrices:
            ranks = max((group.size() for group in _tensor_groups(shard.parameter)), default=1)
            check_slices(matrices[shard.parameter], shard.parameter, ranks)
    return _shards(part)


def _shards(part: MegatronOptimizer) -> Shards:
    parts = {shard.main: (shard.parameter, shard.start) for shard in shards_of(part)}
    group = sharding_group(part)
    return Shards(parts, parameters_of(part), group if group is not None and group.size() > 1 else None)


def _tensor_groups(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which the parameter is split; none if tensor parallel ranks replicate it."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return ()
    if is_expert(parameter):
        # Experts have the mark at expert tensor parallel size 1 too, where they are whole.
        return (parallel_state.get_expert_tensor_parallel_group(),)
    return (parallel_state.get_tensor_model_parallel_group(),)


@contextlib.contextmanager
def _standing_in(make: Make) -> Iterator[None]:
    for module, name in _STAND_INS:
        if not hasattr(module, name):
            installed = versions.check()
            raise UserError(f"megatron-core {installed} has no {module.__name__}.{name}, which megatron_patch replaces")
    before = [getattr(module, name) for module, name in _STAND_INS]
    values = (lambda params, **of_adam: make(params), False, Optimizer)
    try:
        for (module, name), value in zip(_STAND_INS, values, strict=True):
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in zip(_STAND_INS, before, strict=True):
            setattr(module, name, value)
