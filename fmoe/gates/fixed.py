"""Gates without parameters: all tokens to one expert, random experts, or experts by token id.

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
    """Gate for tests and benchmarks: every choice of every token is expert 0, with weight 1 / K (FastMoE's ZeroGate).

    The balance is the worst possible. If no token is dropped, the layer's output is that of expert 0.
    """

    routes_by_logits = True

    def choose(self, groups: RoutingGroups, device: torch.device) -> Tensor:
        return torch.zeros(groups.num_tokens, self.top_k, dtype=torch.int64, device=device)


class RandomRouter(FixedRouter):
    """Gate that draws K different experts at random for each token, weighted 1 / K, in training and in evaluation.

    Roller et al. (arXiv 2106.04426) use it as a baseline. THOR (arXiv 2110.04260) draws once per batch instead. Like
    all noise (`fmoe.random`), the draw depends on (seed, layer, step, routing group), and is new at each step.
    """

    routes_by_logits = True

    def choose(self, groups: RoutingGroups, device: torch.device) -> Tensor:
        return best_by_hash(groups.uniform(self.num_experts, "random gate", device), self.top_k)

    def entropy(self) -> float:
        return math.log(self.num_experts)


def best_by_hash(noise_TE: Tensor, top_k: int) -> Tensor:
    """Return the K experts of largest noise. Among equal values, the first expert wins, on every device."""
    return noise_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


class HashRouter(FixedRouter):
    """Gate by token id: a token's experts are a fixed function of its id (Hash layers, arXiv 2106.04426).

    With K > 1, a token has K different experts, each weighted 1 / K. The paper's MultiHash is different: there, K hash
    functions assemble one expert from K segments of weights.

    Ids of padding are ignored. The values of ids are checked on the CPU only, and not under torch.compile. Without the
    check, a negative id counts from the end of the table.

    Args:
        seed: seed of the hash function ("random hash"). Layers with different seeds assign tokens differently.
        table: int64 [vocabulary, K], the experts of each token id, used instead of the hash. The paper's "balanced" and
            "clustered" assignments are such tables; compute them from the training data. Saved with the model.

    Raises:
        UserError: the table is not int64 with K columns of experts; a call has no token ids, or ids that are negative,
            past the end of the table or not integers.
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
            if not isinstance(table, Tensor):
                raise UserError(f"table has type {type(table).__name__}; it must be an int64 tensor")
            if table.dim() != 2 or table.shape[1] != self.top_k or table.dtype != torch.int64:
                raise UserError(
                    f"table has shape {tuple(table.shape)} and dtype {table.dtype}; it must be int64 "
                    f"[vocabulary, top_k={self.top_k}]"
                )
            if table.numel() and not (table.min() >= 0 and table.max() < num_experts):
                raise UserError(f"table has experts {table.min()}..{table.max()}, not all in 0..{num_experts - 1}")
        self.register_buffer("table", table)

    def choose(self, groups: RoutingGroups, device: torch.device) -> Tensor:
        ids_T = groups.token_ids_T
        if ids_T is None:
            raise UserError(
                "gate='hash' routes by token id, but got no ids: call layer(x, token_ids=ids), or pass "
                "RoutingGroups(..., token_ids_T=ids)"
            )
        if ids_T.is_floating_point() or ids_T.dtype == torch.bool:
            raise UserError(f"token_ids has dtype {ids_T.dtype}; it must be an integer dtype such as int64")
        ids_T = ids_T.long()
        if groups.mask_T is not None:
            ids_T = torch.where(groups.mask_T, ids_T, 0)
        if ids_T.device.type == "cpu" and ids_T.numel() and not torch.compiler.is_compiling():
            low, high = map(int, ids_T.aminmax())
            if low < 0:
                raise UserError(f"token_ids has the id {low}; ids must be at least 0")
            if self.table is not None and high >= len(self.table):
                raise UserError(f"token_ids has the id {high}; the hash gate's table ends at {len(self.table) - 1}")
        if self.table is not None:
            return self.table[ids_T]
        keys_T = random.fold(torch.tensor(self._key, device=device, dtype=torch.int64), ids_T)
        return best_by_hash(random.uniform(keys_T, self.num_experts), self.top_k)
