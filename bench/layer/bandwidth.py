"""Bandwidth of the memory-bound CUDA kernels of a shape: bytes that they must move per second, relative to a copy.

Bytes are those of docs/kernels.md: each input read once, each output written once. Shape letters: T tokens, D width, H
hidden width, P height of the first map, E experts, K choices, N = T * K assignments.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bench import frame
from bench.layer.problem import Problem, forced_choices
from fmoe.kernels.cuda import calls

COPY = "copy on the device"
_COPIED = 1 << 30  # bytes: more than any cache holds


@dataclass(frozen=True)
class Kernel:
    """One launch (three for ``place``).

    Args:
        bytes_moved: bytes read and written.
        step: launches the kernel.
    """

    name: str
    bytes_moved: int
    step: Callable[[], object]


def kernels_of(problem: Problem) -> Iterator[Kernel]:
    """Return the kernels that a layer of this shape runs, with even loads and nothing dropped."""
    shape = problem.shape
    dtype = problem.dtype
    device = problem.device
    t = shape.tokens
    d = shape.d_model
    h = shape.d_hidden
    p = shape.height
    e = shape.num_experts
    k = shape.top_k
    n = shape.rows
    size = dtype.itemsize
    expert_TK = forced_choices(shape, 1.0, torch.Generator().manual_seed(0)).to(device)
    order, place_N, _, _, end, kept = calls.place(expert_TK.view(-1), e)
    place_TK = place_N.view(t, k)
    code = 3 if shape.gated else 0
    new = functools.partial(torch.randn, dtype=dtype, device=device)
    x_TD = new(t, d)
    rows_ND = new(n, d)
    hidden_NP = new(n, p)
    active_NH = new(n, h)
    weight_TK = torch.rand(t, k, device=device)
    logits_TE = torch.randn(t, e, device=device)
    call = functools.partial
    yield Kernel("route", 4 * t * (2 * e + k + 2) + 8 * n, call(calls.route, logits_TE, None, None, k, calls.Rule()))
    yield Kernel("place", 25 * n + 12 * e, call(calls.place, expert_TK.view(-1), e))
    yield Kernel("gather", size * d * (t + n) + 8 * n, call(calls.gather, x_TD, order, k, n, limit=kept))
    activate = call(calls.activate, hidden_NP, None, end, kept, code, shape.gated)
    yield Kernel("activate", size * n * (p + h), activate)
    backward = call(calls.activate_backward, hidden_NP, active_NH, weight_TK.view(-1), order, kept, code, shape.gated)
    yield Kernel("activate_backward", size * n * 2 * (p + h) + 16 * n, backward)
    combine = call(calls.combine, rows_ND, place_TK, weight_TK, kept)
    yield Kernel("combine", size * d * (n + t) + 12 * n, combine)
    backward = call(calls.combine_backward, x_TD, rows_ND, place_TK, weight_TK, kept)
    yield Kernel("combine_backward", size * d * (2 * n + t) + 16 * n, backward)


def measure(problem: Problem, label: str, rounds: int, seed: int, clock: Callable[[], float]) -> frame.Measurement:
    """Time each kernel next to a copy of 1 GiB; work is bytes, so that throughput is bytes per second."""
    source = torch.empty(_COPIED, dtype=torch.uint8, device=problem.device)
    target = torch.empty_like(source)
    entries = [frame.Contender(COPY, lambda: lambda: target.copy_(source), 2.0 * _COPIED)]
    entries += [frame.Contender(k.name, lambda k=k: k.step, float(k.bytes_moved)) for k in kernels_of(problem)]
    measured = frame.measure(
        entries,
        rounds=rounds,
        warmup=3,
        reference=COPY,
        seed=seed,
        min_seconds=0.01,
        label=label,
        unit="bytes",
        clock=clock,
    )
    copy = measured.throughput(COPY)
    for name in measured.seconds:
        speed = measured.throughput(name)
        measured.facts[name] = {"GB/s": f"{speed / 1e9:.0f}", "of the copy": f"{speed / copy:.3f}" if copy else ""}
    return measured
