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
        is_backward = isinstance(step, Operation) and step.is_backward
        host = cluster.device.host_backward if is_backward else cluster.device.host
        if host:
            seconds["host"] += count * host
        if isinstance(step, Collective):
            term = "exchange" if "alltoall" in step.kind else "groups"
            seconds[term] += count * _collective(cluster, step)
        else:
            term, of_one = operation_seconds(cluster, step)
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


def update_bytes(precision: str, parameters: float, state: float) -> float:
    """Return the bytes that the optimizer reads and writes.

    State is read and written, fp32 gradients are read for the norm and for the step, and weights are written.

    Args:
        precision: dtype of the weights.
        parameters: their number.
        state: bytes of master weights and moments.
    """
    return 2 * state + parameters * (2 * 4 + DTYPES[precision].itemsize)


def dtype_name(step: Operation) -> str:
    """Return the dtype of an operation's result; fp32 for those that no recipe names, such as integers."""
    return _NAMES.get(step.dtype, "fp32")


def operation_seconds(cluster: Cluster, operation: Operation) -> tuple[str, float]:
    """Return the term and the seconds of an operation."""
    name = operation.name
    dtype = dtype_name(operation)
    if "empty" in name:
        return "memory", 0.0
    factor = cluster.in_step(name, operation.moved, dtype)
    if "scaled_dot_product" in name:
        is_backward = "backward" in name
        *batch, length, width = operation.shapes[int(is_backward)]
        return "attention", factor * cluster.attention_seconds(math.prod(batch), length, width, dtype, is_backward)
    if "expert_ffn" in name:
        w_in, w_out, *_ = (shape for shape in operation.shapes if len(shape) == 3)
        num_experts, width, d_model = w_in
        d_hidden = w_out[2]
        is_backward = "backward" in name
        rows = operation.flops / ((2 if is_backward else 1) * 2 * d_model * (width + d_hidden))
        as_two_products = d_hidden * (1.5 if width > d_hidden else 1.0)
        sizes = (num_experts, max(rows / num_experts, 1.0), d_model, as_two_products)
        return "experts", factor * cluster.experts_seconds(*sizes, dtype, is_backward)
    if operation.flops:
        *batch, m, k = next(shape for shape in operation.shapes if len(shape) >= 2)
        size = math.prod(batch)
        n = max(operation.flops / (2 * m * k * size), 1.0)
        return "gemm", factor * cluster.gemm_seconds(m, k, n, dtype, size)
    return "memory", cluster.operation_seconds(name, operation.moved, dtype)
