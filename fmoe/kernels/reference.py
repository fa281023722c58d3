"""Operations of `fmoe.kernels` in plain differentiable torch, for tests and second derivatives.

Shape letters: as in `fmoe.kernels.rows` and `fmoe.kernels.ffn`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fmoe.kernels.glu import Activation, gate


def permute(x_TD: Tensor, perm_N: Tensor, inverse_TK: Tensor, num_rows: int) -> Tensor:
    """Return the token of each of the first ``num_rows`` rows, ``x_TD[perm_N[:num_rows] // K]``: [T, D] -> [M, D]."""
    return x_TD[perm_N[:num_rows] // inverse_TK.shape[1]]


def combine(rows_MD: Tensor, weight_TK: Tensor, inverse_TK: Tensor) -> Tensor:
    """Return the weighted sum of each token's rows: [M, D] -> [T, D]. An assignment without a row adds nothing."""
    padded_MD = torch.cat([rows_MD, rows_MD.new_zeros(1, rows_MD.shape[1])])  # for assignments without a row
    rows_TKD = padded_MD[inverse_TK.clamp(max=len(rows_MD))]
    return (rows_TKD * weight_TK.unsqueeze(2).to(rows_MD.dtype)).sum(1)


def grouped_linear(rows_MI: Tensor, weight_LOI: Tensor, bias_LO: Tensor | None, counts: Sequence[int]) -> Tensor:
    """Apply the linear map of each expert e to its ``counts[e]`` rows: [M, I] -> [M, O]."""
    parts = rows_MI.split(list(counts))
    biases = [None] * len(parts) if bias_LO is None else bias_LO
    return torch.cat([F.linear(part, w, b) for part, w, b in zip(parts, weight_LOI, biases, strict=True)])


def expert_ffn(
    rows_MD: Tensor,
    w_in_LPD: Tensor,
    b_in_LP: Tensor | None,
    w_out_LDH: Tensor,
    b_out_LD: Tensor | None,
    counts: Sequence[int],
    activation: Activation,
    gated: bool = False,
) -> Tensor:
    """Apply the feed-forward network of each expert e to its ``counts[e]`` rows: [M, D] -> [M, D]."""
    hidden_MP = grouped_linear(rows_MD, w_in_LPD, b_in_LP, counts)
    active_MH = gate(activation, hidden_MP) if gated else activation(hidden_MP)
    return grouped_linear(active_MH, w_out_LDH, b_out_LD, counts)


def expert_ffn_of_tokens(
    x_TD: Tensor,
    weight_TK: Tensor | None,
    w_in_LPD: Tensor,
    b_in_LP: Tensor | None,
    w_out_LDH: Tensor,
    b_out_LD: Tensor | None,
    *,
    perm_N: Tensor | None,
    counts: Sequence[int],
    activation: Activation,
    gated: bool,
) -> Tensor:
    """Apply `permute`, `expert_ffn` and `combine` to tokens or, without ``perm_N``, only `expert_ffn` to rows.

    Args:
        x_TD: tokens [T, D]; without ``perm_N``, rows [M, D].
        weight_TK: combine weights. Without ``perm_N``, factors [M] of the resulting rows, or None.
        perm_N: assignment of each row, from a `fmoe.kernels.rows.DispatchPlan`; None if the input is rows.
    """
    parameters = (w_in_LPD, b_in_LP, w_out_LDH, b_out_LD)
    if perm_N is None or weight_TK is None:
        out = expert_ffn(x_TD, *parameters, counts, activation, gated)
        return out if weight_TK is None else (out * weight_TK.unsqueeze(1)).to(out.dtype)
    perm_M = perm_N[: sum(counts)]
    token_M = perm_M // weight_TK.shape[1]
    out_MD = expert_ffn(x_TD[token_M], *parameters, counts, activation, gated).to(weight_TK.dtype)
    total_TD = out_MD.new_zeros(x_TD.shape)
    return total_TD.index_add(0, token_M, out_MD * weight_TK.reshape(-1)[perm_M].unsqueeze(1)).to(x_TD.dtype)


def gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], needs: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Return the gradients of ``function(*inputs)`` as differentiable tensors, None for inputs that need none.

    Args:
        needs: whether the gradient of each input is needed.
        grad: gradient of the function's result.
    """
    with torch.enable_grad():
        views = [None if t is None else t.view_as(t) for t in inputs]  # one tensor may be passed as two inputs
        wanted = [t for t, needed in zip(views, needs, strict=True) if needed and t is not None]
        gradients = iter(torch.autograd.grad(function(*views), wanted, grad, create_graph=True, materialize_grads=True))
    return [next(gradients) if needed else None for needed in needs]
