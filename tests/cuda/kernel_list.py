"""The instances that are tested, by source. Not a test itself."""

from itertools import product

import torch

NAMES = {torch.float32: "float", torch.float16: "fmoe::f16", torch.bfloat16: "fmoe::bf16"}
T = list(NAMES.values())
PLAN = ("count_tiles", "place", "count_choices", "queue", "drop_over_capacity", "segment_order")
ROUTE_ITEMS = {"float": (0, 1, 2, 4, 8), "fmoe::f16": (0, 8), "fmoe::bf16": (0, 8)}  # routers run in float32
SAME_OR_FLOAT = [f"{a}, {b}" for a, b in product(T, T) if b in (a, "float")]


def _of(kernel: str, *arguments) -> list[str]:
    return [f"fmoe::{kernel}<{', '.join(map(str, given))}>" for given in product(*arguments)]


# All that the loader may ask for.
KERNELS = {
    "route.cu": (
        *(f"fmoe::route<{t}, {items}>" for t in T for items in ROUTE_ITEMS[t]),
        *_of("route_backward", T, T),
    ),
    "plan.cu": tuple(f"fmoe::{name}" for name in PLAN),
    "rows.cu": (
        *_of("gather", T, T),
        *_of("combine", T),
        *_of("combine_backward", T),
        *_of("bias_gradients", T),
        *_of("jitter", T),
        *_of("add_bias", T),
    ),
    "activation.cu": (
        *_of("activate", T, range(4), ("false", "true")),
        *_of("activate", T, (4,), ("true",)),
        *_of("activate_backward", T, range(4), ("false", "true")),
        *_of("activate_backward", T, (4,), ("true",)),
    ),
    "lamb.cu": (*_of("lamb_measure", SAME_OR_FLOAT), "fmoe::lamb_norms", *_of("lamb_update", T)),
}
