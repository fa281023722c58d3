"""FasterMoE's topology-aware gate (PPoPP'22), for clusters with a slow network between nodes.

A gate reads two environment variables when it is built. FMOE_TOPO_GPUS_PER_NODE is the number of ranks per node
(default 8). FMOE_TOPO_OUTGOING_FRACTION is the share of tokens that may go to their best expert on another node before
the gate restricts choices (default 0.14).
"""

import math
import os
from collections.abc import Callable

import torch
from torch import Tensor

from fmoe.errors import UserError
from fmoe.fastmoe.gates import NaiveGate, balance_loss, softmax


class FasterGate(NaiveGate):
    """Top-2 gate that keeps most choices within the node if too many tokens have their best expert on another node.

    Of a rank's T tokens, let n have their best expert on another node, and let ``limit = int(ogn_ratio * T)``.

    * If ``n <= limit``, every token gets its two best experts of all nodes.
    * If ``n > limit``, the first choice of every token is the best expert within its node. Of the n tokens, the
      ``limit`` ones with the largest logits have their best expert, on another node, as second choice. All other tokens
      have the second best expert within their node, or -1 if the node has only one expert.

    Args:
        node_rank: index of this rank's node, from 0, in order of ranks.

    Attributes:
        ne_per_node: number of experts per node.
        ogn_ratio: value of the environment variable FMOE_TOPO_OUTGOING_FRACTION, by default 0.14.
        mask: bool [E], True for experts of other nodes.
    """

    mask: Tensor

    def __init__(self, d_model: int, n_expert: int, world_size: int, node_rank: int, gate_bias: bool = True):
        super().__init__(d_model, n_expert, world_size, top_k=2, gate_bias=gate_bias)
        self.node_rank = node_rank
        self.ne_per_node = ranks_per_node() * n_expert
        num_nodes = math.ceil(self.tot_expert / self.ne_per_node)
        if not 0 <= node_rank < num_nodes:
            raise UserError(
                f"node_rank={node_rank} is not in 0..{num_nodes - 1}, as world_size={world_size} and "
                f"FMOE_TOPO_GPUS_PER_NODE={ranks_per_node()} require: pass gate=gen_faster_gate(rank in moe_group)"
            )
        self.ogn_ratio = _number("FMOE_TOPO_OUTGOING_FRACTION", float, 0.14)
        self.register_buffer("mask", torch.empty(self.tot_expert, dtype=torch.bool), persistent=False)
        self._fill_mask()

    def _fill_mask(self) -> None:
        expert_E = torch.arange(self.tot_expert, dtype=torch.int64, device=self.mask.device)
        self.mask.copy_(expert_E.div(self.ne_per_node, rounding_mode="floor") != self.node_rank)

    def reset_parameters(self) -> None:
        """Draw the linear map again; fill the mask, which `to_empty` leaves uninitialized."""
        super().reset_parameters()
        self._fill_mask()

    def forward(self, inp: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # FastMoE's
        """Map [T, D] to index [T, 2], -1 for no expert, and score [T, 2]."""
        logits_TE = self.gate(inp)
        top_TK, free_TK = logits_TE.topk(2, dim=-1)
        self.set_loss(balance_loss(logits_TE, free_TK[:, 0]))
        limit = min(int(self.ogn_ratio * inp.shape[0]), inp.shape[0])
        leaves_T = self.mask[free_TK[:, 0]]
        local_TK, local_index_TK = logits_TE.masked_fill(self.mask, -torch.inf).topk(2, dim=-1)
        limited_TK = torch.where(local_TK.isneginf(), -1, local_index_TK)
        going = top_TK[:, 0].masked_fill(~leaves_T, -torch.inf).topk(limit).indices
        going_T = torch.zeros_like(leaves_T).scatter(0, going, True) & leaves_T
        limited_TK = torch.stack([limited_TK[:, 0], torch.where(going_T, free_TK[:, 0], limited_TK[:, 1])], 1)
        index_TK = torch.where(leaves_T.sum() > limit, limited_TK, free_TK)
        logit_TK = logits_TE.gather(1, index_TK.clamp(min=0)).masked_fill(index_TK < 0, -torch.inf)
        return index_TK, softmax(logit_TK).to(inp.dtype)


def gen_faster_gate(rank: int) -> Callable[..., FasterGate]:
    """Return a function to pass as a layer's ``gate``. It builds a `FasterGate`.

    Args:
        rank: this rank's index in the layer's ``moe_group``.
    """

    def build(d_model: int, n_expert: int, world_size: int, top_k: int = 2, gate_bias: bool = True) -> FasterGate:
        if top_k != 2:
            raise UserError(f"top_k={top_k} is not supported by FasterGate, which chooses two experts")
        return FasterGate(d_model, n_expert, world_size, rank // ranks_per_node(), gate_bias)

    return build


def ranks_per_node() -> int:
    """Return the number of ranks per node, from FMOE_TOPO_GPUS_PER_NODE (default 8)."""
    return _number("FMOE_TOPO_GPUS_PER_NODE", int, 8)


def _number(name: str, kind: type, default: float):
    text = os.environ.get(name)
    try:
        value = default if text is None else kind(text)
    except ValueError:
        raise UserError(f"{name}={text!r} must be {'an integer' if kind is int else 'a number'}") from None
    if not (1 if kind is int else 0) <= value < math.inf:
        raise UserError(f"{name}={text!r} must be at least {1 if kind is int else 0}, and finite")
    return value
