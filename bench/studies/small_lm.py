"""A small byte-level language model in plain torch with `fmoe.FMoE` layers, for benchmarks of `fmoe.parallel`."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fmoe

VOCABULARY = 256


class Block(nn.Module):
    """Causal attention, and a layer of experts."""

    def __init__(self, width: int, heads: int, experts: int, groups: fmoe.parallel.ParallelGroups, seed: int):
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.norm_2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.moe = fmoe.FMoE(
            d_model=width, num_experts=experts, d_hidden=2 * width, top_k=2, moe_group=groups.moe_group, seed=seed
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.moe(self.norm_2(x))


class SmallLM(nn.Module):
    """Map bytes, [batch, length], to logits of the next byte, [batch, length, 256].

    Args:
        groups: groups of `fmoe.parallel.init`, whose expert parallel ranks split the experts.
        width, layers, heads, experts: sizes of the model; ``experts`` is per layer, over all ranks.
        length: maximum sequence length.
    """

    def __init__(
        self,
        groups: fmoe.parallel.ParallelGroups,
        *,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        experts: int = 4,
        length: int = 64,
    ):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, experts, groups, seed=n) for n in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy of each byte but the first, in nats; ``tokens`` are integers, [batch, length]."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
