"""Hand-written Mixture-of-Experts layers of plain torch, with the problem's weights, and the router that peers share.

Shape letters: T tokens, D width, H hidden width, E experts, K experts per token, N assignments.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.layer.problem import Problem


class Router(nn.Module):
    """Softmax, top-k, normalization, as in every peer here. Given choices of the problem replace the top-k ones."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.weight = nn.Parameter(problem.router_ED.clone())
        self.top_k = problem.shape.top_k
        self.expert_TK = problem.expert_TK

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        probs_TE = F.linear(x_TD, self.weight).float().softmax(-1)
        if self.expert_TK is None:
            weight_TK, expert_TK = probs_TE.topk(self.top_k, dim=-1)
        else:
            weight_TK = probs_TE.gather(1, self.expert_TK)
            expert_TK = self.expert_TK
        return expert_TK, (weight_TK / weight_TK.sum(-1, keepdim=True)).to(x_TD.dtype)


class _Stacks(nn.Module):
    """A router and the experts' weights in two stacks."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.shape = problem.shape
        self.router = Router(problem)
        self.w_in = nn.Parameter(problem.w_in_EPD.clone())
        self.w_out = nn.Parameter(problem.w_out_EDH.clone())


class SortedGroups(_Stacks):
    """Sort, and torch's grouped GEMM with offsets on the device: the usual hand-written layer for a GPU."""

    def forward(self, x_TD: Tensor) -> Tensor:
        shape = self.shape
        expert_TK, weight_TK = self.router(x_TD)
        sorted_N, order_N = expert_TK.reshape(-1).sort(stable=True)
        experts_E = torch.arange(shape.num_experts, device=x_TD.device)
        end_E = torch.searchsorted(sorted_N, experts_E, right=True).int()
        rows_ND = x_TD.index_select(0, order_N // shape.top_k)
        hidden = shape.act(F.grouped_mm(rows_ND, self.w_in.transpose(1, 2), offs=end_E))
        out_ND = F.grouped_mm(hidden, self.w_out.transpose(1, 2), offs=end_E)
        out_ND = out_ND * weight_TK.reshape(-1)[order_N].unsqueeze(-1)
        return torch.zeros_like(x_TD).index_add(0, order_N // shape.top_k, out_ND)


class BruteForce(_Stacks):
    """A mask for every expert over stacked weights: the layer that FastMoE's benchmark compares with."""

    def forward(self, x_TD: Tensor) -> Tensor:
        expert_TK, weight_TK = self.router(x_TD)
        rows_ND = x_TD.repeat_interleave(self.shape.top_k, 0)
        expert_N = expert_TK.reshape(-1)
        out_ND = torch.empty_like(rows_ND)
        for e in range(self.shape.num_experts):
            mine = expert_N == e
            out_ND[mine] = self.shape.act(rows_ND[mine] @ self.w_in[e].t()) @ self.w_out[e].t()
        return (out_ND.view(*expert_TK.shape, -1) * weight_TK.unsqueeze(-1)).sum(1)


class TokenLoop(nn.Module):
    """One call of an expert for every assignment, with a batch of one token: the reference in FastMoE's tests."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.act = problem.shape.act
        self.router = Router(problem)
        # A parameter per expert: an index into a stack would make a gradient of the whole stack for every token.
        self.w_in = nn.ParameterList(w.clone() for w in problem.w_in_EPD)
        self.w_out = nn.ParameterList(w.clone() for w in problem.w_out_EDH)

    def forward(self, x_TD: Tensor) -> Tensor:
        expert_TK, weight_TK = self.router(x_TD)
        out_T = []
        for x_D, experts, weight_K in zip(x_TD, expert_TK.tolist(), weight_TK, strict=True):
            out_K = [F.linear(self.act(F.linear(x_D, self.w_in[e])), self.w_out[e]) for e in experts]
            out_T.append(weight_K @ torch.stack(out_K))
        return torch.stack(out_T)


class SortedSlices(_Stacks):
    """Sort, one GEMM per slice, and scatter: the usual hand-written layer for a CPU."""

    def forward(self, x_TD: Tensor) -> Tensor:
        shape = self.shape
        expert_TK, weight_TK = self.router(x_TD)
        expert_N = expert_TK.reshape(-1)
        order_N = expert_N.argsort(stable=True)
        counts = torch.bincount(expert_N, minlength=shape.num_experts).tolist()
        parts = x_TD.index_select(0, order_N // shape.top_k).split(counts)
        outs = [
            F.linear(shape.act(F.linear(part, w_in)), w_out)
            for part, w_in, w_out in zip(parts, self.w_in.unbind(0), self.w_out.unbind(0), strict=True)
        ]
        out_ND = torch.cat(outs) * weight_TK.reshape(-1)[order_N].unsqueeze(-1)
        return torch.zeros_like(x_TD).index_add(0, order_N // shape.top_k, out_ND)
