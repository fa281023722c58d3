"""Exchange by the kernels of DeepEP (optional package deep_ep).

A token is sent once to every rank that has one of its experts. That rank computes its experts' share of the output, and
returns one sum per token, as in `fmoe.exchange.all_gather`. Intranode kernels use NVLink. Internode kernels also use
RDMA.

It is written for ``deep_ep.Buffer`` as megatron-core 0.16 calls it (``get_dispatch_layout``, ``dispatch``,
``combine``). This module has not run on a GPU yet.

Shape letters: T tokens of this rank, R tokens that it receives, others as in `fmoe.exchange.base`.
"""

import contextlib
import importlib
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from fmoe.errors import UserError, one_line
from fmoe.exchange.base import Forward, GroupExchange, grad_flag
from fmoe.exchange.collectives import fence
from fmoe.exchange.hops import join_graph, tie
from fmoe.exchange.monitor import PeerError, monitor_of
from fmoe.experts.call import ExpertCall
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import Routing

SENT = torch.bfloat16  # the dtype that DeepEP combines
MULTIPLE = 16  # must divide d_model: the kernels copy 32 bytes at a time
MOST_CHOICES = 32  # maximum number of choices per token: one for each lane of a warp


class DeepEPExchange(GroupExchange):
    """Exchange by DeepEP, in bfloat16. A rank gets a token at most once, and returns the sum of its experts' outputs.

    Second derivatives and expert dropout are not supported.

    Args:
        group, num_experts: see `GroupExchange`.
        num_sms: even number of multiprocessors that DeepEP's kernels use, in all layers of this process; None for
            DeepEP's default.
        wire_dtype: ``torch.bfloat16`` rounds tokens of another dtype for the transport. None requires tokens in
            bfloat16. Each rank's sums are rounded to bfloat16 too, and then added in float32.

    Raises:
        UserError: deep_ep cannot be imported, or an option is invalid.
    """

    compared = ("num_sms", "wire_dtype")

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        *,
        num_sms: int | None = None,
        wire_dtype: torch.dtype | None = None,
    ):
        super().__init__(group, num_experts, wire_dtype=wire_dtype)
        if wire_dtype not in (None, SENT):
            raise UserError(f"exchange_options.wire_dtype={wire_dtype} is not supported: deepep sends only {SENT}")
        if num_sms is not None and (type(num_sms) is not int or num_sms < 2 or num_sms % 2):
            raise UserError(f"exchange_options.num_sms={num_sms!r} is not a positive even number")
        self.num_sms = num_sms
        self.buffer: Any = None
        if dist.get_backend(group) != "fake":  # a dry run counts the memory of another machine
            self._package = _package()

    def prepare(self, facts: Mapping[str, Any], experts: torch.nn.Module, device: torch.device) -> None:
        super().prepare(facts, experts, device)  # all ranks have the same facts: what follows raises on all or on none
        d_model = facts["d_model"]
        dtype = facts["dtype of the input"]
        if d_model % MULTIPLE:
            raise UserError(f"exchange='deepep': d_model={d_model} is not a multiple of {MULTIPLE}")
        self.check_dtype(dtype)
        if self.num_sms is not None:
            self._package.Buffer.set_num_sms(self.num_sms)
        try:
            self.buffer = _buffer_of(self.group, self._package.Buffer, d_model * SENT.itemsize)
        except Exception as error:  # the other ranks wait for this one's buffer
            self.post_failure(error)
            raise

    def check_dtype(self, dtype: torch.dtype | None) -> None:
        """Raise a UserError if tokens of this dtype would be rounded although ``wire_dtype`` is not set."""
        if self.wire_dtype is None and dtype not in (None, SENT):
            raise UserError(
                f"exchange='deepep' sends {SENT}, and the input is {dtype}: use "
                f"exchange_options={{'wire_dtype': {SENT}}}"
            )

    def plan(self, routing: Routing) -> Tensor:
        """Return the chosen expert ids [T, K].

        Raises:
            UserError: K, the number of experts per token, exceeds `MOST_CHOICES`.
        """
        if (top_k := routing.expert_TK.shape[1]) > MOST_CHOICES:
            raise UserError(f"exchange='deepep': top_k={top_k} exceeds {MOST_CHOICES}, the maximum")
        return routing.expert_TK

    def open(self, plan: Tensor, needs_grad: bool) -> Forward:
        expert_TK = plan.to(getattr(self._package, "topk_idx_t", torch.int64)).contiguous()
        layout = self.buffer.get_dispatch_layout(expert_TK, self.num_experts)[:4]
        numbers = [0, grad_flag(needs_grad), expert_TK.shape[1]]
        head = torch.tensor(numbers, dtype=torch.int64, device="cpu").to(plan.device)
        heads = self.exchange_heads(torch.cat([head, layout[0].long()]), None)
        others = [rank for rank in range(self.ep_size) if rank != self.ep_rank]
        num_sent = sum(heads[self.ep_rank][3 + rank] for rank in others)
        num_received = sum(heads[rank][3 + self.ep_rank] for rank in others)
        flags = [row[1] for row in heads]
        if not torch.is_grad_enabled() and 1 in flags:  # that rank raises, and nothing would end this one's dispatch
            raise PeerError(
                f"{monitor_of(self.group).context}: another rank of moe_group trains while this one runs under "
                "torch.no_grad(): run all ranks with gradients, or all without"
            )
        top_k = max(row[2] for row in heads)  # the gate expert_choice has another K on each rank
        expert_TK = F.pad(expert_TK, (0, top_k - expert_TK.shape[1]), value=-1)
        return _Sent(self, expert_TK, layout, num_sent, num_received, self.needs_grad_on_any(needs_grad, flags)).run

    def abort(self, error: Exception, device: torch.device) -> None:
        """Send counts of zero tokens and a failure flag to the other ranks, so that all ranks raise."""
        head = torch.zeros(3 + self.ep_size, dtype=torch.int64, device=device)
        head[0] = 1
        self.exchange_heads(head, error)


@dataclass(eq=False)
class _Sent:
    """The tokens of one forward pass, which are sent to the ranks of their experts.

    Attributes:
        expert_TK: chosen experts.
        layout: DeepEP's layout of the dispatch.
        num_sent, num_received: numbers of tokens to and from other ranks.
        needs_grad: whether any rank needs gradients.
        handle: DeepEP's handle of the dispatch.
        received_RK: this rank's experts of the received tokens.
        counts: number of received rows of each expert.
    """

    exchange: DeepEPExchange
    expert_TK: Tensor
    layout: Sequence[Any]
    num_sent: int
    num_received: int
    needs_grad: bool
    handle: Any = None
    received_RK: Tensor | None = None
    counts: list[int] = field(default_factory=list)

    def run(self, inputs: list[Tensor], weight_TK: Tensor, experts: ExpertCall) -> list[Tensor]:
        """Run the rest of the forward pass (`fmoe.exchange.base.GroupExchange.open`)."""
        if len(inputs) != 1 or inputs[0].dim() != 2:
            raise UserError(
                "exchange='deepep' sends one matrix of tokens: experts with dropout or several inputs need another "
                "exchange, such as all_to_all"
            )
        self.exchange.check_dtype(inputs[0].dtype)  # the model may have been converted since the first pass
        # 1. Send the tokens and weights.
        x_TD, weight_TK = (join_graph(t, self.needs_grad) for t in (inputs[0], weight_TK))
        weight_TK = F.pad(weight_TK, (0, self.expert_TK.shape[1] - weight_TK.shape[1]))
        received_RD, weight_RK = _DispatchTokens.apply(x_TD.to(SENT), weight_TK.float(), self)
        received_RD = received_RD.to(x_TD.dtype)
        # 2. Compute the share of this rank's experts.
        expert_RK = self.received_RK
        assert expert_RK is not None
        plan = DispatchPlan.from_routing(Routing(expert_RK, expert_RK), self.exchange.num_local_experts)
        shares = experts.combined([received_RD], weight_RK, plan.kept_only(self.counts))
        shares = tie(shares, [received_RD, weight_RK], self.needs_grad)
        # 3. Return the shares, and sum those of each token.
        return [_CombineTokens.apply(share.to(SENT), self).to(share.dtype) for share in shares]

    def dispatch(self, x_TD: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens and weights; return the received ones. The host waits for the counts of received tokens."""
        per_rank, per_node, per_expert, is_in_rank = self.layout
        with self._call("dispatch of tokens", self.num_sent, x_TD, weight_TK, self.expert_TK):
            x_RD, expert_RK, weight_RK, self.counts, self.handle, _event = self.exchange.buffer.dispatch(
                x_TD.contiguous(),
                topk_idx=self.expert_TK,
                topk_weights=weight_TK.contiguous(),
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=per_expert,
            )
        self.received_RK = expert_RK.long()
        return x_RD, weight_RK

    def dispatch_again(self, x_TD: Tensor) -> Tensor:
        """Send the rows ``x_TD`` to the ranks to which `dispatch` sent the tokens, and return the rows received."""
        fence(self.exchange.group, x_TD.device)
        with self._call("dispatch of gradients", self.num_sent, x_TD):
            return self.exchange.buffer.dispatch(x_TD.contiguous(), handle=self.handle)[0]

    def combine(self, y_RD: Tensor, weight_RK: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Send rows, and weights if given, back to their tokens' ranks, and return the sums for each token."""
        fence(self.exchange.group, y_RD.device)  # DeepEP's kernels would trap if a rank did not come
        weights = [] if weight_RK is None else [weight_RK.float().contiguous()]
        with self._call("combination of tokens", self.num_received, y_RD, *weights):
            topk_weights = weights[0] if weights else None
            return self.exchange.buffer.combine(y_RD.contiguous(), self.handle, topk_weights=topk_weights)[:2]

    @contextlib.contextmanager
    def _call(self, what: str, num_sent: int, *rows: Tensor) -> Iterator[None]:
        """Count the bytes of ``num_sent`` rows of each tensor. Raise a `PeerError` if the code inside times out."""
        monitor = monitor_of(self.exchange.group)
        begin = time.monotonic()
        monitor.traffic.sent += num_sent * sum(r.shape[1] * r.element_size() for r in rows)
        try:
            yield
        except RuntimeError as error:
            if "timeout" not in str(error).lower():
                raise
            raise monitor.broken(error, what, monitor.started + 1, begin) from error


class _DispatchTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_TK: Tensor, sent: _Sent) -> tuple[Tensor, Tensor]:
        ctx.sent = sent
        return sent.dispatch(x_TD, weight_TK)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor, grad_RK: Tensor) -> tuple[Tensor, Tensor | None, None]:
        _refuse_second_derivatives()
        return *ctx.sent.combine(grad_RD, grad_RK), None


class _CombineTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, sent: _Sent) -> Tensor:
        ctx.sent = sent
        return sent.combine(y_RD)[0]

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        _refuse_second_derivatives()
        return ctx.sent.dispatch_again(grad_TD), None


def _refuse_second_derivatives() -> None:
    if torch.is_grad_enabled():
        raise UserError("exchange='deepep' has no second derivatives (create_graph=True): use exchange='all_to_all'")


def _package() -> ModuleType:
    try:
        return importlib.import_module("deep_ep")
    except Exception as error:  # an extension built for another torch or CUDA may raise any error
        raise UserError(
            f"exchange='deepep' needs the package deep_ep ({one_line(error, 120)}): see https://github.com/deepseek-ai/DeepEP"
        ) from error


_buffers: "weakref.WeakKeyDictionary[dist.ProcessGroup, Any]" = weakref.WeakKeyDictionary()


def _buffer_of(group: dist.ProcessGroup, buffer: Any, row_bytes: int) -> Any:
    """Return the group's communication buffer, large enough for rows of this size. Every rank must call it."""
    ranks = group.size()
    try:
        configs = (buffer.get_dispatch_config(ranks), buffer.get_combine_config(ranks))
    except AssertionError as error:
        raise UserError(f"exchange='deepep' does not support {ranks} expert parallel ranks: {error}") from error
    near = max(config.get_nvl_buffer_size_hint(row_bytes, ranks) for config in configs)
    far = max(config.get_rdma_buffer_size_hint(row_bytes, ranks) for config in configs)
    made = _buffers.get(group)
    if made is None or made.num_nvl_bytes < near or made.num_rdma_bytes < far:
        made = buffer(group, near, far)
        _buffers[group] = made
    return made
