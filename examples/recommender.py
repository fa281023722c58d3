"""A recommender: embeddings in a table that the ranks divide, and two tasks that share experts (MMoE).

Run it alone, or with ``torchrun --nproc-per-node=2 examples/recommender.py``. Prints the mean loss of every 50 steps on
a generated log, in which hidden vectors of user and item decide on clicks and conversions.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import fmoe
from fmoe import parallel
from fmoe.optim import RowAdagrad

USERS, ITEMS, WIDTH, BATCH, STEPS = 200, 800, 16, 512, 201


class Recommender(nn.Module):
    """Probabilities of a click and of a conversion, as logits [T, 2]."""

    def __init__(self, group):
        super().__init__()
        self.table = parallel.ShardedEmbedding(USERS + ITEMS, WIDTH, group, std=0.1, seed=0)
        self.experts = fmoe.MMoE(2 * WIDTH, num_experts=4, num_tasks=2, d_hidden=32, seed=0)
        self.heads = nn.ModuleList([nn.Linear(2 * WIDTH, 1) for _ in range(2)])

    def forward(self, ids):
        tasks = self.experts(self.table(ids).flatten(1))
        return torch.cat([head(y) for head, y in zip(self.heads, tasks, strict=True)], 1)


def impressions(generator, tastes):
    """Return ids [T, 2] and labels [T, 2]; small ids are the most frequent."""
    users = (USERS ** torch.rand(BATCH, generator=generator)).long() - 1
    items = (ITEMS ** torch.rand(BATCH, generator=generator)).long() - 1
    ids = torch.stack([users, USERS + items], 1)
    liked = tastes[ids].prod(1).sum(1)
    return ids, torch.stack([liked > 0.5, liked > 1.5], 1).float()


def main() -> None:
    """Train."""
    groups = parallel.init()
    tastes = torch.randn(USERS + ITEMS, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)  # dense parameters are the same on all ranks
    model = Recommender(groups.data_group)
    rows = RowAdagrad([model.table.weight], lr=0.2)
    dense = torch.optim.AdamW(model.parameters(), lr=3e-3)  # the table is not among them
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    total = 0.0
    for step in range(STEPS):
        ids, labels = impressions(generator, tastes)
        loss = F.binary_cross_entropy_with_logits(model(ids), labels)
        rows.zero_grad()
        dense.zero_grad()
        loss.backward()
        parallel.average_gradients(model, groups=groups)
        rows.step()
        dense.step()
        total += loss.item()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step:3}  loss {total / (50 if step else 1):.4f}")
            total = 0.0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
