"""Tests of whether the native CPU kernels or the CUDA kernels accept given tensors.

CUDA kernels count as available on every device for which they are loaded. Tests load them for the CPU.
"""

import functools
from collections.abc import Set

import torch
from torch import Tensor
from torch.nn import functional as F

from fmoe.kernels.cuda import launch
from fmoe.kernels.cuda.instances import DTYPES, MAX_EXPERTS, MAX_SEGMENTS
from fmoe.kernels.glu import Activation, SwiGLUOAI

# Activations; the index is their number in the kernels (native/src/kernels.h, cuda/activation.cu).
ACTIVATIONS = (F.gelu, functools.partial(F.gelu, approximate="tanh"), F.relu, F.silu, SwiGLUOAI())

native_is_loaded = False  # set by `fmoe.kernels.native.ops.register`

_NATIVE_DTYPES = (torch.float32, torch.bfloat16)


def activation_code(activation: Activation) -> int | None:
    """Return the index of an activation in `ACTIVATIONS`; None if no kernel computes it."""
    if isinstance(activation, functools.partial) and activation.func is F.gelu and not activation.args:
        return {"none": 0, "tanh": 1}.get(activation.keywords.get("approximate", "none"))
    return ACTIVATIONS.index(activation) if activation in ACTIVATIONS else None


def native_takes_ffn(activation: Activation, devices: Set[torch.device], dtypes: Set[torch.dtype]) -> bool:
    """Return whether `fmoe.kernels.native.ops.expert_ffn` takes rows and parameters on these devices, in these dtypes.

    The native backend must be loaded, and the activation must be one of `ACTIVATIONS`. All tensors must be on the CPU,
    and have the same dtype: float32 or bfloat16.
    """
    return (
        native_is_loaded
        and activation_code(activation) is not None
        and all(device.type == "cpu" for device in devices)
        and len(dtypes) == 1
        and all(dtype in _NATIVE_DTYPES for dtype in dtypes)
    )


def cuda_is_loaded(device: torch.device) -> bool:
    """Return whether CUDA kernels are loaded for a device. torch.compile treats the result as a constant."""
    return bool(launch.launchers) and launch.launcher(device) is not None


def current_gpu() -> torch.device | None:
    """Return the current GPU if CUDA kernels are loaded for it, so that it has passed a self-check; else None."""
    if not launch.launchers or not torch.cuda.is_initialized():  # it is not in a process forked from one that has it
        return None
    gpu = torch.device("cuda", torch.cuda.current_device())
    return gpu if cuda_is_loaded(gpu) else None


# torch.compiler.assume_constant_result sets this, but it imports torch._dynamo, which takes as long as importing torch.
cuda_is_loaded._dynamo_marked_constant = True  # type: ignore[attr-defined]


def cuda_takes(*tensors: Tensor | None) -> bool:
    """Return whether all tensors are on one device with CUDA kernels, and have dtypes that the kernels support."""
    first = next(tensor for tensor in tensors if tensor is not None)
    return cuda_is_loaded(first.device) and all(
        t.device == first.device and (t.dtype in DTYPES or not t.is_floating_point()) for t in tensors if t is not None
    )


def cuda_takes_ffn(activation: Activation, devices: Set[torch.device], dtypes: Set[torch.dtype]) -> bool:
    """Return whether `fmoe.kernels.cuda.ffn.expert_ffn` takes rows and parameters on these devices, in these dtypes.

    The activation must be one of `ACTIVATIONS`. All tensors must have the same dtype, and be on one device with CUDA
    kernels.
    """
    return (
        activation_code(activation) is not None
        and len(devices) == len(dtypes) == 1
        and all(cuda_is_loaded(device) for device in devices)
        and all(dtype in DTYPES for dtype in dtypes)
    )


def cuda_takes_rows(rows: Tensor, *others: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether `fmoe.kernels.cuda.rows` can permute, combine and gather these rows.

    Args:
        others: other inputs of the operation, such as combine weights.
        dtype: dtype of the result; None for the dtype of the rows.
    """
    return (
        rows.dim() == 2
        and cuda_is_loaded(rows.device)
        and all(tensor.device == rows.device and tensor.dtype in DTYPES for tensor in (rows, *others))
        and (dtype is None or dtype in DTYPES)
    )


def cuda_takes_choices(expert_TK: Tensor, num_experts: int) -> bool:
    """Return whether CUDA kernels can sort the assignments ``expert_TK`` by expert, and drop those over capacity."""
    return cuda_takes(expert_TK) and num_experts <= MAX_EXPERTS


def cuda_takes_tokens(x_TD: Tensor, num_experts: int) -> bool:
    """Return whether CUDA kernels can route these tokens to ``num_experts`` experts."""
    return x_TD.is_floating_point() and num_experts <= MAX_EXPERTS and cuda_takes(x_TD)


def cuda_takes_segments(receive_S: Tensor) -> bool:
    """Return whether `fmoe.kernels.cuda.calls.segment_order` takes ``receive_S``, the number of rows of each segment.

    The tensor must be on a device with CUDA kernels, and have at most `MAX_SEGMENTS` elements.
    """
    return cuda_takes(receive_S) and len(receive_S) <= MAX_SEGMENTS
