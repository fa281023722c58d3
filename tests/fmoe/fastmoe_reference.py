"""A layer in FastMoE's contract once more: a float64 loop over tokens, given what the gate decided. Not a test."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Outcome:
    """Output and gradients of ``(output * weight).sum()``; of the experts a list of parameters for each."""

    output: Tensor
    grad_input: Tensor
    grad_score: Tensor
    grad_experts: list[list[Tensor]]


def brute_force(x: Tensor, index: Tensor, score: Tensor, experts: list, weight: Tensor) -> Outcome:
    """``y_t = sum_k score_tk * expert_k(x_t)``; -1 adds nothing. Experts are modules of one token [1, D]."""
    experts = [copy.deepcopy(expert).double() for expert in experts]
    for expert in experts:
        expert.zero_grad()
    x = x.detach().double().requires_grad_()
    score = score.detach().double().requires_grad_()
    rows = []
    for t in range(len(x)):
        y = torch.zeros_like(x[t])
        for k in range(index.shape[1]):
            if index[t, k] >= 0:
                y = y + score[t, k] * experts[index[t, k]](x[t : t + 1]).squeeze(0)
        rows.append(y)
    output = torch.stack(rows) if rows else x * score.sum()
    (output * weight.double()).sum().backward()
    grads = [[torch.zeros_like(p) if p.grad is None else p.grad for p in e.parameters()] for e in experts]
    return Outcome(output, x.grad, score.grad, grads)


class OneOfStack(nn.Module):
    """Expert ``number`` of an `_Expert`, alone."""

    def __init__(self, stack: nn.Module, number: int):
        super().__init__()
        self.weight_in = nn.Parameter(stack.htoh4.weight.detach()[number].clone())
        self.bias_in = nn.Parameter(stack.htoh4.bias.detach()[number].clone())
        self.weight_out = nn.Parameter(stack.h4toh.weight.detach()[number].clone())
        self.bias_out = nn.Parameter(stack.h4toh.bias.detach()[number].clone())
        self.activation = stack.activation

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(x @ self.weight_in.t() + self.bias_in)
        return hidden @ self.weight_out.t() + self.bias_out


class SmallExpert(nn.Module):
    """A user's expert, called with its rows and their count."""

    def __init__(self, d_model: int):
        super().__init__()
        self.linear = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, fec: Tensor | None = None) -> Tensor:
        return self.linear(x)


class WideExpert(nn.Module):
    """Another of another shape."""

    def __init__(self, d_model: int):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.ReLU(), nn.Linear(2 * d_model, d_model))

    def forward(self, x: Tensor, fec: Tensor | None = None) -> Tensor:
        return self.model(x)
