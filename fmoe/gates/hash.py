"""The gate that routes by token id."""

import torch
from torch import Tensor

from fmoe import random
from fmoe.errors import UserError
from fmoe.gates.base import FixedRouter
from fmoe.gates.random import best_by_hash
from fmoe.routing import RoutingGroups


class HashRouter(FixedRouter):
    """Hash layers (Roller et al., arXiv 2106.04426): a token's experts are a fixed function of its id, with nothing to
    train. K > 1 takes as many hash functions that never agree, each weighted 1 / K; the paper's MultiHash has them pick
    segments of one expert's weights instead.

    Args:
        seed: key of the hash functions ("random hash"). Layers with different seeds spread a token differently.
        table: int64 [vocabulary, K], experts by token id, in place of a hash: for the paper's "balanced" and
            "clustered" assignments, made by the user from the training data. Saved with the model.

    Raises:
        UserError: the table has not K columns of experts; a call without token ids.
    """

    decides_by_logits = True

    default_top_k = 1

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int | None = None,
        *,
        seed: int = 0,
        table: Tensor | None = None,
        **options,
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
        if self.table is not None:
            return self.table[ids_T]
        keys_T = random.fold(torch.tensor(self._key, device=device), ids_T.long())
        return best_by_hash(random.uniform(keys_T, self.num_experts), self.top_k)
