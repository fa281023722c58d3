"""The CUDA kernels (docs/kernels.md): their source files, compiled instances and limits."""

import itertools
from collections.abc import Iterable

import torch

DTYPES = {torch.float32: "float", torch.float16: "fmoe::f16", torch.bfloat16: "fmoe::bf16"}

ROUTE_WIDTHS = (1, 2, 4, 8)  # experts per lane of a warp, for up to 32 times as many experts; width 0 for more
# Experts and segments whose counters fit into the shared memory of a thread block (`calls.place`, `segment_order`).
MAX_EXPERTS = 4094
MAX_SEGMENTS = 4080


_T = tuple(DTYPES.values())


def _each(kernel: str, *words: Iterable) -> tuple[str, ...]:
    return tuple(f"fmoe::{kernel}<{', '.join(map(str, chosen))}>" for chosen in itertools.product(*words))


def _activations(kernel: str) -> tuple[str, ...]:
    return _each(kernel, _T, range(4), ("false", "true")) + _each(kernel, _T, (4,), ("true",))


# Kernels that `fmoe.kernels` calls. Routers take only float32 logits.
KERNELS: dict[str, tuple[str, ...]] = {
    "route.cu": _each("route", ("float",), (*ROUTE_WIDTHS, 0))
    + _each("route_backward", ("float",), ("float", "fmoe::bf16")),
    "plan.cu": tuple(
        f"fmoe::{kernel}"
        for kernel in ("count_tiles", "place", "count_choices", "queue", "drop_over_capacity", "segment_order")
    ),
    "rows.cu": sum(
        (_each(kernel, _T) for kernel in ("combine", "combine_backward", "bias_gradients", "jitter", "add_bias")),
        _each("gather", _T, _T),
    ),
    "activation.cu": _activations("activate") + _activations("activate_backward"),
    "lamb.cu": (
        *_each("lamb_measure", sorted({f"{t}, {grad}" for t in _T for grad in (t, "float")})),
        "fmoe::lamb_norms",
        *_each("lamb_update", _T),
    ),
}
