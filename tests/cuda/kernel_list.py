"""The instances that are tested, by source. Not a test itself."""

from itertools import product

import torch

NAMES = {torch.float32: "float", torch.float16: "fmoe::f16", torch.bfloat16: "fmoe::bf16"}
T = list(NAMES.values())
PLAN = ("count_tiles", "scan_tiles", "place", "drop_over_capacity", "segment_order")
ROUTE_ITEMS = (0, 1, 2, 4, 8)


def _of(kernel: str, *arguments) -> list[str]:
    return [f"fmoe::{kernel}<{', '.join(map(str, given))}>" for given in product(*arguments)]


# All that the loader may ask for.
KERNELS = {
    "route.cu": (*_of("route", T, ROUTE_ITEMS), *_of("route_backward", T)),
    "plan.cu": tuple(f"fmoe::{name}" for name in PLAN),
    "rows.cu": (
        *_of("gather", T, T),
        *_of("combine", T),
        *_of("combine_backward", T),
        *_of("add_bias", T),
        *_of("column_sums", T, T),
    ),
    "activation.cu": (
        *_of("activate", T, range(4), ("false", "true")),
        *_of("activate_backward", T, range(4), ("false", "true")),
    ),
    "lamb.cu": (*_of("lamb_measure", T, T), "fmoe::lamb_norms", *_of("lamb_update", T)),
}
