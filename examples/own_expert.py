"""A custom expert: any module that maps tokens to tokens, built once per expert; here a convolution over features."""

import torch
from torch import nn

import fmoe


class ConvExpert(nn.Module):
    """A one-dimensional convolution over the features of each token, with a residual."""

    def __init__(self, d_model):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 8, 5, padding=2), nn.GELU(), nn.Conv1d(8, 1, 5, padding=2))

    def forward(self, rows_RD):
        return rows_RD + self.conv(rows_RD.unsqueeze(1)).squeeze(1)


def main() -> list[float]:
    """Train a layer of such experts to smooth its input; return the printed losses."""
    torch.manual_seed(0)
    layer = fmoe.FMoE(d_model=32, num_experts=4, top_k=1, gate="switch", expert=ConvExpert)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    printed = []
    for step in range(101):
        x = torch.randn(4, 32, 32)
        target = nn.functional.avg_pool1d(x, 3, stride=1, padding=1)
        loss = nn.functional.mse_loss(layer(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            printed.append(loss.item())
            print(f"step {step:3}  loss {loss:.4f}")
    return printed


if __name__ == "__main__":
    main()
