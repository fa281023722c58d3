"""What FMoE layers need changed in megatron-core on any device. `PATCHES` is all of it, each entry with its reason.

`install` is called by `megatron_patch.cpu.install` and by the first layer that is made; call it before a model is
built for sequence parallelism without Transformer Engine.
"""

import copy
import functools
from collections.abc import Callable

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from fmoe.runtime import ownership
from megatron_patch import loss_scale
from megatron_patch.patches import Patch, apply
from megatron_patch.version import check_version

# Marks parameters whose gradients are parts on each tensor parallel rank, though the model is not sequence parallel.
PARTIAL = "is_partial_over_tensor_ranks"


def announce_experts(config: TransformerConfig, num_experts: int) -> None:
    """Have Megatron's schedule scale auxiliary losses for models of this config: it looks at ``num_moe_experts`` alone.

    A layer does so for its own config. Models of several configs (stacks, pipeline chunks) need it in each: the
    schedule looks into one of them, whichever holds the layers.
    """
    config.num_moe_experts = num_experts


def _sum_partial_gradients(reduce: Callable) -> Callable:
    """Megatron's sums over tensor parallel ranks, which are for sequence parallel models alone, and ours."""

    @functools.wraps(reduce)
    def reduced(model, config, tp_group=None, *args, **kwargs):
        reduce(model, config, tp_group, *args, **kwargs)
        group = parallel_state.get_tensor_model_parallel_group() if tp_group is None else tp_group
        if group.size() == 1:
            return
        marked = (p for chunk in model for p in chunk.parameters() if p.requires_grad and getattr(p, PARTIAL, False))
        grads = [p.main_grad if hasattr(p, "main_grad") else p.grad for p in marked]
        if grads := [grad for grad in grads if grad is not None]:
            flat = _flatten_dense_tensors(grads)
            dist.all_reduce(flat, group=group)
            for grad, total in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
                grad.copy_(total)

    return reduced


def _norm_of_slices(new: Callable) -> staticmethod:
    """torch's norms on slices of sequences: each token by itself, and gradients that Megatron sums over the slices."""

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
    """``fp8`` as what it is: off where there is no Transformer Engine."""

    @functools.wraps(init)
    def wrapped(self, fp8=False, *args, **kwargs):
        init(self, fp8, *args, **kwargs)
        from megatron.core.tensor_parallel import random

        self.fp8 = bool(fp8) and random.HAVE_TE

    return wrapped


def _with_marks(init: Callable) -> Callable:
    """Mark the experts' parameters of now, before the wrapper reads the marks."""

    @functools.wraps(init)
    def wrapped(self, *args, **kwargs):
        ownership.refresh()
        init(self, *args, **kwargs)

    return wrapped


PATCHES = (
    Patch(
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
        "__init__",
        _with_marks,
        "the wrapper reads `allreduce` of each parameter, which one that replaced another has lost "
        "(distributed_data_parallel.py:122)",
    ),
    Patch(
        "megatron.core.distributed.finalize_model_grads",
        "_allreduce_non_tensor_model_parallel_grads",
        _sum_partial_gradients,
        "tensor parallel ranks without sequence parallelism route a slice each, and gates' gradients are parts "
        "(finalize_model_grads.py:354 sums such under sequence parallelism alone)",
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
        "recomputation of norms reads a name that is unset without Transformer Engine (random.py:589)",
    ),
    Patch(
        "megatron.core.optimizer.optimizer:ChainedOptimizer",
        "__init__",
        loss_scale.share,
        "fp16: dense parameters and experts have a scale each, and the loss has the first one's (optimizer.py:1139)",
    ),
    Patch(
        "megatron.core.optimizer.optimizer:ChainedOptimizer",
        "prepare_grads",
        loss_scale.settle_together,
        "fp16: each part moves the scale by what it found, and each copy of a parameter by itself (optimizer.py:456)",
    ),
)

_installed = False


def install() -> None:
    """Puts `PATCHES` in, for the rest of the process. Safe to call again.

    Raises:
        UserError: megatron-core is outside the supported range, or a patched name has moved.
    """
    global _installed
    version = check_version()
    if not _installed:
        apply(PATCHES, version)
        _installed = True
