"""The GEMM limits: the experts' FLOPs as plain GEMMs into allocated memory, a bound for layers with these GEMMs.

Shape letters: N rows (assignments), D width, H hidden width, P height of the first matrix, E experts.
"""

import functools
from collections.abc import Callable

import torch

from bench.layer.problem import Problem, even_counts

DENSE = "GEMM limit"
SPLIT = "GEMM limit over E"


def dense(problem: Problem, backward: bool) -> Callable[[], None]:
    """Return the step of the limit: one dense expert over all rows."""
    return _gemms(problem, backward, [problem.shape.rows])


def split(problem: Problem, backward: bool) -> Callable[[], None]:
    """Return the step of the limit over E experts: one expert after the other, with rows as even as possible."""
    return _gemms(problem, backward, even_counts(problem.shape.rows, problem.shape.num_experts))


def _gemms(problem: Problem, backward: bool, counts: list[int]) -> Callable[[], None]:
    shape = problem.shape
    n = shape.rows
    d = shape.d_model
    h = shape.d_hidden
    p = shape.height
    e = len(counts)
    new = functools.partial(torch.ones, dtype=problem.dtype, device=problem.device)
    x, hidden, act, y = (new(n, width).normal_(0, width**-0.5) for width in (d, p, h, d))
    d_act = new(n, h)
    d_x = new(n, d)
    w_in = new(e, p, d).normal_(0, d**-0.5)
    w_out = new(e, d, h).normal_(0, h**-0.5)
    d_w_in = new(e, p, d)
    d_w_out = new(e, d, h)
    # Cut beforehand: the limit has no Python beyond its calls.
    rows = list(zip(*(tensor.split(counts) for tensor in (x, hidden, act, y, d_act, d_x)), strict=True))
    experts = list(zip(rows, w_in, w_out, d_w_in, d_w_out, strict=True))

    def step() -> None:
        for (x, hidden, act, y, _, _), w_in, w_out, _, _ in experts:
            torch.mm(x, w_in.t(), out=hidden)
            torch.mm(act, w_out.t(), out=y)
        if not backward:
            return
        for (x, hidden, act, y, d_act, d_x), w_in, w_out, d_w_in, d_w_out in experts:
            torch.mm(y, w_out, out=d_act)
            torch.mm(y.t(), act, out=d_w_out)
            torch.mm(hidden, w_in, out=d_x)
            torch.mm(hidden.t(), x, out=d_w_in)

    return step
