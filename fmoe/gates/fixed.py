"""Gates without parameters: everything to one expert, at random, by token id.

Shape letters: T tokens, K experts per token, E experts.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fmoe import random
from fmoe.errors import UserError
from fmoe.gates.router import FixedRouter
from fmoe.routing import RoutingGroups


class ZeroRouter(FixedRouter):
    """Every choice of every token is expert 0, with weight 1 / K (FastMoE's ZeroGate): the worst possible balance, and
    the output of a dense layer. For tests and benchmarks."""

    routes_by_logits = True

    def choose(self, groups: RoutingGroups, device: torch.device) -> Tensor:
        return torch.zeros(groups.num_tokens, self.top_k, dtype=torch.int64, device=device)


class RandomRouter(FixedRouter):
    """K different experts drawn at random for each token, weighted 1 / K, in training and in evaluation (THOR, arXiv
    2110.04260, which draws for a batch; Roller et al., arXiv 2106.04426, compare with it).

    The draw is noise like any other: keyed by (seed, layer, step, routing group), new at each step.
    """

    routes_by_logits = True

    def choose(self, groups: RoutingGroups, device: torch.device) -> Tensor:
        return best_by_hash(groups.uniform(self.num_experts, "random gate", device), self.top_k)

    def entropy(self) -> float:
        return math.log(self.num_experts)


def best_by_hash(noise_TE: Tensor, top_k: int) -> Tensor:
    """The K experts of largest noise; of equals, which 24 bits do have, the first, on every device."""
    return noise_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


class HashRouter(FixedRouter):
    """Hash layers (Roller et al., arXiv 2106.04426): a token's experts are a fixed function of its id, with nothing to
    train. K > 1 takes as many hash functions that never agree, each weighted 1 / K; the paper's MultiHash has them pick
    segments of one expert's weights instead.

    Args:
        seed: key of the hash functions ("random hash"). Layers with different seeds spread a token differently.
        table: int64 [vocabulary, K], experts by token id, in place of a hash: for the paper's "balanced" and
            "clustered" assignments, made by the user from the training data. Saved with the model.

    Raises:
        UserError: the table does not have K columns of experts; a call without token ids, or with ids that are
            negative, past the end of the table or not integers. Looking at values would stall a GPU: there, and while
            torch.compile traces, a negative id counts from the end of the table. Ids of padding may be anything.
    """

    routes_by_logits = True

    default_top_k = 1
    table: Tensor | None

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int | None = None,
        *,
        seed: int = 0,
        table: Tensor | None = None,
        **options: Any,
    ):
        super().__init__(d_model, num_experts, top_k, **options)
        self.seed = seed
        self._key = random.key("hash gate", seed)
        if table is not None:
            if table.dim() != 2 or table.shape[1] != self.top_k or table.dtype != torch.int64:
                raise UserError(f"table has shape {tuple(table.shape)}, {table.dtype}; int64 [ids, top_k={self.top_k}]")
            if table.numel() and not (table.min() >= 0 and table.max() < num_experts):
                raise UserError(f"table has experts {table.min()}..{table.max()}, not all in 0..{num_experts - 1}")
        self.register_buffer("table", table)

    def choose(self, groups: RoutingGroups, device: torch.device) -> Tensor:
        ids_T = groups.token_ids_T
        if ids_T is None:
            raise UserError(
                "gate='hash' routes by token id and got none: call layer(x, token_ids=ids), or make "
                "RoutingGroups(..., token_ids_T=ids)"
            )
        if ids_T.is_floating_point() or ids_T.dtype == torch.bool:
            raise UserError(f"token_ids has dtype {ids_T.dtype}; it must be a dtype of whole numbers, as int64")
        ids_T = ids_T.long()
        if groups.mask_T is not None:
            ids_T = torch.where(groups.mask_T, ids_T, 0)
        if ids_T.device.type == "cpu" and ids_T.numel() and not torch.compiler.is_compiling():
            low, high = map(int, ids_T.aminmax())
            if low < 0:
                raise UserError(f"token_ids has {low}; ids must be 0 or more")
            if self.table is not None and high >= len(self.table):
                raise UserError(f"token_ids has {high}; the table of the hash gate ends at {len(self.table) - 1}")
        if self.table is not None:
            return self.table[ids_T]
        keys_T = random.fold(torch.tensor(self._key, device=device, dtype=torch.int64), ids_T)
        return best_by_hash(random.uniform(keys_T, self.num_experts), self.top_k)
