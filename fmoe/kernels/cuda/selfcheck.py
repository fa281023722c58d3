"""Self-check of the kernels: compare a small layer on a device with the plain torch reference.

It runs before any layer uses the kernels, because tests do not cover this GPU, its driver and its compiler. If it
fails, layers run in plain torch.

Shape letters: T tokens, K experts per token, E experts, D width, H hidden width.
"""

from dataclasses import astuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fmoe.kernels import reference
from fmoe.kernels.backends import activation_code
from fmoe.kernels.cuda import router, rows
from fmoe.kernels.cuda.calls import Rule
from fmoe.kernels.cuda.variants import Batch, backward, forward
from fmoe.kernels.fused import NAMES
from fmoe.kernels.rows import DispatchPlan

_T = 45
_K = 2
_E = 5
_D = 24
_H = 16
_NEAR = {torch.float32: 1e-2, torch.bfloat16: 5e-2}  # TF32 may be on; errors to detect are far larger


def failure(device: torch.device, gemm: str = "loop") -> str | None:
    """Check the kernels on a device. Return a description of the first wrong result; None if all results are right.

    The check synchronizes the device.

    Args:
        gemm: GEMMs with which the experts are checked: "loop" or "grouped" for torch's, "triton" for Triton's.
    """
    # No autograd on the device: a check during a backward pass would wait for that pass to end.
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

    end_E = found_plan.end_E
    silu = activation_code(F.silu)
    assert end_E is not None and silu is not None
    inputs = [normal(_T, _D), normal(_T, _K).abs(), normal(_E, 2 * _H, _D) / _D**0.5, normal(_E, _D, _H) / _H**0.5]
    grad = normal(_T, _D)
    for dtype in _NEAR:
        x, weight, w_in, w_out = (t.to(dtype) for t in inputs)
        leaves = (x, weight.float(), w_in, w_out)
        x, weight, w_in, w_out = (t.to(device, copy=True) for t in leaves)
        plan_on_device = (found_plan.perm_N, found_plan.inverse_TK, end_E, found_plan.num_kept)
        batch = Batch(x, weight, w_in, None, w_out, None, *plan_on_device, None, silu, True)
        y, hidden = forward(batch, gemm)
        needs = [name in ("x", "weight", "w_in", "w_out") for name in NAMES]
        gradients = backward(batch, grad.to(device, dtype), hidden, needs, gemm, {})
        x, weight, w_in, w_out = (t.double().requires_grad_() for t in leaves)
        rows_MD = reference.permute(x, plan.perm_N, plan.inverse_TK, sum(plan.counts))
        out_MD = reference.expert_ffn(rows_MD, w_in, None, w_out, None, plan.counts, F.silu, True)
        expected = reference.combine(out_MD, weight, plan.inverse_TK)
        expected.backward(grad.to(dtype).double())
        wrong = _first_wrong(
            dtype,
            ("output", y, expected.detach()),
            ("gradient of tokens", gradients["x"], x.grad),
            ("gradient of first matrices", gradients["w_in"], w_in.grad),
            ("gradient of second matrices", gradients["w_out"], w_out.grad),
            ("gradient of weights", gradients["weight"], weight.grad),
        )
        wrong = wrong or _failure_of_router(device, normal(_T, _D).to(dtype), (normal(_E, _D) / _D**0.5).to(dtype))
        if wrong is not None:
            return wrong
    return None


def _first_wrong(dtype: torch.dtype, *results: tuple[str, Tensor, Tensor | None]) -> str | None:
    """Return a description of the first result, of (name, result, expected result), that is wrong; else None."""
    for name, result, expected in results:
        assert expected is not None
        error = float((result.cpu().double() - expected).norm() / expected.norm())
        if not error <= _NEAR[dtype]:
            return f"the {name} in {dtype} has a relative error of {error:.1e}"
    return None


def _failure_of_router(device: torch.device, x_TD: Tensor, weight_ED: Tensor) -> str | None:
    """Return a description of the router's first wrong result; None if all results are right."""
    # Jitter and capacity are on, but their effect on the results is below the tolerance.
    factor = 100.0
    half_width = 2.0**-20
    group = (_T, 1, _T)
    x = x_TD.to(device, copy=True)
    weight = weight_ED.to(device, copy=True)
    rule = astuple(Rule(normalize=False))  # weighted by the softmax over all experts
    routed = router._router(x, weight, None, _K, *rule, *group, factor, half_width, 3, 0)
    expert, kept, weights, balance, z, stats, _, logits, logsumexp, fraction, jittered = routed
    d_outputs = (torch.ones_like(weights), torch.ones_like(balance), torch.ones_like(z), None)
    saved = (jittered, weight, None, expert, stats, logits, logsumexp, fraction)
    d_x, d_weight = router._router_backward(*d_outputs, *saved, False, 1.0, *group, half_width, 3, 0, [True, True])
    # Expected results in float64 on the CPU, with gradients derived by hand.
    logits_TE = x_TD.double() @ weight_ED.double().t()
    logsumexp_T1 = logits_TE.logsumexp(-1, keepdim=True)
    prob_TE = (logits_TE - logsumexp_T1).exp()
    weight_TK, expert_TK = prob_TE.topk(_K, dim=-1)
    hit_TE = torch.zeros_like(prob_TE).scatter(1, expert_TK, 1.0)
    slope_E = _E * hit_TE.mean(0) / _K
    d_prob_TE = hit_TE + slope_E / _T
    d_logits_TE = prob_TE * (d_prob_TE - (prob_TE * d_prob_TE).sum(-1, keepdim=True) + 2 * logsumexp_T1 / _T)
    return _first_wrong(
        x_TD.dtype,
        ("choice of experts", kept, expert_TK.double()),
        ("router's weights", weights, weight_TK),
        ("balance loss", balance, (slope_E * prob_TE.mean(0)).sum()),
        ("z loss", z, logsumexp_T1.square().mean()),
        ("load", stats[:_E], hit_TE.sum(0)),
        ("router's gradient of tokens", d_x, d_logits_TE @ weight_ED.double()),
        ("router's gradient", d_weight, d_logits_TE.t() @ x_TD.double()),
    )
