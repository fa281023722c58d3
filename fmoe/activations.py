"""Activations in fewer bytes: what autograd keeps for the backward pass, encoded by hooks on saved tensors.

Encodings of Gist (Jain et al., ISCA 2018), by name:

- ``mask``: one bit per element of a bool tensor; of a tensor of which at least half is zero, such as the output of a
  ReLU or a dropout, one bit per element and the others' values. Exact.
- ``bf16`` and ``int8``: values in 16 bits, or in 8 bits with a scale per 256 elements. Gradients are rounded.
- ``offload``: in host memory. Exact. For CPUs, a copy.

Recomputation (``parallel.recompute``) saves more than all of these, and is exact.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from fmoe.bits import pack_bits, unpack_bits
from fmoe.errors import UserError

MODES = ("mask", "bf16", "int8", "offload")
_BLOCK = 256
_SMALLEST = 4096  # smaller tensors are kept as they are, such as scores of a router and statistics of a norm


class SavedActivations(saved_tensors_hooks):
    """Context for a forward pass, whose activations autograd then keeps encoded.

    Parameters and tensors with fewer than 4,096 elements are kept as they are, as are integers but for ``offload``, and
    tensors with infinite elements in ``int8``. A tensor that several operations save is encoded once.

    Args:
        mode: encoding, one of `MODES`.
        parameters: the model's parameters.

    Attributes:
        held: bytes of activations that autograd holds now, encoded or not.
        peak: the largest value of `held` so far.

    Raises:
        UserError: the mode is unknown.
    """

    def __init__(self, mode: str, parameters: Iterable[Tensor] = ()):
        if mode not in MODES:
            raise UserError(f"activations={mode!r} is not one of {', '.join(MODES)}")
        self._encode = _ENCODINGS[mode]
        whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
        self._own = {parameter.untyped_storage().data_ptr() for parameter in whole}
        self._known: dict[tuple, weakref.ref[_Encoded]] = {}
        self.held = 0
        self.peak = 0
        super().__init__(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> "Tensor | _Encoded":
        whole = tensor if tensor._base is None else tensor._base
        is_weight = tensor.untyped_storage().data_ptr() in self._own or (whole.is_leaf and whole.requires_grad)
        if is_weight or type(tensor) is not Tensor:
            return tensor
        # The weak reference keeps the storage's identity from being used again.
        storage = StorageWeakRef(tensor.untyped_storage())
        place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor._version)
        key = (storage, *place)
        known = self._known.get(key)
        encoded = None if known is None else known()
        if encoded is None:
            found = self._encode(tensor.detach()) if tensor.numel() >= _SMALLEST else None
            encoded = _Encoded(*(found or ((tensor.detach(),), _unchanged, (tensor._version,))))
            self.held += encoded.nbytes
            self.peak = max(self.peak, self.held)
            weakref.finalize(encoded, self._forget, key, encoded.nbytes).atexit = False
            self._known[key] = weakref.ref(encoded)
        return encoded

    def _forget(self, key: tuple, nbytes: int) -> None:
        self.held -= nbytes
        del self._known[key]


class _Encoded:
    """Tensors that encode another, and the function that decodes them."""

    def __init__(self, tensors: tuple[Tensor, ...], decode: Callable[..., Tensor], options: tuple[Any, ...]):
        self.tensors = tensors
        self.decode = decode
        self.options = options
        self.nbytes = sum(tensor.nbytes for tensor in tensors)


def _unpack(saved: "Tensor | _Encoded") -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.decode(*saved.tensors, *saved.options)


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    if tensor._version != version:
        shape = list(tensor.shape)
        raise RuntimeError(f"a tensor of shape {shape}, which the backward pass needs, was changed in place")
    return tensor


_Found = tuple[tuple[Tensor, ...], Callable[..., Tensor], tuple[Any, ...]] | None


def _like(tensor: Tensor) -> Tensor:
    """Return a meta tensor with the shape, strides and dtype of another."""
    return torch.empty_like(tensor, device="meta")


def _restored(values: Tensor, like: Tensor) -> Tensor:
    """Return flat values in row-major order as a tensor with the shape, strides and dtype of ``like``."""
    return torch.empty_like(like, device=values.device).copy_(values.view(like.shape))


def _to_bf16(tensor: Tensor) -> _Found:
    if tensor.dtype not in (torch.float32, torch.float64):
        return None
    return (tensor.to(torch.bfloat16),), Tensor.to, (tensor.dtype,)


def _to_int8(tensor: Tensor) -> _Found:
    if not tensor.is_floating_point():
        return None
    flat = tensor.reshape(-1).float()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % _BLOCK)).view(-1, _BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    if not scales.isfinite().all():  # such as a mask with -inf
        return None
    codes = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8)
    return (codes, scales), _from_int8, (_like(tensor),)


def _from_int8(codes: Tensor, scales: Tensor, like: Tensor) -> Tensor:
    return _restored((codes * scales).view(-1)[: like.numel()], like)


def _to_mask(tensor: Tensor) -> _Found:
    flat = tensor.reshape(-1)
    if tensor.dtype == torch.bool:
        return (pack_bits(flat),), _from_bits, (_like(tensor),)
    if not tensor.is_floating_point():
        return None
    is_set = flat != 0
    count = int(is_set.sum())
    if 2 * count > flat.numel():
        return None
    return (pack_bits(is_set), flat[is_set]), _from_mask, (_like(tensor),)


def _from_mask(bits: Tensor, values: Tensor, like: Tensor) -> Tensor:
    flat = torch.zeros(like.numel(), dtype=like.dtype, device=values.device)
    flat[unpack_bits(bits, like.numel())] = values
    return _restored(flat, like)


def _from_bits(bits: Tensor, like: Tensor) -> Tensor:
    return _restored(unpack_bits(bits, like.numel()), like)


def _to_host(tensor: Tensor) -> _Found:
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    copy.copy_(tensor, non_blocking=tensor.is_cuda)
    return (copy,), _from_host, (tensor.device,)


def _from_host(copy: Tensor, device: torch.device) -> Tensor:
    return copy.to(device, non_blocking=device.type == "cuda")


_ENCODINGS: dict[str, Callable[[Tensor], _Found]] = {
    "mask": _to_mask,
    "bf16": _to_bf16,
    "int8": _to_int8,
    "offload": _to_host,
}
