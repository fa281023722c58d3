"""Two tasks that share experts: multi-gate Mixture-of-Experts (MMoE) on a synthetic problem.

Each task is a regression along one direction of the input; the cosine of the two directions is ``CORRELATION``. Prints
the loss of each task every 50 steps, and at the end the cosine between the tasks' gates.
"""

import torch
from torch import nn

import fmoe

WIDTH, EXPERTS, STEPS, BATCH, CORRELATION = 32, 4, 201, 256, 0.5


class TwoTasks(nn.Module):
    """Shared experts, with a gate and a linear head for each task."""

    def __init__(self):
        super().__init__()
        self.experts = fmoe.MMoE(WIDTH, EXPERTS, num_tasks=2, d_hidden=64, seed=0)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 1) for _ in range(2)])

    def forward(self, x):
        return [head(y).squeeze(-1) for head, y in zip(self.heads, self.experts(x), strict=True)]


def targets(x, directions):
    """Return the two tasks' targets: a linear part and a wave along each task's direction."""
    along = x @ directions.t()
    return [along[:, n] + torch.sin(3 * along[:, n]) for n in range(2)]


def main() -> list[float]:
    """Train; return the summed loss of each printed step."""
    torch.manual_seed(0)
    first, second = torch.linalg.qr(torch.randn(WIDTH, 2)).Q.t()
    directions = torch.stack([first, CORRELATION * first + (1 - CORRELATION**2) ** 0.5 * second])
    model = TwoTasks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    printed = []
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        losses = [nn.functional.mse_loss(y, t) for y, t in zip(model(x), targets(x, directions), strict=True)]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        if step % 50 == 0:
            printed.append(sum(losses).item())
            print(f"step {step:3}  task 1 {losses[0]:.4f}  task 2 {losses[1]:.4f}")
    gates = model.experts.gates.detach().flatten(1)
    print(f"cosine of the two gates {torch.cosine_similarity(gates[0], gates[1], dim=0):.3f}")
    return printed


if __name__ == "__main__":
    main()
