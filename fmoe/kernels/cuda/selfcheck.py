"""Self-check: compares a small layer on a device with the reference before other layers use the kernels.

Tests by emulation and on other GPUs do not cover this GPU, its driver and its compiler. If the check fails, layers use
the torch path.

Shape letters: T tokens, K choices, E experts, D width, H hidden width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fmoe.kernels import reference
from fmoe.kernels.backends import activation_code
from fmoe.kernels.cuda import rows
from fmoe.kernels.cuda.variants import NAMES, Backward, Batch, forward
from fmoe.kernels.rows import DispatchPlan

_T, _K, _E, _D, _H = 45, 2, 5, 24, 16
_NEAR = {torch.float32: 1e-2, torch.bfloat16: 5e-2}  # TF32 may be on; errors to detect are far larger


def failure(device: torch.device, gemm: str = "loop") -> str | None:
    """Return a description of the first wrong result on a device, or None. Synchronizes.

    On the device it does not use autograd: called during a backward pass, it would wait for that to end.

    Args:
        gemm: "loop" (uses torch's GEMMs, to check only the other kernels), "grouped" or "triton".
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

    end_E, silu = found_plan.end_E, activation_code(F.silu)
    assert end_E is not None and silu is not None
    inputs = [normal(_T, _D), normal(_E, 2 * _H, _D) / _D**0.5, normal(_E, _D, _H) / _H**0.5, normal(_T, _K).abs()]
    grad = normal(_T, _D)
    for dtype, near in _NEAR.items():
        *given, weight = (t.to(dtype) for t in inputs)
        given.append(weight.float())
        x, w_in, w_out, weight = (t.to(device, copy=True) for t in given)
        indices = (found_plan.perm_N, found_plan.inverse_TK, weight)
        batch = Batch(x, *indices, end_E, found_plan.num_kept, w_in, None, w_out, None, None, silu, True)
        y, hidden = forward(batch, gemm)
        needs = [name in ("x", "weight", "w_in", "w_out") for name in NAMES]
        mine = Backward(batch, grad.to(device, dtype), hidden, needs).run(gemm)
        x, w_in, w_out, weight = (t.double().requires_grad_() for t in given)
        counts = plan.counts
        rows_MD = reference.permute(x, plan.perm_N, plan.inverse_TK, sum(counts))
        out = reference.expert_ffn(rows_MD, w_in, None, w_out, None, counts, F.silu, True)
        expected = reference.combine(out, weight, plan.inverse_TK)
        expected.backward(grad.to(dtype).double())
        pairs = [
            ("output", y, expected.detach()),
            ("gradient of tokens", mine["x"], x.grad),
            ("gradient of first matrices", mine["w_in"], w_in.grad),
            ("gradient of second matrices", mine["w_out"], w_out.grad),
            ("gradient of weights", mine["weight"], weight.grad),
        ]
        for name, a, b in pairs:
            error = float((a.cpu().double() - b).norm() / b.norm())
            if not error <= near:
                return f"the {name} in {dtype} is {error:.1e} off"
    return None
