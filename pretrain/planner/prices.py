"""Seconds of traced operations and collectives on a cluster."""

import math
from collections import defaultdict
from collections.abc import Mapping

from pretrain.models.config import DTYPES
from pretrain.planner.cluster import Cluster
from pretrain.planner.trace import Collective, Operation

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_KINDS = ("alltoall", "allgather", "reduce_scatter", "allreduce")


def steps_seconds(cluster: Cluster, steps: Mapping[Operation | Collective, int]) -> dict[str, float]:
    """Return the seconds of operations and collectives, by term.

    Terms are gemm, attention, experts, memory (operations that compute little), exchange (all-to-all), groups (other
    collectives), and host (its time before operations).
    Messages between pipeline stages are left out.
    """
    seconds: dict[str, float] = defaultdict(float)
    for step, count in steps.items():
        if cluster.device.host:
            seconds["host"] += count * cluster.device.host
        if isinstance(step, Collective):
            term = "exchange" if "alltoall" in step.kind else "groups"
            seconds[term] += count * _collective(cluster, step)
        else:
            term, of_one = _operation(cluster, step)
            seconds[term] += count * of_one
    return seconds


def _collective(cluster: Cluster, step: Collective) -> float:
    size = len(step.ranks)
    if step.kind in ("send", "recv") or size == 1:
        return 0.0
    kind = next((name for name in _KINDS if name in step.kind), "allgather")
    num_bytes = step.num_bytes * (size if step.kind == "allgather" else 1)  # whose output is a list of tensors
    name = {"alltoall": "all_to_all", "allgather": "all_gather", "allreduce": "all_reduce"}.get(kind, kind)
    return cluster.collective_seconds(name, size, (step.ranks[1] - step.ranks[0]) * size, num_bytes)


def _operation(cluster: Cluster, step: Operation) -> tuple[str, float]:
    dtype = _NAMES.get(step.dtype, "fp32")
    if "scaled_dot_product" in step.name:
        is_backward = "backward" in step.name
        *batch, length, width = step.shapes[int(is_backward)]
        return "attention", cluster.attention_seconds(math.prod(batch), length, width, dtype, is_backward)
    if "expert_ffn" in step.name:
        w_in, w_out, *_ = (shape for shape in step.shapes if len(shape) == 3)
        num_experts, width, d_model = w_in
        d_hidden = w_out[2]
        is_backward = "backward" in step.name
        rows = step.flops / ((2 if is_backward else 1) * 2 * d_model * (width + d_hidden))
        as_two_products = d_hidden * (1.5 if width > d_hidden else 1.0)
        sizes = (num_experts, max(rows / num_experts, 1.0), d_model, as_two_products)
        return "experts", cluster.experts_seconds(*sizes, dtype, is_backward)
    if step.flops:
        *batch, m, k = next(shape for shape in step.shapes if len(shape) >= 2)
        size = math.prod(batch)
        n = max(step.flops / (2 * m * k * size), 1.0)
        return "gemm", cluster.gemm_seconds(m, k, n, dtype, size)
    if "empty" in step.name:
        return "memory", 0.0
    return "memory", cluster.move_seconds(step.moved, dtype)
