"""The gate that balances by Sinkhorn's iteration.

Shape letters: T tokens, E experts, G routing groups, S positions of a group.
"""

from typing import Any

import torch
from torch import Tensor

from fmoe.errors import UserError
from fmoe.gates.router import Choice, Scores, TopKRouter
from fmoe.routing import RoutingGroups


class SinkhornRouter(TopKRouter):
    """Gate that chooses experts by scores that Sinkhorn's iteration balances (S-BASE, arXiv 2202.01169).

    Megatron-core calls it "sinkhorn" load balancing. In each routing group (`fmoe.routing.RoutingGroups`), rows and
    columns of ``exp(logits)`` are scaled until each token's row sums to one, and each expert's column to
    ``tokens of the group / E``. A token takes the K experts with its largest scaled scores. Loads are only nearly even:
    the iteration balances sums of scores, not numbers of tokens. Where scaled scores are equal, as in a group of one
    token or of equal tokens, the logits decide.

    Combine weights are ``sigmoid(logit)`` for K = 1, and the softmax over all experts for K > 1. Evaluation chooses by
    the logits.

    Args:
        iterations: maximum number of iterations.
        tolerance: the iteration of a group stops when the relative error of its column sums is at most this.
    """

    routes_by_logits = True

    common_losses = ("z",)

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int | None = None,
        *,
        iterations: int = 30,
        tolerance: float = 1e-3,
        **options: Any,
    ):
        super().__init__(d_model, num_experts, top_k, **options)
        if iterations < 1 or not tolerance >= 0:
            raise UserError(f"iterations={iterations} must be at least 1, and tolerance={tolerance} at least 0")
        self.iterations = iterations
        self.tolerance = tolerance

    def choose(self, scores: Scores, groups: RoutingGroups) -> Choice:
        logits_TE = scores.logits_TE.detach()
        if self.training:
            expert_TK = _rank(self.balance(logits_TE, groups), logits_TE)[:, : self.top_k]
        else:
            expert_TK = logits_TE.topk(self.top_k, dim=-1).indices
        weight_TE = scores.logits_TE.sigmoid() if self.top_k == 1 else scores.probs_TE
        return Choice(expert_TK, weight_TE.gather(-1, expert_TK))

    def balance(self, logits_TE: Tensor, groups: RoutingGroups) -> Tensor:
        """Return the logarithm of the scores that Sinkhorn's iteration balances, [T, E].

        Only columns (experts) are scaled: scaling a row would not change the order of a token's experts.
        """
        logits_GSE = groups.split(logits_TE)
        valid_GS = groups.valid(logits_TE.device)
        prices = _prices_op if torch.compiler.is_compiling() else _prices
        return groups.join(logits_GSE - prices(logits_GSE, valid_GS, self.iterations, self.tolerance).unsqueeze(1))


def _rank(balanced_TE: Tensor, logits_TE: Tensor) -> Tensor:
    """Return each token's experts in descending order of balanced scores; equal ones, up to rounding, by logits."""
    largest_T1 = balanced_TE.amax(-1, keepdim=True)
    size_T1 = 1 + logits_TE.abs().amax(-1, keepdim=True) + balanced_TE.abs().amax(-1, keepdim=True)
    steps_TE = ((balanced_TE - largest_T1) / (64 * torch.finfo(balanced_TE.dtype).eps * size_T1)).round()
    by_logits_TE = logits_TE.sort(dim=-1, descending=True, stable=True).indices
    order_TE = steps_TE.gather(-1, by_logits_TE).sort(dim=-1, descending=True, stable=True).indices
    return by_logits_TE.gather(-1, order_TE)


def _prices(logits_GSE: Tensor, valid_GS: Tensor, iterations: int, tolerance: float) -> Tensor:
    """Return the negative logarithm of the factor by which Sinkhorn's iteration scales each expert's column, [G, E]."""
    valid_GS1 = valid_GS.unsqueeze(-1)
    log_share_G1 = (valid_GS1.sum(1).to(logits_GSE.dtype) / logits_GSE.shape[-1]).clamp(min=1e-9).log()
    price_GE = logits_GSE.new_zeros(logits_GSE.shape[0], logits_GSE.shape[2])
    done_G1 = ~valid_GS1.any(1)
    for _ in range(iterations):
        rows_GSE = (logits_GSE - price_GE.unsqueeze(1)).log_softmax(-1)
        excess_GE = torch.where(valid_GS1, rows_GSE, -torch.inf).logsumexp(1) - log_share_G1
        done_G1 = done_G1 | (excess_GE.abs().amax(1, keepdim=True) <= tolerance)
        if logits_GSE.device.type == "cpu" and bool(done_G1.all()):
            break  # more iterations change nothing; on a GPU this check would cost more than they do
        price_GE = torch.where(done_G1, price_GE, price_GE + excess_GE)
    return price_GE


# A custom operation for torch.compile, which would unroll the loop.
_prices_op = torch.library.custom_op(
    "fmoe::sinkhorn_prices",
    _prices,
    mutates_args=(),
    schema="(Tensor logits, Tensor valid, int iterations, float tolerance) -> Tensor",
)


@_prices_op.register_fake
def _(logits_GSE: Tensor, valid_GS: Tensor, iterations: int, tolerance: float) -> Tensor:
    return logits_GSE.new_empty(logits_GSE.shape[0], logits_GSE.shape[2])
