"""The CUDA kernels (docs/kernels.md): their source files, compiled instances and limits."""

import itertools

import torch

DTYPES = {torch.float32: "float", torch.float16: "fmoe::f16", torch.bfloat16: "fmoe::bf16"}

ROUTE_WIDTHS = (1, 2, 4, 8)  # experts per lane of a warp, for up to 32 times as many experts; width 0 for more
# Experts and segments whose counters fit into the shared memory of a thread block (`calls.place`, `segment_order`).
MAX_EXPERTS, MAX_SEGMENTS = 4094, 4080


def _each(kernel: str, *arguments) -> tuple[str, ...]:
    return tuple(f"fmoe::{kernel}<{', '.join(map(str, words))}>" for words in itertools.product(*arguments))


_T = tuple(DTYPES.values())
_SAME = tuple(f"{t}, {t}" for t in _T)

# Kernels that `fmoe.kernels.cuda` and `fmoe.optim` call. Routers take only float32 logits.
KERNELS: dict[str, tuple[str, ...]] = {
    "route.cu": _each("route", ("float",), (*ROUTE_WIDTHS, 0))
    + _each("route_backward", ("float",), ("float", "fmoe::bf16")),
    "plan.cu": tuple(
        f"fmoe::{kernel}"
        for kernel in ("count_tiles", "place", "count_choices", "queue", "drop_over_capacity", "segment_order")
    ),
    "rows.cu": (
        *_each("gather", _T, _T),
        *_each("combine", _T),
        *_each("combine_backward", _T),
        *_each("bias_gradients", _T),
        *_each("jitter", _T),
        *_each("add_bias", _T),
    ),
    "activation.cu": (
        *_each("activate", _T, range(4), ("false", "true")),
        *_each("activate", _T, (4,), ("true",)),
        *_each("activate_backward", _T, range(4), ("false", "true")),
        *_each("activate_backward", _T, (4,), ("true",)),
    ),
    "lamb.cu": (
        *_each("lamb_measure", sorted({*_SAME, *(f"{t}, float" for t in _T)})),
        "fmoe::lamb_norms",
        *_each("lamb_update", _T),
    ),
}
