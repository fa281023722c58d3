"""A custom gate: a function or module that maps tokens to a `Routing`, registered in one line."""

import torch
from torch import nn

import fmoe


class CosineGate(nn.Module):
    """Top-k of the cosine between a token and a direction per expert, with a learned temperature."""

    def __init__(self, d_model, num_experts, top_k):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k or 2
        self.directions = nn.Parameter(torch.randn(num_experts, d_model))
        self.temperature = nn.Parameter(torch.tensor(0.1))

    def forward(self, x_TD):
        cosine_TE = nn.functional.normalize(x_TD, dim=-1) @ nn.functional.normalize(self.directions, dim=-1).t()
        probs_TE = (cosine_TE / self.temperature).softmax(-1)
        weight_TK, expert_TK = probs_TE.topk(self.top_k, dim=-1)
        counts_E = torch.bincount(expert_TK.flatten(), minlength=self.num_experts)
        balance = self.num_experts * (counts_E / counts_E.sum() * probs_TE.mean(0)).sum()
        return fmoe.Routing(expert_TK, weight_TK, {"balance": balance} if self.training else {})


fmoe.register_gate("cosine", CosineGate)


def main() -> list[float]:
    """Train a layer to copy a fixed network; return the printed losses."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).requires_grad_(False)
    layer = fmoe.FMoE(d_model=16, num_experts=4, d_hidden=32, gate="cosine", top_k=2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    printed = []
    for step in range(101):
        x = torch.randn(8, 32, 16)
        loss = nn.functional.mse_loss(layer(x), teacher(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            printed.append(loss.item())
            print(f"step {step:3}  loss {loss:.4f}")
    return printed


if __name__ == "__main__":
    main()
