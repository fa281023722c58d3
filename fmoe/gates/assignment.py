"""Balanced assignment of tokens to experts, a linear assignment problem in each routing group.

Under torch.compile it is a custom operation, because its number of iterations depends on the values.

Shape letters: G routing groups, S positions of a group, E experts, A and B experts that a token moves from and to.
"""

import torch
from torch import Tensor

# Scores become whole numbers, so that sums along paths are exact and equal on every device.
_ONE = 1 << 32  # stands for the largest score of a group
_PENALTY = 1 << 47  # per token over the even share: above the gain of any chain of moves, up to 2^13 experts
_NO_MOVE = 1 << 60


@torch.no_grad()
def balanced_assignment(scores_GSE: Tensor, valid_GS: Tensor, load_GE: Tensor | None = None) -> Tensor:
    """Assign one expert to every token so that the experts' loads in a routing group are as even as possible.

    `fmoe.routing.RoutingGroups` defines routing groups. Loads (numbers of tokens) differ by at most one, unless -inf
    scores or ``load_GE`` prevent it. Among such assignments, the result has the maximal sum of scores. For this sum,
    scores are rounded to multiples of 2^-32 times the group's largest absolute score.

    Args:
        scores_GSE: -inf for experts that a token must not get; every token must have an expert left.
        valid_GS: bool, True for positions that hold a token.
        load_GE: int64, tokens that each expert already has; None for zero.

    Returns:
        int64 [G, S], the expert of each token; -1 for positions without a token.
    """
    # A price per expert, subtracted from its scores, nearly balances the loads. Each token starts at its best expert at
    # these prices, which is optimal for the resulting loads. While the loads or the sum of scores can be improved,
    # tokens move along the cheapest chain of experts, which preserves optimality (successive shortest paths: Ahuja,
    # Magnanti, Orlin, "Network Flows"). Among equal tokens, the first ones move.
    if load_GE is None:
        load_GE = valid_GS.new_zeros((scores_GSE.shape[0], scores_GSE.shape[2]), dtype=torch.int64)
    return (_balanced_op if torch.compiler.is_compiling() else _balanced)(scores_GSE, valid_GS, load_GE)


def _balanced(scores_GSE: Tensor, valid_GS: Tensor, load_GE: Tensor) -> Tensor:
    if not valid_GS.numel():
        return valid_GS.long()
    num_experts = scores_GSE.shape[-1]
    scores_GSE = scores_GSE.double().nan_to_num(nan=0.0, neginf=-torch.inf)
    finite_GSE = scores_GSE.isfinite() & valid_GS.unsqueeze(-1)
    largest_G11 = torch.where(finite_GSE, scores_GSE.abs(), 0).amax((1, 2), keepdim=True).clamp(min=1e-300)
    scores_GSE = torch.where(finite_GSE, scores_GSE / largest_G11, -torch.inf)
    tokens_G1 = valid_GS.sum(1, keepdim=True)
    prices_GE = _balancing_prices(scores_GSE, finite_GSE, tokens_G1)
    value_GSE = torch.where(finite_GSE, (scores_GSE * _ONE).round(), -_NO_MOVE / 2).long()
    expert_GS = (value_GSE - (prices_GE * _ONE).round().long().unsqueeze(1)).argmax(-1)
    expert_GS = torch.where(valid_GS, expert_GS, num_experts)
    return _improve(expert_GS, value_GSE.transpose(1, 2).contiguous(), load_GE)


def _balancing_prices(scores_GSE: Tensor, finite_GSE: Tensor, tokens_G1: Tensor) -> Tensor:
    """Return a price per expert, [G, E]; if tokens choose by score minus price, loads are nearly even."""
    # The prices come from the column scalings of Sinkhorn's iteration at decreasing temperatures.
    # The prices decide between solutions of equal sum. They are rounded, because rounding errors vary with the number
    # of groups in a matrix product.
    count_G1E = finite_GSE.sum(1, keepdim=True).clamp(min=1)
    prices_G1E = torch.where(finite_GSE, scores_GSE, 0).sum(1, keepdim=True) / count_G1E
    variance_G1E = torch.where(finite_GSE, scores_GSE - prices_G1E, 0).square().sum(1, keepdim=True) / count_G1E
    spread_G11 = variance_G1E.mean(2, keepdim=True).sqrt().clamp(min=1e-9)
    share_G11 = tokens_G1.unsqueeze(1).to(scores_GSE.dtype) / scores_GSE.shape[-1]
    for temperature in (1.0, 0.3, 0.1, 0.1, 0.03, 0.03):
        scaled_GSE = (scores_GSE - prices_G1E) / (temperature * spread_G11)
        kernel_GSE = (scaled_GSE - scaled_GSE.amax(2, keepdim=True)).exp_().nan_to_num_()
        column_GE1 = torch.ones_like(prices_G1E).transpose(1, 2)
        for _ in range(8):
            row_G1S = (kernel_GSE @ column_GE1).clamp(min=1e-200).reciprocal().transpose(1, 2)
            column_GE1 = (share_G11 / (row_G1S @ kernel_GSE).clamp(min=1e-200)).clamp(1e-200, 1e200).transpose(1, 2)
        prices_G1E = prices_G1E - column_GE1.transpose(1, 2).log() * temperature * spread_G11
    unit_G11 = spread_G11.log2().floor().exp2() / 1024
    return ((prices_G1E / unit_G11).round() * unit_G11).squeeze(1).clamp(-8.0, 8.0)


def _improve(expert_GS: Tensor, value_GES: Tensor, load_GE: Tensor) -> Tensor:
    """Move tokens between experts, and return the expert of each token, [G, S].

    Loads are then as even as possible. Among such assignments, the sum of values is maximal.
    """
    # Tokens move along the cheapest chains of experts, until no chain helps. Positions without a token are E in
    # `expert_GS`, and -1 in the result.
    num_groups, num_experts, _ = value_GES.shape
    tokens_G1 = (expert_GS < num_experts).sum(1, keepdim=True) + load_GE.sum(1, keepdim=True)
    floor_G1 = tokens_G1 // num_experts
    ceil_G1 = -(-tokens_G1 // num_experts)
    group_G = torch.arange(num_groups, device=expert_GS.device, dtype=torch.int64)
    ones_GS = torch.ones_like(expert_GS)
    loss_GES = torch.empty_like(value_GES)

    def slope(count_GE: Tensor) -> Tensor:  # the penalty that the count_GE-th token of an expert adds
        return _PENALTY * (count_GE - floor_G1).clamp(-1024, 1024)

    while True:
        count_GE = value_GES.new_zeros(num_groups, num_experts + 1).scatter_add_(1, expert_GS, ones_GS)[:, :-1]
        count_GE += load_GE
        # The loss of the cheapest move of a token from expert A to expert B.
        held_GS = value_GES.gather(1, expert_GS.clamp(max=num_experts - 1).unsqueeze(1)).squeeze(1)
        torch.sub(held_GS.unsqueeze(1), value_GES, out=loss_GES)
        loss_GBA = value_GES.new_full((num_groups, num_experts, num_experts + 1), _NO_MOVE)
        loss_GBA.scatter_reduce_(2, expert_GS.unsqueeze(1).expand_as(loss_GES), loss_GES, "amin")
        loss_GBA = loss_GBA[..., :-1].masked_fill_(loss_GBA[..., :-1] > _NO_MOVE >> 3, _NO_MOVE)
        # Cheapest chains that end at each expert, from any expert that gives a token away (Bellman-Ford).
        cost_GB = -slope(count_GE)
        steps = []
        for _ in range(num_experts):
            through_GB, from_GB = (cost_GB.unsqueeze(1) + loss_GBA).min(2)
            better_GB = through_GB < cost_GB
            if not bool(better_GB.any()):
                break
            cost_GB = torch.where(better_GB, through_GB, cost_GB)
            steps.append((better_GB, from_GB))
        gain_G, end_G = (cost_GB + slope(count_GE + 1)).min(1)
        active_G = gain_G < 0
        if not bool(active_G.any()):
            return torch.where(expert_GS < num_experts, expert_GS, -1)
        # Several tokens move along the chain at once: as many as every link of it has at the same loss.
        node_G = end_G
        moves = []
        many_G = torch.full_like(end_G, _NO_MOVE)
        for better_GB, from_GB in reversed(steps):
            link_G = active_G & better_GB[group_G, node_G]
            source_G = torch.where(link_G, from_GB[group_G, node_G], node_G)
            loss_G = loss_GBA[group_G, node_G, source_G]
            equal_GS = (expert_GS == source_G.unsqueeze(1)) & (loss_GES[group_G, node_G] == loss_G.unsqueeze(1))
            equal_GS &= link_G.unsqueeze(1)
            many_G = torch.where(link_G, many_G.minimum(equal_GS.sum(1)), many_G)
            moves.append((equal_GS, node_G))
            node_G = source_G
        many_G = many_G.minimum((count_GE[group_G, node_G] - ceil_G1.squeeze(1)).clamp(min=1))
        many_G = many_G.minimum((floor_G1.squeeze(1) - count_GE[group_G, end_G]).clamp(min=1))
        for equal_GS, node_G in moves:
            chosen_GS = equal_GS & (equal_GS.cumsum(1) <= many_G.unsqueeze(1))
            expert_GS = torch.where(chosen_GS, node_G.unsqueeze(1), expert_GS)


_balanced_op = torch.library.custom_op(
    "fmoe::balanced_assignment",
    _balanced,
    mutates_args=(),
    schema="(Tensor scores, Tensor valid, Tensor load) -> Tensor",
)


@_balanced_op.register_fake
def _(scores_GSE: Tensor, valid_GS: Tensor, load_GE: Tensor) -> Tensor:
    return torch.empty_like(valid_GS, dtype=torch.int64)
