"""Interfaces of exchanges, which send tokens to the ranks that own their experts, and return the outputs.

A row is the vector of a token for one of its experts. A layer's forward pass is a session: ``with exchange.session(...)
as session: outputs = session.run(...)``. In a session, the ranks agree on the numbers of rows. They send rows, call the
experts, return their outputs and combine them. An error on one rank inside the session raises on every rank.

Shape letters: T tokens, K experts per token, D width, E experts of all ranks, L experts of a rank, W ranks, M rows that
this rank sends, R rows that it receives. Rank w of the group owns the experts w * L ... (w + 1) * L - 1.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import _StopRecomputationError

from fmoe.errors import UserError
from fmoe.exchange.checks import check_consistency, raise_on_all_ranks, refuse_replicating_wrapper
from fmoe.exchange.collectives import all_gather
from fmoe.exchange.monitor import PeerError, Traffic, monitor_of
from fmoe.experts.call import ExpertCall
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import Routing

Facts = Callable[[Any], dict[str, object]]  # a layer's input -> settings that must be equal on all ranks
Forward = Callable[[list[Tensor], Tensor, ExpertCall], list[Tensor]]  # as `Session.run`, without the routing

# Flag of a rank in the exchange of counts if it runs under ``torch.no_grad()``, and cannot join a backward pass.
# Otherwise, the flag is 1 if the rank needs gradients, and 0 if it does not.
NO_GRAD = 2


class Session(Protocol):
    """One forward pass of a layer, opened by `Exchange.session`."""

    def run(self, routing: Routing, weight_TK: Tensor, inputs: list[Tensor], experts: ExpertCall) -> list[Tensor]:
        """Send rows, call the experts, and return each token's outputs, summed with the combine weights.

        Args:
            routing: experts of each token.
            weight_TK: combine weights.
            inputs: tensors [T, ...]; each expert gets the rows of its tokens.
            experts: the experts of this rank.

        Returns:
            A tensor [T, ...] for each tensor that the experts return.

        Raises:
            PeerError: another rank failed, is gone or does not respond.
        """
        ...


class Exchange(Protocol):
    """Moves rows, one per token and chosen expert, between the ranks of an expert parallel group.

    Attributes:
        ep_rank, ep_size: this rank's index in the group, and the group's size.
        group: the group; None for a single rank. Read-only.
        num_experts, num_local_experts: number of experts of all ranks, and of this rank.
        traffic: bytes that this rank has sent to other ranks, in forward and backward passes.
    """

    ep_rank: int
    ep_size: int
    num_experts: int
    num_local_experts: int
    traffic: Traffic

    @property
    def group(self) -> dist.ProcessGroup | None: ...

    def session(
        self, name: str, facts: Facts, experts: nn.Module, x: Any, gate_runs_collectives: bool = False
    ) -> AbstractContextManager[Session]:
        """Open a forward pass.

        Args:
            name: the layer's name in errors.
            facts: function of ``x`` that returns settings by name, which must be equal on all ranks. Called only in the
                first forward pass.
            experts: the experts of this rank.
            x: the layer's input.
            gate_runs_collectives: whether the gate itself runs collectives. An error of this rank then also reaches the
                ranks that wait in them.

        Raises:
            UserError: the settings differ. It is raised on all ranks, with the setting, the ranks and the values.
        """
        ...


class GroupExchange:
    """Base class of the exchanges over a process group; subclasses implement `open`.

    Args:
        group: the expert parallel group, gloo or nccl.
        num_experts: number of experts of all ranks.
        wire_dtype: dtype in which rows are sent, e.g. ``torch.bfloat16`` for half of the bytes of float32; None for the
            rows' own dtype.

    Attributes:
        compared: names of the options that must be equal on all ranks.
        is_training: whether the layer of the current forward pass is in training mode.
    """

    compared: tuple[str, ...] = ("wire_dtype",)
    is_training = True

    def __init__(self, group: dist.ProcessGroup, num_experts: int, *, wire_dtype: torch.dtype | None = None):
        if wire_dtype is not None and not (isinstance(wire_dtype, torch.dtype) and wire_dtype.is_floating_point):
            raise UserError(f"exchange_options.wire_dtype={wire_dtype!r} is not a floating point dtype")
        self.group = group
        self.groups: tuple[dist.ProcessGroup, ...] = (group,)  # all groups over which rows are sent
        self.wire_dtype = wire_dtype
        self.traffic = Traffic()
        self.ep_rank = group.rank()
        self.ep_size = group.size()
        self.num_experts = num_experts
        self.num_local_experts = num_experts // group.size()
        self._is_prepared = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupExchange":
        return self  # process groups cannot be copied, and the rest belongs to the group

    @contextmanager
    def session(
        self, name: str, facts: Facts, experts: nn.Module, x: Any, gate_runs_collectives: bool = False
    ) -> Iterator["GroupSession"]:
        """Open a forward pass (`Exchange.session`)."""
        for group in self.groups:
            monitor_of(group).start_pass(name, self.traffic)
        if not self._is_prepared:
            with self.traffic.paused():
                self.prepare(facts(x), experts, _device_of(experts, x))
            self._is_prepared = True
        # Until the exchange of counts, the other ranks wait for counts: `abort` sends a flag in their place.
        session = GroupSession(self, lambda error: self.abort(error, _device_of(experts, x)))
        if gate_runs_collectives:  # the other ranks may wait in the gate instead
            session.report = self.post_failure
        try:
            refuse_replicating_wrapper(experts, self.group, name)
            yield session
        except _StopRecomputationError:  # no failure: a checkpoint stops this pass because it needs no more of it
            raise
        except Exception as error:
            session.report(error)
            raise

    def prepare(self, facts: Mapping[str, object], experts: nn.Module, device: torch.device) -> None:
        """Compare settings between ranks, before the first forward pass.

        Raises:
            UserError: a setting in ``facts``, or an option of the exchange, differs between ranks.
        """
        check_consistency(self.group, {**facts, "exchange": self.describe()}, device)

    def describe(self) -> str:
        """Return the class and the options of this exchange, which `prepare` compares between ranks."""
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)}' for name in self.compared)})"

    def plan(self, routing: Routing) -> Any:
        """Prepare a routing for `open`. By default, sort its assignments by expert (`DispatchPlan`)."""
        return DispatchPlan.from_routing(routing, self.num_experts)

    def open(self, plan: Any, needs_grad: bool) -> Forward:
        """Agree with the other ranks on the numbers of rows, and return the rest of the forward pass.

        The host reads the numbers from the device at most once, or twice if experts may be shadowed
        (`fmoe.exchange.shadow`).

        If one rank needs gradients, all ranks run the same collectives in the backward pass, and so build the same
        graph (`needs_grad_on_any`). ``PaddedExchange`` exchanges nothing beforehand: its ranks always build the graph,
        unless they run under ``torch.no_grad()``.

        Args:
            plan: result of the method `plan`.
            needs_grad: whether the backward pass of this rank reaches the tokens, their combine weights or the experts.

        Returns:
            A function of inputs, combine weights and experts, like `Session.run`. It is differentiable.

        Raises:
            PeerError: another rank failed before this exchange.
            UserError: this rank trains while another one runs under ``torch.no_grad()``. ``PaddedExchange`` does not
                detect this.
        """
        raise NotImplementedError

    def needs_grad_on_any(self, needs_grad: bool, flags: Iterable[int]) -> bool:
        """Return whether all ranks must join a backward pass, given the flags of all ranks (`grad_flag`).

        Raises:
            UserError: this rank needs gradients, but another one runs under ``torch.no_grad()``.
        """
        highest = max(flags)
        if highest == NO_GRAD and needs_grad:
            raise UserError(
                f"{monitor_of(self.group).context}: this rank trains while another one of moe_group runs under "
                "torch.no_grad() and would not join the backward pass: run all ranks with gradients, or all without"
            )
        return highest == 1

    def abort(self, error: Exception, device: torch.device) -> None:
        """Report that this rank failed before `open`, so that every rank raises. Call it instead of `open`.

        By default, wake the ranks that wait. Subclasses that exchange counts send a flag of failure with them.

        Args:
            device: device of the layer, on which the other ranks exchange their counts.
        """
        self.post_failure(error)

    def exchange_heads(self, head: Tensor, error: Exception | None) -> list[list[int]]:
        """Return the vector ``head`` of every rank, on the host. For exchanges that gather counts: all_gather, deepep.

        The vector begins with 1 on a rank that failed, else with 0. If any rank failed, every rank raises.

        Args:
            error: the error of this rank; None if it did not fail.

        Raises:
            PeerError: another rank failed.
        """
        gathered = all_gather(self.group, head, "exchange of counts").wait(for_host=True)
        heads = gathered.view(self.ep_size, -1).tolist()  # synchronizes with the device
        failed = [rank for rank, row in enumerate(heads) if row[0]]
        if failed:
            raise_on_all_ranks(self.group, failed, error, head.device)
        return heads

    def restore_context(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return ``outputs`` with hooks: errors of their backward pass then name this forward pass, not a later one."""
        contexts = [(monitor, monitor.context) for monitor in map(monitor_of, self.groups)]

        def restore(_grad: Tensor) -> None:
            for monitor, context in contexts:
                monitor.context = context
                monitor.traffic = self.traffic

        for out in outputs:
            if out.requires_grad:
                out.register_hook(restore)
        return outputs

    def post_failure(self, error: Exception) -> None:
        """Report that this rank failed and will not join the ranks that wait for it."""
        # The group in which this rank got a PeerError knows of the failure; all groups know if all ranks agreed on it.
        if not isinstance(error, PeerError) or (len(self.groups) > 1 and not error.is_agreed):
            for group in self.groups:
                monitor_of(group).post_failure(error)


class GroupSession:
    """One forward pass of a layer whose experts are spread over a group.

    Attributes:
        report: function that reports an error of this rank to the other ranks, which then raise too.
    """

    def __init__(self, exchange: GroupExchange, report: Callable[[Exception], None]):
        self._exchange = exchange
        self.report = report

    def run(self, routing: Routing, weight_TK: Tensor, inputs: list[Tensor], experts: ExpertCall) -> list[Tensor]:
        """Exchange counts and rows, compute, and return the combined outputs (`Session.run`)."""
        exchange = self._exchange
        exchange.is_training = experts.is_training
        plan = exchange.plan(routing)
        tensors = itertools.chain(inputs, [weight_TK], experts.module.parameters())
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        self.report = exchange.post_failure  # no longer `abort`: the other ranks get the counts of this one
        forward = exchange.open(plan, needs_grad)
        return exchange.restore_context(forward(inputs, weight_TK, experts))


def grad_flag(needs_grad: bool) -> int:
    """Return what this rank tells the others about its gradients, for `GroupExchange.needs_grad_on_any`."""
    return int(needs_grad) if torch.is_grad_enabled() else NO_GRAD


def _device_of(experts: nn.Module, x: Any) -> torch.device:
    parameter = next(experts.parameters(), None)
    tensors = [parameter] if parameter is not None else [t for t in pytree.tree_leaves(x) if isinstance(t, Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")
