"""Patches of megatron-core: the class `Patch`, and the patches for any device (`PATCHES`).

`install` applies the patches. The first `MegatronMoE` layer, `megatron_patch.optimizer.build_optimizer` and
`megatron_patch.cpu.install` call it. Call it yourself before you build a sequence parallel model without Transformer
Engine.
"""

import copy
import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import DistributedOptimizer
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from fmoe.errors import UserError
from fmoe.runtime import ownership
from megatron_patch import deferred_linear, loss_scale, versions

# Marks parameters whose gradients are partial sums on each tensor parallel rank without sequence parallelism.
PARTIAL = "is_partial_over_tensor_ranks"


@dataclass(frozen=True)
class Patch:
    """Replacement of one attribute of a module or class.

    Attributes:
        module, name: where the attribute is, and its name; ``module`` is "module:Class" for a method.
        make: function of the old value that returns the new one.
        reason: what fails without the patch. Files and lines are those of megatron-core 0.16.1.
        required: if True, `apply` raises an error when the module or class lacks the name.
    """

    module: str
    name: str
    make: Callable[[Any], Any]
    reason: str
    required: bool = True

    def holder(self) -> Any:
        """Return the module or class whose attribute is replaced."""
        module, _, owner = self.module.partition(":")
        imported = importlib.import_module(module)
        return getattr(imported, owner) if owner else imported


def apply(patches: Iterable[Patch]) -> None:
    """Apply all patches; if an error is raised, apply none.

    Raises:
        UserError: the version of megatron-core is not supported, or lacks a function or class that a patch replaces.
    """
    installed = versions.check()
    holders = []
    for patch in patches:
        try:
            holder = patch.holder()
        except (ModuleNotFoundError, AttributeError):
            holder = None
        if holder is None or (patch.required and not hasattr(holder, patch.name)):
            raise UserError(
                f"megatron-core {installed} has no {patch.module}.{patch.name}, which megatron_patch replaces"
            )
        holders.append((holder, patch))
    for holder, patch in holders:
        setattr(holder, patch.name, patch.make(getattr(holder, patch.name, None)))


def _sum_partial_gradients(reduce: Callable) -> Callable:
    """Wrap ``reduce`` to also sum the gradients of parameters marked with `PARTIAL` over tensor parallel ranks."""

    @functools.wraps(reduce)
    def reduced(model, config, tp_group=None, *args, **kwargs):
        reduce(model, config, tp_group, *args, **kwargs)
        group = parallel_state.get_tensor_model_parallel_group() if tp_group is None else tp_group
        if group.size() == 1:
            return
        marked = (p for chunk in model for p in chunk.parameters() if p.requires_grad and getattr(p, PARTIAL, False))
        grads = [p.main_grad if hasattr(p, "main_grad") else p.grad for p in marked]
        grads = [grad for grad in grads if grad is not None]
        if grads:
            flat = _flatten_dense_tensors(grads)
            dist.all_reduce(flat, group=group)
            for grad, total in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
                grad.copy_(total)

    return reduced


def _norm_of_slices(new: Callable) -> staticmethod:
    """Wrap ``WrappedTorchNorm.__new__`` to accept sequence parallelism, and have Megatron-core sum the gradients."""

    @functools.wraps(new)
    def made(cls, config, *args, **kwargs):
        if not config.sequence_parallel:
            return new(cls, config, *args, **kwargs)
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = new(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return staticmethod(made)


def _without_fp8(init: Callable) -> Callable:
    """Wrap a constructor to set ``self.fp8`` to False if Transformer Engine is missing."""

    @functools.wraps(init)
    def wrapped(self, fp8=False, *args, **kwargs):
        init(self, fp8, *args, **kwargs)
        from megatron.core.tensor_parallel import random

        self.fp8 = bool(fp8) and random.HAVE_TE

    return wrapped


def _with_marks(init: Callable) -> Callable:
    """Wrap a constructor to first set attributes such as ``allreduce`` on fmoe's parameters."""

    @functools.wraps(init)
    def wrapped(self, *args, **kwargs):
        ownership.refresh()
        init(self, *args, **kwargs)

    return wrapped


def _count_experts_by_their_group(init: Callable) -> Callable:
    """Wrap a constructor so that the gradient norm uses the expert tensor parallel group for experts."""

    @functools.wraps(init)
    def wrapped(self, chained_optimizers, *args, **kwargs):
        init(self, chained_optimizers, *args, **kwargs)
        group = parallel_state.get_expert_tensor_parallel_group(check_initialized=False)
        for part in chained_optimizers:
            is_expert = [groups.get("is_expert_parallel", False) for groups in part.param_groups]
            if group is not None and is_expert and all(is_expert) and hasattr(part, "tp_group"):
                part.tp_group = group

    return wrapped


def _gather_once(step: Callable) -> Callable:
    """Wrap ``step`` so that only the last optimizer of a model chunk gathers the chunk's parameters."""

    @functools.wraps(step)
    def wrapped(self):
        # Other optimizers that gather, such as a chain in this chain, gather only what they step.
        parts = [part for part in self.chained_optimizers if isinstance(part, DistributedOptimizer)]
        if (
            len(parts) < 2
            or self.config.overlap_param_gather_with_optimizer_step
            or any(part.ddp_config.use_megatron_fsdp for part in parts)
        ):
            return step(self)
        chunks = [part.model_chunks for part in parts]
        try:
            for index, part in enumerate(parts):
                later = [chunk for own in chunks[index + 1 :] for chunk in own]
                part.model_chunks = [chunk for chunk in chunks[index] if chunk not in later]
            return step(self)
        finally:
            for part, own in zip(parts, chunks, strict=True):
                part.model_chunks = own

    return wrapped


def _norm_without_waits(norm: Callable) -> Callable:
    """Return a norm over a list of tensors in place of megatron-core's own; keep that of TransformerEngine or apex."""
    from megatron.core.utils import local_multi_tensor_l2_norm

    def total_norm(chunk_size, noop_flag, tensor_lists, per_tensor):
        return torch.nn.utils.get_total_norm(tensor_lists[0]).float().view(1), None

    return total_norm if norm is local_multi_tensor_l2_norm else norm


def _is_engine_installed(claimed: bool) -> bool:
    from megatron.core.extensions import transformer_engine

    return claimed and transformer_engine.HAVE_TE


_LINEAR = "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication"

PATCHES = (
    Patch(
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
        "__init__",
        _with_marks,
        "the wrapper reads `allreduce` of each parameter, which parameters that replaced others lack "
        "(distributed_data_parallel.py:122)",
    ),
    Patch(
        "megatron.core.distributed.finalize_model_grads",
        "_allreduce_non_tensor_model_parallel_grads",
        _sum_partial_gradients,
        "tensor parallel ranks without sequence parallelism route a slice each, so gradients of gates are partial "
        "sums, which finalize_model_grads.py:354 adds up only under sequence parallelism",
    ),
    Patch(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm",
        "__new__",
        _norm_of_slices,
        "the norm without Transformer Engine refuses sequence parallelism (torch_norm.py:32)",
    ),
    Patch(
        "megatron.core.tensor_parallel.random:CheckpointWithoutOutput",
        "__init__",
        _without_fp8,
        "recomputation of norms reads a name that is undefined without Transformer Engine (random.py:589)",
    ),
    Patch(
        "megatron.core.optimizer.optimizer:ChainedOptimizer",
        "__init__",
        loss_scale.share,
        "fp16: dense parameters and experts have one scale each, and the loss uses the first (optimizer.py:1139)",
    ),
    Patch(
        "megatron.core.optimizer.optimizer:ChainedOptimizer",
        "__init__",
        _count_experts_by_their_group,
        "before 0.19: the gradient norm counts experts' parameters without `tensor_model_parallel` only on the first "
        "tensor parallel rank, although the ranks hold different experts (optimizer.py:156)",
    ),
    Patch(
        "megatron.core.optimizer.optimizer:ChainedOptimizer",
        "prepare_grads",
        loss_scale.settle_together,
        "fp16: each optimizer, and each replica of a parameter, updates the scale by its own overflows "
        "(optimizer.py:456)",
    ),
    Patch(
        "megatron.core.optimizer.optimizer:ChainedOptimizer",
        "step_with_ready_grads",
        _gather_once,
        "the optimizers of dense parameters and of experts each gather all parameters: twice the bytes "
        "(distrib_optimizer.py:2618)",
    ),
    Patch(
        "megatron.core.optimizer.clip_grads",
        "l2_norm_impl",
        _norm_without_waits,
        "without TransformerEngine and apex, the host waits for the GPU once per parameter (utils.py:1205)",
    ),
    Patch(
        "megatron.core.transformer.multi_latent_attention",
        "HAVE_TE",
        _is_engine_installed,
        "0.16.1: True without Transformer Engine, whose classes are then stand-ins that isinstance refuses "
        "(multi_latent_attention.py:184)",
    ),
    Patch(_LINEAR, "forward", deferred_linear.mark_forward, "zero-bubble pipelines (layers.py:448)"),
    Patch(
        _LINEAR,
        "backward",
        deferred_linear.split_backward,
        "zero-bubble pipelines: computes both gradients in every pass (layers.py:495)",
    ),
)

_installed = False


def install() -> None:
    """Apply `PATCHES` for the rest of the process. Further calls do nothing.

    Raises:
        UserError: the version of megatron-core is not supported, or it lacks a name that a patch replaces.
    """
    global _installed
    if not _installed:
        apply(PATCHES)
        _installed = True
