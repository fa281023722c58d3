"""Initial weights of stacked experts, drawn on the device of the parameters and equal bit for bit on every device.

The numbers come from a counter-based hash (`fmoe.random`), by operations whose rounding IEEE 754 defines. For
parameters on the CPU, the native backend computes the same bits in one pass. Without it, a GPU with kernels does.

Shape letters: L experts of this rank.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fmoe import random
from fmoe.kernels import backends

_AT_ONCE = 3 << 13  # numbers that fit into a processor's cache, and that torch computes in one thread
_AT_ONCE_ON_GPU = 1 << 24


def draw(keys: Sequence[int], count: int, device: torch.device, scale: float, is_normal: bool) -> Tensor:
    """Return random numbers of mean 0, float32 [len(keys), count]; row l depends only on ``keys[l]``.

    Args:
        scale: bound of the uniform numbers, or standard deviation of the normal ones.
        is_normal: draw normal numbers, within 4.62 standard deviations, instead of uniform ones.
    """
    keys_L = torch.tensor(keys, dtype=torch.int64, device="cpu").to(device)
    if device.type == "cpu" and type(keys_L) is Tensor:  # not a fake tensor
        if backends.native_is_loaded:
            ends = random.normal_ends(device) if is_normal else None
            return torch.ops.fmoe_native.draw(keys_L, count, scale, ends)
        if (gpu := backends.current_gpu()) is not None:
            return draw(keys, count, gpu, scale, is_normal).to(device)
    step = max(1, (_AT_ONCE_ON_GPU if device.type == "cuda" else _AT_ONCE) // max(1, len(keys)))
    out = torch.empty(len(keys), count, dtype=torch.float32, device=device)
    for start in range(0, count, step):
        size = min(step, count - start)
        if is_normal:
            part = random.exact_normal(keys_L, size, start)
        else:
            part = random.uniform(keys_L, size, start).mul_(2).sub_(1)  # exact
        out[:, start : start + size] = part.mul_(scale)
    return out


def normal_of(method: Callable[[Tensor], object] | None) -> tuple[float, float] | None:
    """Return (mean, standard deviation) if ``method`` is `torch.nn.init.normal_`; otherwise None.

    The same holds for a ``functools.partial`` of that function that sets only the keywords ``mean`` and ``std``, which
    Megatron-core uses.
    """
    if method is nn.init.normal_:
        return 0.0, 1.0
    if not isinstance(method, functools.partial) or method.func is not nn.init.normal_ or method.args:
        return None
    options = dict(method.keywords)
    mean = options.pop("mean", 0.0)
    std = options.pop("std", 1.0)
    return None if options else (mean, std)


def reset(module: Any) -> None:
    """Call ``reset_parameters`` of ``module``, or of its submodules if ``module`` has no such method.

    A function, such as a gate without parameters, is left unchanged.
    """
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    elif isinstance(module, nn.Module):
        for child in module.children():
            reset(child)
