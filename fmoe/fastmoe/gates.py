"""FastMoE's gates, which return ``(index, score)`` and store a loss.

A gate is built by ``gate(d_model, num_expert, world_size, top_k)``. The gates behave as FastMoE 1.1 documents them.
docs/migration.md lists the bugs of FastMoE that are fixed here. In new code, use the routers of `fmoe.gates`.

Shape letters: T tokens, D width, K choices, E experts of all ranks, L experts of a rank, W ranks.
"""

import math
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmoe.errors import UserError
from fmoe.exchange.collectives import all_gather
from fmoe.fastmoe.functions import count_by_gate, exchange_counts, moe_group_of
from fmoe.gates.noisy import chance_of_choice
from fmoe.losses import importance_loss, load_balancing_loss, load_loss


class BaseGate(nn.Module):
    """Base class of gates for ``num_expert`` experts on each of ``world_size`` ranks.

    ``forward(x)`` maps tokens [T, D] to (index [T, K], score [T, K]): ids of the chosen experts, and their weights.

    Attributes:
        tot_expert: E, the number of experts on all ranks.
        default_top_k: K of layers that are built without ``top_k``.
        runs_collectives: whether `forward` exchanges counts between ranks.
    """

    default_top_k = 2
    runs_collectives = False

    def __init__(self, num_expert: int, world_size: int):
        super().__init__()
        self.world_size = world_size
        self.num_expert = num_expert
        self.tot_expert = world_size * num_expert
        # By id of the gate. Replicas of nn.DataParallel, which are discarded, share this dict with the gate.
        self._losses: dict[int, Tensor] = {}

    def forward(self, x: Tensor):
        raise NotImplementedError("a gate must implement forward(x) -> (index, score)")

    @property
    def loss(self) -> Tensor | None:
        """Loss of the last forward pass, under nn.DataParallel the mean over the replicas; None if there is none."""
        losses = list(self._losses.values())
        if len(losses) < 2:
            return losses[0] if losses else None
        return torch.stack([loss.to(losses[0].device) for loss in losses]).mean(0)

    @loss.setter
    def loss(self, loss: Tensor | None) -> None:
        if not getattr(self, "_is_replica", False):
            self._losses.clear()
        if loss is not None:
            self._losses[id(self)] = loss

    def _replicate_for_data_parallel(self) -> Self:
        self._losses.clear()  # of an earlier forward pass
        return super()._replicate_for_data_parallel()

    def set_loss(self, loss: Tensor) -> None:
        """Store the loss of this forward pass."""
        self.loss = loss

    def get_loss(self, clear: bool = True) -> Tensor | None:
        """Return the stored loss, to add to the training loss; None if there is none. ``clear`` removes it."""
        loss = self.loss
        if clear:
            self.loss = None
        return loss

    @property
    def has_loss(self) -> bool:
        """True if a loss is stored."""
        return self.loss is not None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_losses": {}}  # a loss belongs to a graph, which cannot be copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Earlier versions of fmoe pickled "loss" instead.
        super().__setstate__({"_losses": {}} | {key: value for key, value in state.items() if key != "loss"})


def check_top_k(top_k: int, num_expert: int, world_size: int) -> None:
    """Check that a gate can choose ``top_k`` experts.

    Raises:
        UserError: ``top_k`` is below 1 or exceeds the number of experts on all ranks.
    """
    if not 1 <= top_k <= num_expert * world_size:
        raise UserError(f"top_k={top_k} is not between 1 and num_expert={num_expert} * world_size={world_size}")


class NaiveGate(BaseGate):
    """Top-k gate that weights the K largest logits by a softmax over them. Its loss is zero."""

    def __init__(self, d_model: int, num_expert: int, world_size: int, top_k: int = 2, gate_bias: bool = True):
        super().__init__(num_expert, world_size)
        check_top_k(top_k, num_expert, world_size)
        self.gate = nn.Linear(d_model, self.tot_expert, bias=gate_bias)
        self.top_k = top_k

    def reset_parameters(self) -> None:
        """Draw the linear map again."""
        self.gate.reset_parameters()

    def forward(self, inp: Tensor, return_all_scores: bool = False):
        """Map [T, D] to index [T, K], best first, and score [T, K] in the dtype of ``inp``.

        With ``return_all_scores``, also return all logits [T, E].
        """
        logits_TE = self.gate(inp)
        logit_TK, index_TK = logits_TE.topk(self.top_k, dim=-1)
        score_TK = softmax(logit_TK).view(-1, self.top_k).to(inp.dtype)
        # As in FastMoE, every gate except ZeroGate and SwipeGate stores a loss.
        self.set_loss(torch.zeros(1, device=inp.device, dtype=torch.float32))
        return (index_TK, score_TK, logits_TE) if return_all_scores else (index_TK, score_TK)


class NoisyGate(BaseGate):
    """Noisy top-k gating (Shazeer et al., arXiv 1701.06538, equations 3-5) for any K.

    Evaluation adds no noise. The gate's loss is the sum of the importance loss and the load loss (equations 6-11). In
    evaluation, or if K = E, the load loss counts the tokens of each expert instead of estimating their number.
    """

    def __init__(self, d_model: int, num_expert: int, world_size: int, top_k: int = 2):
        super().__init__(num_expert, world_size)
        check_top_k(top_k, num_expert, world_size)
        self.top_k = top_k
        self.noise_epsilon = 1e-2
        self.w_gate = nn.Parameter(torch.empty(d_model, self.tot_expert))
        self.w_noise = nn.Parameter(torch.empty(d_model, self.tot_expert))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from U(-1/sqrt(D), 1/sqrt(D)), as `nn.Linear` does."""
        bound = 1 / math.sqrt(self.w_gate.shape[0])
        for weight in (self.w_gate, self.w_noise):
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, inp: Tensor) -> tuple[Tensor, Tensor]:
        """Map [T, D] to index [T, K], best first, and score [T, K] in the dtype of ``inp``."""
        dtype = torch.promote_types(inp.dtype, torch.float32)
        clean_TE = noisy_TE = (inp @ self.w_gate).to(dtype)
        if self.training:
            std_TE = F.softplus((inp @ self.w_noise).to(dtype)) + self.noise_epsilon
            noisy_TE = clean_TE + torch.randn_like(clean_TE) * std_TE
        top_logits, top_index = noisy_TE.topk(min(self.top_k + 1, self.tot_expert), dim=-1)
        index_TK = top_index[:, : self.top_k]
        score_TK = softmax(top_logits[:, : self.top_k])
        chosen_TE = torch.zeros_like(clean_TE).scatter(1, index_TK, 1.0)
        if self.training and self.top_k < self.tot_expert:
            chosen_TE = chance_of_choice(clean_TE, noisy_TE, std_TE, top_logits)
        gates_TE = torch.zeros_like(clean_TE).scatter(1, index_TK, score_TK)
        self.set_loss(importance_loss(gates_TE.unsqueeze(0)) + load_loss(chosen_TE.unsqueeze(0)))
        return index_TK, score_TK.to(inp.dtype)


class GShardGate(NaiveGate):
    """Top-k gate, by default top-2, with random second choices and a capacity (GShard, arXiv 2006.16668, algorithm 1).

    In training, choices after the first are kept with probability ``min(1, 2 * score)``. Every expert then accepts at
    most ``ceil(factor * T) * K // E`` choices of each rank (at least one), where T is the number of tokens of the rank.
    It accepts first choices before second ones. The balance loss counts first choices before any is dropped.

    Args:
        topk: K.
        capacity: capacity factors in training and in evaluation.
        random_routing: whether to drop choices at random in training.
    """

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        topk: int = 2,
        capacity: tuple[float, float] = (1.2, 2.4),
        random_routing: bool = True,
        gate_bias: bool = True,
    ):
        super().__init__(d_model, num_expert, world_size, top_k=topk, gate_bias=gate_bias)
        self.capacity = capacity
        self.random_routing = random_routing

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # FastMoE's
        """Map [T, D] to index [T, K], -1 for dropped choices, and score [T, K]."""
        index_TK, score_TK, logits_TE = super().forward(x, return_all_scores=True)
        self.set_loss(balance_loss(logits_TE, index_TK[:, 0]))
        if self.random_routing and self.training:
            later_TK = torch.arange(self.top_k, device=x.device, dtype=torch.int64) > 0
            noise_T1 = torch.rand(x.shape[0], 1, device=x.device, dtype=torch.float32)
            index_TK = index_TK.masked_fill(later_TK & (2 * score_TK < noise_T1), -1)
        return self.limit(index_TK, self.capacity[0 if self.training else 1]), score_TK

    def limit(self, index_TK: Tensor, factor: float) -> Tensor:
        """Return ``index_TK`` with -1 for choices beyond an expert's capacity, given the capacity ``factor``."""
        capacity = math.ceil(factor * index_TK.shape[0]) * self.top_k // self.tot_expert
        return keep_first(index_TK, index_TK.new_full((self.tot_expert,), max(capacity, 1)))


class SwitchGate(NaiveGate):
    """Top-k gate, by default top-1, weighted by the probability (Switch Transformer, arXiv 2101.03961).

    In training, noise in [1 - eps, 1 + eps] is added to the logits. The paper multiplies the input by the noise, as the
    router "switch" of `fmoe.gates` does. Every expert accepts at most ``ceil(factor * T * K / num_expert)`` choices of
    all ranks together, where T counts the tokens of the expert's rank.

    Args:
        topk: K; 1 in layers that are built without ``top_k``.
        switch_eps: half width of the noise.
        capacity: capacity factors in training and in evaluation.
    """

    default_top_k = 1
    runs_collectives = True

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        topk: int = 1,
        switch_eps: float = 0.1,
        capacity: tuple[float, float] = (1.2, 2.4),
        gate_bias: bool = True,
    ):
        super().__init__(d_model, num_expert, world_size, top_k=topk, gate_bias=gate_bias)
        self.switch_eps = switch_eps
        self.capacity = capacity

    def forward(self, inp: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # FastMoE's
        """Map [T, D] to index [T, K], -1 if the expert is full, and score [T, K]."""
        logits_TE = self.gate(inp)
        logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        if self.training:
            noise_TE = torch.rand_like(logits_TE) * 2 * self.switch_eps + 1.0 - self.switch_eps
            logits_TE = logits_TE + noise_TE
        score_TK, index_TK = softmax(logits_TE).topk(self.top_k, dim=-1)
        self.set_loss(balance_loss(logits_TE, index_TK))
        factor = self.capacity[0 if self.training else 1]
        capacity = math.ceil(factor * inp.shape[0] * self.top_k / self.num_expert)
        kept_TK = limit_by_capacity(index_TK, self.num_expert, self.world_size, capacity)[2]
        return kept_TK, score_TK.to(inp.dtype)


class SwipeGate(NaiveGate):
    """Top-k gate with equal load on all ranks in training.

    In training, the experts of a rank accept T * K choices together. Choices beyond this capacity move to ranks with
    free capacity. First choices move in the first round, second choices in the second, and so on. All ranks must hold
    the same number T of tokens.
    """

    runs_collectives = True

    def forward(self, inp: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # FastMoE's
        """Map [T, D] to index [T, K] and score [T, K], a softmax over the logits of the assigned experts."""
        logits_TE = self.gate(inp)
        index_TK = logits_TE.topk(self.top_k, dim=-1).indices
        if self.training:
            capacity = torch.tensor(inp.shape[0] * self.top_k, dtype=torch.int64, device="cpu")
            columns = []
            for k in range(self.top_k):
                column_T, capacity = self.swipe_once(index_TK[:, k], capacity, k % self.num_expert)
                columns.append(column_T)
            index_TK = torch.stack(columns, 1)
        logit_TK = logits_TE.gather(1, index_TK.clamp(min=0))
        return index_TK, softmax(logit_TK).to(inp.dtype)

    @torch.no_grad()
    def swipe_once(self, idx: Tensor, capacity: Tensor, bias: int) -> tuple[Tensor, Tensor]:
        """Run one round: move the choices that exceed a rank's capacity.

        Args:
            idx: int64 [T], the chosen expert of each token of this rank.
            capacity: remaining capacity of this rank's experts together.
            bias: index, within its rank, of the expert that gets the moved choices.

        Returns:
            ``idx`` after the moves, with -1 for choices that no rank accepts; and the remaining capacity.
        """
        rank_T = torch.div(idx, self.num_expert, rounding_mode="floor")
        want_W = torch.bincount(rank_T, minlength=self.world_size)
        rank = 0
        counts = torch.cat([want_W, capacity.reshape(1).to(want_W)])
        if self.world_size > 1:
            group = moe_group_of(self.world_size)
            rank = group.rank()
            counts = all_gather(group, counts, "a gate's exchange of counts").wait(for_host=True)
        counts = counts.view(self.world_size, -1).cpu()
        want_WW = counts[:, :-1]
        capacity_W = counts[:, -1]
        # [source, destination]: the queue of refused choices is matched with the queue of free capacity.
        taken_WW = grant(want_WW, capacity_W)
        refused_W = (want_WW - taken_WW).sum(1)
        room_W = capacity_W - taken_WW.sum(0)
        refused_end_W1 = refused_W.cumsum(0).unsqueeze(1)
        room_end_W = room_W.cumsum(0)
        end_WW = torch.minimum(refused_end_W1, room_end_W)
        begin_WW = torch.maximum(refused_end_W1 - refused_W.unsqueeze(1), room_end_W - room_W)
        moved_WW = (end_WW - begin_WW).clamp(min=0)

        stays_T = keep_first(rank_T, taken_WW[rank].to(idx.device)) >= 0
        ranks_W = torch.arange(self.world_size, dtype=torch.int64, device="cpu")
        targets_M = ranks_W.repeat_interleave(moved_WW[rank]).to(idx.device)
        new_idx = torch.where(stays_T, idx, -1)
        new_idx[(~stays_T).nonzero().squeeze(1)[: len(targets_M)]] = targets_M * self.num_expert + bias
        return new_idx, (room_W - moved_WW.sum(0))[rank].to(capacity.device)


class DCGate(GShardGate):
    """`GShardGate` in which an expert accepts at most ``ceil(factor * T)`` choices of all ranks together.

    T is the number of tokens of the expert's rank. Choices are accepted in order of ranks.
    """

    runs_collectives = True

    def limit(self, index_TK: Tensor, factor: float) -> Tensor:
        """Return ``index_TK`` with -1 for choices beyond an expert's capacity, given the capacity ``factor``."""
        capacity = math.ceil(factor * index_TK.shape[0])
        return limit_by_capacity(index_TK, self.num_expert, self.world_size, capacity)[2]


class ZeroGate(BaseGate):
    """Gate that assigns all choices to expert 0, with weights 1 / K."""

    def __init__(self, _d_model: int, num_expert: int, world_size: int, top_k: int = 2):
        super().__init__(num_expert, world_size)
        self.top_k = top_k

    def forward(self, inp: Tensor) -> tuple[Tensor, Tensor]:
        """Map [T, D] to index [T, K] and score [T, K]."""
        shape = (inp.shape[0], self.top_k)
        index_TK = torch.zeros(shape, dtype=torch.int64, device=inp.device)
        return index_TK, torch.full(shape, 1 / self.top_k, dtype=inp.dtype, device=inp.device)


@torch.no_grad()
def limit_by_capacity(
    topk_idx: Tensor, num_expert: int, world_size: int, capacity: int | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Limit every expert to ``capacity`` choices of all ranks together, accepted in order of ranks.

    Args:
        topk_idx: int64 [T] or [T, K]; -1 for no choice.
        capacity: one number for each of this rank's experts [L], or one for all of them.

    Returns:
        ``new_lec`` [W * L], the number of this rank's choices that each expert of all ranks accepts;
        ``new_gec`` [W * L], the number of each rank's choices that each expert of this rank accepts;
        ``topk_idx`` with -1 for choices that are not accepted (`keep_first`).
    """
    _, _, offered = count_by_gate(topk_idx, num_expert, world_size, require_pos=False)
    new_gec = grant(offered.view(world_size, num_expert), capacity).view(-1)
    new_lec = exchange_counts(new_gec, world_size)
    return new_lec, new_gec, keep_first(topk_idx, new_lec)


def grant(offered_WX: Tensor, capacity_X: int | Tensor) -> Tensor:
    """Return how many choices of each of W ranks are accepted by each of X receivers, [W, X].

    Receivers are experts or ranks. Each accepts choices in order of ranks, up to its capacity.

    Args:
        offered_WX: number of choices of each rank for each receiver.
        capacity_X: capacity of each receiver, or one number for all of them.
    """
    before_WX = offered_WX.cumsum(0) - offered_WX
    capacity_X = torch.as_tensor(capacity_X, device=offered_WX.device, dtype=torch.int64)
    return (capacity_X - before_WX).clamp(min=0).minimum(offered_WX)


@torch.no_grad()
def keep_first(index: Tensor, limit_E: Tensor) -> Tensor:
    """Keep the first ``limit_E[e]`` choices of each expert e, and replace the others with -1.

    First choices of all tokens, in order of tokens, precede second choices.

    Args:
        index: [T] or [T, K].
    """
    queue_N = (index if index.dim() == 1 else index.t()).reshape(-1)
    queue_N = torch.where(queue_N < 0, len(limit_E), queue_N)
    sorted_N, order_N = queue_N.sort(stable=True)
    place_N = torch.arange(len(queue_N), device=index.device, dtype=torch.int64) - torch.searchsorted(
        sorted_N, sorted_N
    )
    place_N = torch.empty_like(order_N).scatter_(0, order_N, place_N)
    fits_N = place_N < torch.cat([limit_E, limit_E.new_zeros(1)])[queue_N]
    fits = fits_N if index.dim() == 1 else fits_N.view(index.shape[1], index.shape[0]).t()
    return torch.where(fits, index, -1).contiguous()


def balance_loss(logits_TE: Tensor, chosen: Tensor) -> Tensor:
    """Return the load balancing loss of the experts in ``chosen`` (ids, any shape); 1 if balanced."""
    ids_E = torch.arange(logits_TE.shape[1], device=chosen.device, dtype=torch.int64)
    count_E = (chosen.reshape(-1, 1) == ids_E).sum(0)
    return load_balancing_loss(softmax(logits_TE).unsqueeze(0), count_E.unsqueeze(0))


def softmax(logits: Tensor) -> Tensor:
    """Return the softmax over the last dimension, in float32 or wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
