"""Formulas of the auxiliary losses; `fmoe.auxiliary` adds a layer's losses to its backward pass.

Each loss is computed within each routing group (`fmoe.routing.RoutingGroups`). The result is the mean over groups,
weighted by their number of tokens. It does not depend on how the batch is split over micro batches and ranks, if these
hold whole groups and equally many tokens.

Shape letters: G groups, S positions of a group, E experts, T tokens.
"""

import torch
from torch import Tensor

# Default weights: balance as in Switch (section 2.2), z as in ST-MoE, importance and load as in arXiv 1701.06538,
# sequence balance as in DeepSeek-V3.
DEFAULT_LOSS_WEIGHTS = {"balance": 1e-2, "z": 1e-3, "importance": 1e-1, "load": 1e-1, "sequence_balance": 1e-4}


def load_balancing_loss(probs_GSE: Tensor, load_GE: Tensor, valid_GS: Tensor | None = None) -> Tensor:
    """Return ``E * sum_e f_e P_e``, which is 1 for balanced routing (Switch, arXiv 2101.03961 equations 4-6).

    E is the number of experts on all ranks, f_e an expert's share of the choices, and P_e its mean probability. The
    ``l_aux`` of GShard (arXiv 2006.16668 algorithm 1) is the same up to a constant.

    Args:
        probs_GSE: the router's probabilities, differentiable.
        load_GE: number of choices of each expert in each group, before the capacity limit.
        valid_GS: bool, True for positions that hold a token; None for all.

    Returns:
        A scalar; 0 when there is no token.
    """
    num_groups, size, num_experts = probs_GSE.shape
    load_GE = load_GE.to(torch.promote_types(probs_GSE.dtype, torch.float32))
    fraction_GE = load_GE / load_GE.sum(1, keepdim=True).clamp(min=1)
    if valid_GS is None:
        per_group_G = (fraction_GE * probs_GSE.mean(1)).sum(1)
        return num_experts * (per_group_G.mean() if num_groups and size else probs_GSE.sum())
    valid_GS = valid_GS.to(probs_GSE.dtype)
    tokens_G = valid_GS.sum(1)
    mean_GE = (probs_GSE * valid_GS.unsqueeze(-1)).sum(1) / tokens_G.clamp(min=1).unsqueeze(1)
    per_group_G = (fraction_GE * mean_GE).sum(1)
    return num_experts * (per_group_G * tokens_G).sum() / tokens_G.sum().clamp(min=1)


def sequence_balance_loss(scores_GSE: Tensor, load_GE: Tensor, valid_GS: Tensor | None = None) -> Tensor:
    """Scale each token's scores to sum to one, and return their `load_balancing_loss`.

    This is the sequence-wise loss of DeepSeek-V3 (arXiv 2412.19437 equations 17-20), with routing groups in place of
    sequences.

    Args:
        scores_GSE: positive affinities of each token to all experts, differentiable; they need not sum to one.
        load_GE: number of the group's tokens that have the expert among their K best scores.
        valid_GS: bool, True for positions that hold a token; None for all.
    """
    return load_balancing_loss(scores_GSE / scores_GSE.sum(-1, keepdim=True).clamp(min=1e-20), load_GE, valid_GS)


def importance_loss(gates_GSE: Tensor, valid_GS: Tensor | None = None) -> Tensor:
    """Return ``CV(Importance)^2``, a squared coefficient of variation over experts.

    The Importance of an expert is the sum of its gate values over the group's tokens (Shazeer et al., arXiv 1701.06538
    equations 6-7).

    Args:
        gates_GSE: combine weight of each expert, 0 where it was not chosen; differentiable.
        valid_GS: bool, True for positions that hold a token; None for all.

    Returns:
        A scalar; 0 when there is no token.
    """
    return _squared_variation(gates_GSE, valid_GS)


def load_loss(chosen_GSE: Tensor, valid_GS: Tensor | None = None) -> Tensor:
    """Return ``CV(Load)^2``, a squared coefficient of variation over experts.

    The Load of an expert is a smooth estimate of the number of the group's tokens that choose it (Shazeer et al., arXiv
    1701.06538 equations 10-11).

    Args:
        chosen_GSE: probability P(x, i) that token x chooses expert i if only the noise of that expert's logit is drawn
            again (equation 9).
        valid_GS: bool, True for positions that hold a token; None for all.

    Returns:
        A scalar; 0 when there is no token.
    """
    return _squared_variation(chosen_GSE, valid_GS)


def _squared_variation(value_GSE: Tensor, valid_GS: Tensor | None) -> Tensor:
    """Sum the values of each group by expert, and return the squared coefficient of variation of the sums over experts.

    The result is the mean over groups, weighted by their numbers of tokens.
    """
    if valid_GS is None:
        valid_GS = value_GSE.new_ones(value_GSE.shape[:2])
    valid_GS = valid_GS.to(value_GSE.dtype)
    total_GE = (value_GSE * valid_GS.unsqueeze(-1)).sum(1)
    mean_G1 = total_GE.mean(1, keepdim=True)
    square_G = (total_GE - mean_G1).square().mean(1) / mean_G1.square().squeeze(1).clamp(min=1e-20)
    tokens_G = valid_GS.sum(1)
    return (square_G * tokens_G).sum() / tokens_G.sum().clamp(min=1)


def router_z_loss(logsumexp_T: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """Return the mean over tokens of ``logsumexp(logits)^2`` (ST-MoE, arXiv 2202.08906 equation 5).

    This loss keeps the router's logits small.

    Args:
        logsumexp_T: logsumexp of each token's logits, differentiable.
        mask_T: bool, True for tokens that are routed; None for all.
    """
    square_T = logsumexp_T.square()
    if mask_T is None:
        return square_T.mean() if square_T.numel() else square_T.sum()
    mask_T = mask_T.to(square_T.dtype)
    return (square_T * mask_T).sum() / mask_T.sum().clamp(min=1)
