"""Self-check: compares a small layer on a device with the reference before other layers use the kernels.

Tests by emulation and on other GPUs do not cover this GPU, its driver and its compiler. If the check fails, layers use
the torch path.

Shape letters: T tokens, K choices, E experts, D width, H hidden width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fmoe.kernels import reference
from fmoe.kernels.cuda import ffn, rows
from fmoe.kernels.rows import DispatchPlan

_T, _K, _E, _D, _H = 45, 2, 5, 24, 16
_NEAR = {torch.float32: 1e-2, torch.bfloat16: 5e-2}  # TF32 may be on; errors to detect are far larger


def failure(device: torch.device, gemm: str = "loop") -> str | None:
    """Return a description of the first wrong result on a device, or None. Synchronizes.

    Args:
        gemm: one of `fmoe.kernels.cuda.gemm.VARIANTS`; "loop" uses torch's GEMMs, to check only the other kernels.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    expert_TK = torch.randint(-1, _E, (_T, _K), generator=generator, dtype=torch.int64, device="cpu")
    bin_N = torch.where(expert_TK >= 0, expert_TK, _E).view(-1)
    perm_N = bin_N.sort(stable=True).indices
    inverse_TK = perm_N.argsort().view(_T, _K)
    count_E = bin_N.bincount(minlength=_E + 1)[:_E]
    plan = DispatchPlan(perm_N, inverse_TK, expert_TK >= 0, count_E)
    found_plan = DispatchPlan(*rows.place(expert_TK.to(device), _E))
    for name in ("perm_N", "inverse_TK", "count_E"):
        if not torch.equal(getattr(found_plan, name).cpu(), getattr(plan, name)):
            return f"the plan's {name} differs"

    inputs = [normal(_T, _D), normal(_E, 2 * _H, _D) / _D**0.5, normal(_E, _D, _H) / _H**0.5, normal(_T, _K).abs()]
    grad = normal(_T, _D)
    for dtype, near in _NEAR.items():
        *given, weight = (t.to(dtype) for t in inputs)
        given.append(weight.float())
        mine = [t.to(device, copy=True).requires_grad_() for t in given]
        x, w_in, w_out, weight = mine
        arguments = found_plan.fused_arguments(weight)
        y = ffn.expert_ffn(x, w_in, None, w_out, None, found_plan.count_E, F.silu, True, **arguments, gemm=gemm)
        y.backward(grad.to(device, dtype))
        theirs = [t.double().requires_grad_() for t in given]
        x, w_in, w_out, weight = theirs
        counts = plan.counts
        rows_MD = reference.permute(x, plan.perm_N, plan.inverse_TK, sum(counts))
        out = reference.expert_ffn(rows_MD, w_in, None, w_out, None, counts, F.silu, True)
        expected = reference.combine(out, weight, plan.inverse_TK)
        expected.backward(grad.to(dtype).double())
        pairs = [("output", y, expected)]
        names = ("tokens", "first matrices", "second matrices", "weights")
        pairs += [(f"gradient of {n}", a.grad, b.grad) for n, a, b in zip(names, mine, theirs, strict=True)]
        for name, a, b in pairs:
            error = float((a.detach().cpu().double() - b.detach()).norm() / b.detach().norm())
            if not error <= near:
                return f"the {name} in {dtype} is {error:.1e} off"
    return None
