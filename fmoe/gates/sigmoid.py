"""The gate of DeepSeek-V3."""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.errors import UserError
from fmoe.gates.capacity import count_by_group
from fmoe.gates.naive import NaiveRouter, limit_to_groups
from fmoe.gates.router import Choice, Scores, leave_out_padding, normalize_scores
from fmoe.losses import sequence_balance_loss
from fmoe.routing import Routing, RoutingGroups, sum_dtype
from fmoe.runtime import collectives


class SigmoidRouter(NaiveRouter):
    """Gate with sigmoid scores that is balanced by a bias instead of a loss (DeepSeek-V3, arXiv 2412.19437).

    Section 2.1.2 of that paper describes the gate, and "loss-free balancing" (arXiv 2408.15664) the bias.

    A token gets the K experts with the largest ``sigmoid(logit) + expert_bias_E``. The bias affects only the choice.
    Weights are the scores without it, normalized over the K experts (for K = 1 not normalized), times ``routed_scale``
    (equations 12-16).

    Call `end_step` once per optimizer step, or `fmoe.attach_end_step` once. It lowers the bias of an expert by
    ``bias_step`` if the expert's load was above the mean, and raises it by ``bias_step`` if the load was below. The
    layer counts loads in the backward pass. All accumulated micro batches count; recomputation does not count twice.
    ``expert_bias_E`` is a buffer, saved with the model. It stays float32 in a 16-bit model, because 16 bits would round
    its steps away.

    The loss ``sequence_balance`` (equations 17-20) prevents extreme imbalance within single sequences: a routing group
    is one sequence unless ``group_size`` is set. The loss counts the K largest scores without bias (equation 18).

    Args:
        d_model, num_experts, top_k, options: see `fmoe.gates.NaiveRouter`, whose options are all but ``bias_step``.
        bias_step: u, the change of a bias per step; 0 leaves balancing to the loss.
        routed_scale: factor of the weights (2.5 in DeepSeek-V3).
        normalize: False uses the scores as weights without normalizing them.
        score: "sigmoid", or "softmax" for the softmax over all experts, which "loss-free balancing" also tries.
        expert_groups: number of groups of experts. A token chooses only within its best ``kept_groups`` groups. A
            group ranks by the sum of its two largest scores with bias (`limit_to_groups`). None for no groups.
        kept_groups: number of groups within which a token chooses.

    Raises:
        UserError: see `TopKRouter`; ``bias_step`` is negative; ``score``, ``routed_scale`` or the expert groups are
            invalid.
    """

    routes_by_logits = True

    common_losses = ()
    expert_bias_E: Tensor

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int | None = None,
        *,
        bias_step: float = 1e-3,
        score: str = "sigmoid",
        **options: Any,
    ):
        super().__init__(d_model, num_experts, top_k, score=score, **options)
        if not bias_step >= 0:
            raise UserError(f"bias_step={bias_step} must be at least 0")
        self.bias_step = bias_step
        self.register_buffer("expert_bias_E", torch.zeros(num_experts, dtype=torch.float32))
        # Always the same memory, because a CUDA graph repeats additions to it.
        # Not a buffer: DistributedDataParallel would overwrite each rank's counts with those of rank 0.
        self._load_E = self._no_loads()

    def _no_loads(self) -> Tensor:
        device = self.expert_bias_E.device
        return torch.zeros(self.num_experts, dtype=sum_dtype(device), device=device)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "expert_bias_E" in self._buffers:
            self.expert_bias_E.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        bias_E = self.expert_bias_E
        super()._apply(fn, recurse)
        if self.expert_bias_E.dtype.itemsize < 4:
            self.expert_bias_E = bias_E.to(self.expert_bias_E.device)
        self._loads()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.expert_bias_E.dtype.itemsize < 4:  # assign=True takes the state's tensor with its dtype
            self.expert_bias_E = self.expert_bias_E.float()

    def choose(self, scores: Scores, groups: RoutingGroups) -> Choice:
        score_TE = scores.logits_TE.sigmoid() if self.score == "sigmoid" else scores.probs_TE
        ranked_TE = score_TE.detach() + self.expert_bias_E
        if self.expert_groups is not None:
            ranked_TE = limit_to_groups(ranked_TE, self.expert_groups, self.kept_groups, best_of=2)
        expert_TK = ranked_TE.topk(self.top_k, dim=-1).indices
        weight_TK = score_TE.gather(-1, expert_TK)
        if self.normalize and self.top_k > 1:
            weight_TK = normalize_scores(weight_TK)
        return Choice(expert_TK, weight_TK * self.routed_scale, self.balance_loss(score_TE, groups))

    def balance_loss(self, score_TE: Tensor, groups: RoutingGroups) -> dict[str, Tensor]:
        """Return the loss ``sequence_balance`` of the scores; empty in evaluation."""
        if not self.training:
            return {}
        best_TK = leave_out_padding(score_TE.topk(self.top_k, dim=-1).indices, groups)
        load_GE = count_by_group(best_TK, groups, self.num_experts).to(score_TE.dtype)
        valid_GS = groups.valid_or_none(load_GE.device)
        return {"sequence_balance": sequence_balance_loss(groups.split(score_TE), load_GE, valid_GS)}

    def record(self, routing: Routing) -> None:
        """Add the loads of one micro batch to those that `end_step` uses. The layer calls this."""
        if routing.stats is None:
            return
        loads_E = self._loads()
        loads_E += routing.stats.load_E.to(loads_E.device)

    def _loads(self) -> Tensor:
        """Return the loads since the last step, as a tensor on the gate's device."""
        device = self.expert_bias_E.device
        if self._load_E.device != device:
            self._load_E = self._no_loads() if self._load_E.is_meta else self._load_E.to(device, sum_dtype(device))
        return self._load_E

    @torch.no_grad()
    def end_step(self, group: dist.ProcessGroup | None = None) -> None:
        """Add ``bias_step * sign(mean load - load)`` to the bias, and reset the loads.

        The loads are those that the layer recorded since the last call.

        Args:
            group: data and expert parallel ranks, which share this gate and see different tokens. Loads are summed over
                them, so all of them must make this call. None for no sum.
        """
        load_E = self._loads()
        if group is not None:
            collectives.run(dist.all_reduce, load_E, group=group)
        self.expert_bias_E += self.bias_step * (load_E.mean() - load_E).sign()
        load_E.zero_()

    def skip_step(self) -> None:
        """Reset the loads and keep the bias. Call this instead of `end_step` if the optimizer skips a step."""
        self._loads().zero_()
