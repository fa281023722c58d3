"""Launches of a layer's passes on a GPU, counted on the CPU. Not a test itself.

A `Counter` sees every operation of torch under the layer, and looks into the operations of the library. A kernel of
``cuda/`` is one launch. An operation of torch is one launch if it returns or changes a tensor and is neither a view nor
an allocation: `F.grouped_mm`, for example, counts as one.
"""

from collections import Counter as Counts

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fmoe.kernels.cuda import router

# Operations that launch nothing: allocations, and views that an alias annotation does not mark.
FREE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "_unsafe_view"}


class LaunchCounter(TorchDispatchMode):
    """Counts launches by name.

    Args:
        launcher: `cpu_launcher.CpuLauncher`, whose launches count by their kernels' names.
    """

    def __init__(self, launcher):
        super().__init__()
        self._launcher = launcher
        self._before = len(launcher.launched)
        self._operations: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace.startswith("fmoe"):
            with self:
                return OPDEFS[f"{func.namespace}::{func._opname}"]._init_fn(*args, **kwargs)
        out = func(*args, **kwargs)
        if self._is_launch(func, args, kwargs, out):
            self._operations.append(func._opname)
        return out

    @staticmethod
    def _is_launch(func, args, kwargs, out):
        if func._opname in FREE or func.is_view:
            return False
        returned = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # Copies of a tensor to its own dtype return it.
        if not func._schema.is_mutable and any(one is other for one in returned for other in given):
            return False
        return bool(returned) and any(tensor.numel() for tensor in returned)

    @property
    def counts(self) -> Counts:
        """Launches by name since the start; kernels of ``cuda/`` without their template arguments."""
        kernels = [name.partition("<")[0] for name in self._launcher.launched[self._before :]]
        return Counts(self._operations) + Counts(kernels)

    def take(self) -> Counts:
        """Return the counts, and start again at zero."""
        found = self.counts
        self._operations = []
        self._before = len(self._launcher.launched)
        return found


def products_of_a_gpu(monkeypatch) -> None:
    """Replace `router._product32` by one launch, as on a GPU: the CPU has no products of 16-bit factors in float32."""

    def product(a, b, addend=None):
        with torch._C._DisableTorchDispatch():
            a = a.float()
            b = b.float()
        return torch.mm(a, b) if addend is None else torch.addmm(addend, a, b)

    monkeypatch.setattr(router, "_product32", product)
