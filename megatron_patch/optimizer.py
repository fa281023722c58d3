"""Optimizers of `fmoe.optim`, or any other, inside Megatron-core's."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor, nn
from torch.optim import Optimizer

from fmoe import UserError
from fmoe.optim import Adafactor, AdamW8bit, Blocks, Layout, is_matrix, is_stacked
from fmoe.optim.trust import TrustOptimizer
from fmoe.parallel.gradients import is_expert
from megatron_patch import adapter
from megatron_patch.version import check_version

# What is put in the place of Megatron's Adam while its optimizer is built, and why it has to be.
_STAND_INS = (
    (megatron_optimizer, "Adam"),  # what is called as Adam(params=groups, lr=..., ...)
    (megatron_optimizer, "USING_PYTORCH_OPTIMIZER"),  # else torch.optim.AdamW is called by that name
    (distrib_optimizer, "Adam"),  # the distributed optimizer asserts that it got one
)

Make = Callable[[list[dict[str, Any]]], Optimizer]


@dataclass(frozen=True)
class Shard:
    """The flat range of a parameter that an optimizer of this rank steps, and the tensor it steps for it.

    Attributes:
        optimizer: torch's, which has the state of ``main``.
        parameter: the model's.
        main: the parameter itself, a float32 copy of it, or a flat part of either.
        start, stop: of ``main`` in the flat parameter.
        is_sharded: other ranks step other parts.
    """

    optimizer: Optimizer
    parameter: Tensor
    main: Tensor
    start: int
    stop: int
    is_sharded: bool

    @property
    def has_master(self) -> bool:
        """Whether the stepped values are an fp32 copy of 16-bit ones."""
        return self.parameter.dtype != torch.float32


def optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Those that step something on this rank: of dense parameters, of experts."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if part.optimizer is not None]


def shards(optimizer: MegatronOptimizer) -> Iterator[Shard]:
    """All that this rank steps, of all optimizers in ``optimizer``."""
    for part in optimizers(optimizer):
        yield from _shards_of(part)


def _shards_of(part: MegatronOptimizer) -> Iterator[Shard]:
    if isinstance(part, DistributedOptimizer):
        for parameter, (group, index) in part.model_param_group_index_map.items():
            where = part._get_model_param_range_map(parameter)["param"]
            main = part.optimizer.param_groups[group]["params"][index]
            yield Shard(part.optimizer, parameter, main, where.start, where.end, True)
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for mains, parameters in zip(part.fp32_from_float16_groups, part.float16_groups, strict=True):
            for main, parameter in zip(mains, parameters, strict=True):
                yield Shard(part.optimizer, parameter, main, 0, parameter.numel(), False)
        for parameters in part.fp32_from_fp32_groups:
            for parameter in parameters:
                yield Shard(part.optimizer, parameter, parameter, 0, parameter.numel(), False)
    else:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield Shard(part.optimizer, parameter, parameter, 0, parameter.numel(), False)


def renew(shard: Shard, state: dict[str, Any] | None = None) -> None:
    """Tells the optimizer that others have changed ``shard.main``, and puts ``state`` in the place of its own.

    An optimizer that steps on the host has copies there of what it steps.
    """
    own, main = shard.optimizer, shard.main
    if not isinstance(own, HybridDeviceOptimizer):
        if state is not None:
            own.state[main] = state
        return
    stepped = own.param_to_inner_param[main]
    if stepped is not main:
        stepped.data.copy_(main)
    if state is None:
        return
    for part in own.sub_optimizers:
        if any(stepped is parameter for group in part.param_groups for parameter in group["params"]):
            part.state[stepped] = {name: value.to(stepped.device) for name, value in state.items()}
            own.state[main] = part.state[stepped]


def parameters_of(part: MegatronOptimizer) -> list[Tensor]:
    """The model's parameters that one of `optimizers` is for, in the order of its layout."""
    if isinstance(part, DistributedOptimizer):
        # In the order of the buffers, which all data parallel ranks have alike; not only what this rank holds.
        return [parameter for buffer in part.buffers for parameter in buffer.params]
    return [shard.parameter for shard in _shards_of(part)]


def build_optimizer(
    config: OptimizerConfig, model_chunks: Sequence[nn.Module], make: Make | None = None, **options
) -> MegatronOptimizer:
    """Megatron-core's optimizer around one that ``make`` makes, with vectors outside weight decay.

    Vectors are what has one axis, and the biases of stacked experts, which Megatron-core would decay for their two.

    Args:
        config: of Adam whatever ``make`` makes; what it takes of it is up to that.
        model_chunks: wrapped by Megatron's DDP.
        make: parameter groups -> optimizer, called once for dense parameters and once for experts. None: Adam, which is
            Transformer Engine's or apex's where Megatron-core finds them.
        options: of ``get_megatron_optimizer``.

    Raises:
        UserError: megatron-core is outside the supported range or a name that is replaced has moved; an optimizer that
            wants whole tensors gets parts of them.
    """
    adapter.install()
    decays = {ParamKey(predicate=ParamPredicate("vectors", lambda p: not is_matrix(p))): {"wd_mult": 0.0}}
    with contextlib.nullcontext() if make is None else _standing_in(make):
        optimizer = get_megatron_optimizer(config, list(model_chunks), config_overrides=decays, **options)
    for part in optimizers(optimizer):
        for shard in _shards_of(part):
            if isinstance(part.optimizer, Adafactor | AdamW8bit):
                _refuse_parts(part.optimizer, shard)
            if is_stacked(shard.parameter) and not shard.is_sharded:
                shard.main.is_stacked = True  # type: ignore[attr-defined]  # masters have lost the mark
        if isinstance(part.optimizer, TrustOptimizer):
            part.optimizer.set_layout(_layout(part))
    return optimizer


@torch.no_grad()
def clip_gradients(parameters: Sequence[Tensor], max_norm: float, norm: float) -> None:
    """Megatron-core's ``clip_grad_by_total_norm_fp32``, bit for bit, in place: without apex that one makes a copy of
    each gradient, in memory that is mapped anew each time, and copies it back."""
    factor = max_norm / (norm + 1.0e-6)
    if factor < 1.0:
        torch._foreach_mul_([parameter.grad for parameter in parameters if parameter.grad is not None], factor)


def _refuse_parts(optimizer: Optimizer, shard: Shard) -> None:
    if shard.is_sharded:
        raise UserError(
            f"{type(optimizer).__name__} steps whole tensors, use_distributed_optimizer=True gives it parts of them"
        )
    if isinstance(optimizer, Adafactor) and any(group.size() > 1 for group in _tensor_groups(shard.parameter)):
        raise UserError(
            f"Adafactor factors whole matrices, tensor_model_parallel_size="
            f"{parallel_state.get_tensor_model_parallel_world_size()} gives it parts of them"
        )


def _layout(part: MegatronOptimizer) -> Layout:
    """In which the squares of norms are summed over the ranks that hold the other parts."""
    found, parameters = list(_shards_of(part)), parameters_of(part)
    over: tuple[dist.ProcessGroup, ...] = (part.data_parallel_group,) if isinstance(part, DistributedOptimizer) else ()
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    return Layout(
        [Blocks.of(parameter, (*over, *_tensor_groups(parameter))) for parameter in parameters],
        {shard.main: (numbers[shard.parameter], shard.start) for shard in found},
    )


def _tensor_groups(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Over which the parameter is cut; what tensor parallel ranks have replicas of is cut over none."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return ()
    if is_expert(parameter):
        # They bear the mark at expert tensor parallel size 1 too, where they are whole.
        return (parallel_state.get_expert_tensor_parallel_group(),)
    return (parallel_state.get_tensor_model_parallel_group(),)


@contextlib.contextmanager
def _standing_in(make: Make) -> Iterator[None]:
    version = check_version()
    for module, name in _STAND_INS:
        if not hasattr(module, name):
            raise UserError(f"megatron-core {version} has no {module.__name__}.{name}, which megatron_patch replaces")
    before = [getattr(module, name) for module, name in _STAND_INS]
    values = (lambda params, **of_adam: make(params), False, Optimizer)
    try:
        for (module, name), value in zip(_STAND_INS, values, strict=True):
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in zip(_STAND_INS, before, strict=True):
            setattr(module, name, value)
