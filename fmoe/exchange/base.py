"""Interfaces of exchanges, which send tokens to the ranks that own their experts, and return the outputs.

A row is the vector of a token for one of its experts. A layer's forward pass is a session: ``with exchange.session(...)
as session: outputs = session.run(...)``. In a session, the ranks agree on the numbers of rows. They send rows, call the
experts, return their outputs and combine them. An error on one rank inside the session raises on every rank.

Shape letters: T tokens, K experts per token, D width, E experts of all ranks, L experts of a rank, W ranks, M rows that
this rank sends, R rows that it receives. Rank w of the group owns the experts w * L ... (w + 1) * L - 1.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import _StopRecomputationError

from fmoe.errors import UserError, ranks_text
from fmoe.exchange.collectives import PeerError, Traffic, all_gather, broadcast, monitor_of
from fmoe.experts.ffn import ExpertCall
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import Routing

Facts = Callable[[Any], dict[str, object]]  # a layer's input -> settings that must be equal on all ranks
TOKENS, WEIGHTS, NO_GRAD = 2, 3, 4  # backward depths of a rank (`GroupExchange.open`)


class Dispatch(Protocol):
    """The differentiable part of a forward pass. It runs after the ranks have agreed on how many rows each sends."""

    def run(self, inputs: list[Tensor], weight_TK: Tensor, experts: ExpertCall) -> list[Tensor]:
        """Return each token's expert outputs, summed with the combine weights.

        Args:
            inputs: tensors [T, ...]; each expert gets the rows of its tokens.
            weight_TK: combine weights.

        Returns:
            A tensor [T, ...] for each tensor that the experts return.
        """
        ...


class Session(Protocol):
    """One forward pass of a layer, opened by `Exchange.session`."""

    def run(self, routing: Routing, weight_TK: Tensor, inputs: list[Tensor], experts: ExpertCall) -> list[Tensor]:
        """Send rows, call the experts, and return the combined outputs, as `Dispatch.run` does.

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
        is_training: whether the layer of the current forward pass is in training mode.
    """

    is_training = True

    def __init__(self, group: dist.ProcessGroup, num_experts: int, *, wire_dtype: torch.dtype | None = None):
        if wire_dtype is not None and not (isinstance(wire_dtype, torch.dtype) and wire_dtype.is_floating_point):
            raise UserError(f"exchange_options.wire_dtype={wire_dtype!r} is not a floating point dtype")
        self.group, self.wire_dtype, self.traffic = group, wire_dtype, Traffic()
        self.groups: tuple[dist.ProcessGroup, ...] = (group,)  # all groups over which rows are sent
        self.ep_rank, self.ep_size = group.rank(), group.size()
        self.num_experts, self.num_local_experts = num_experts, num_experts // group.size()
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
        session = GroupSession(self, lambda error: self.abort(error, _device_of(experts, x)))
        if gate_runs_collectives:
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
        return f"{type(self).__name__}(wire_dtype={self.wire_dtype})"

    def plan(self, routing: Routing) -> Any:
        """Prepare a routing for `open`. By default, sort its assignments by expert (`DispatchPlan`)."""
        return DispatchPlan.from_routing(routing, self.num_experts)

    def open(self, plan: Any, depth: int) -> Dispatch:
        """Agree with the other ranks on the numbers of rows, and return the rest of the forward pass.

        The host reads the numbers from the device at most once, or twice if experts may be shadowed
        (`fmoe.exchange.shadow`).

        All ranks continue with the largest ``depth`` of any rank, or with 0 if that is `NO_GRAD`. ``PaddedExchange``
        does not exchange depths: a rank continues with 0 if its own is `NO_GRAD`, else with `WEIGHTS`.

        Args:
            plan: result of the method `plan`.
            depth: how far this rank's backward pass reaches. It is `NO_GRAD` under ``torch.no_grad()``; else `WEIGHTS`
                if the combine weights require gradients; else `TOKENS` if the tokens do; else 1 if the experts do;
                else 0.

        Raises:
            PeerError: another rank failed before this exchange.
            UserError: this rank trains while another one runs under ``torch.no_grad()``. ``PaddedExchange`` does not
                detect this.
        """
        raise NotImplementedError

    def agreed_depth(self, own: int, largest: int) -> int:
        """Return the ``depth`` that this rank uses, given its own and the largest of all ranks (`open`).

        Raises:
            UserError: this rank trains while another one runs without gradients.
        """
        if largest == NO_GRAD and own not in (0, NO_GRAD):
            self._refuse_no_grad()
        return 0 if largest == NO_GRAD else largest

    def _refuse_no_grad(self) -> NoReturn:
        raise UserError(
            f"{monitor_of(self.group).context}: this rank trains while another one of moe_group runs under "
            "torch.no_grad() and would not join the backward pass: run all ranks with gradients, or all without"
        )

    def abort(self, error: Exception, device: torch.device) -> None:
        """Report that this rank failed before `open`, so that every rank raises. Call it instead of `open`.

        Args:
            device: device of the layer, on which the other ranks exchange their counts.
        """
        self.post_failure(error)

    def exchange_heads(self, head: Tensor, error: Exception | None) -> list[list[int]]:
        """Return the vector ``head`` of every rank, on the host.

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
            self.raise_on_all_ranks(failed, error, head.device)
        return heads

    def restore_context(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return ``outputs`` with hooks: errors of their backward pass then name this forward pass, not a later one."""
        contexts = [(monitor, monitor.context) for monitor in map(monitor_of, self.groups)]

        def restore(_grad: Tensor) -> None:
            for monitor, context in contexts:
                monitor.context, monitor.traffic = context, self.traffic

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

    def raise_on_all_ranks(self, failed: list[int], error: Exception | None, device: torch.device) -> NoReturn:
        """Raise on every rank of the group (see the function `raise_on_all_ranks`); every rank must call it."""
        raise_on_all_ranks(self.group, failed, error, device)


class GroupSession:
    """One forward pass of a layer whose experts are spread over a group.

    Attributes:
        report: function that reports an error of this rank to the other ranks, which then raise too.
    """

    def __init__(self, exchange: GroupExchange, report: Callable[[Exception], None]):
        self._exchange, self.report = exchange, report

    def run(self, routing: Routing, weight_TK: Tensor, inputs: list[Tensor], experts: ExpertCall) -> list[Tensor]:
        """Exchange counts and rows, compute, and return the combined outputs (`Session.run`)."""
        exchange = self._exchange
        exchange.is_training = experts.is_training
        plan, depth = exchange.plan(routing), _backward_depth(inputs, weight_TK, experts.module)
        self.report = exchange.post_failure
        dispatch = exchange.open(plan, depth)
        return exchange.restore_context(dispatch.run(inputs, weight_TK, experts))


def _backward_depth(inputs: list[Tensor], weight_TK: Tensor, experts: nn.Module) -> int:
    """Return how far the backward pass of this rank reaches, as an argument ``depth`` of `GroupExchange.open`."""
    if not torch.is_grad_enabled():
        return NO_GRAD
    reached = {WEIGHTS: [weight_TK], TOKENS: inputs, 1: experts.parameters()}
    return next((depth for depth, tensors in reached.items() if any(t.requires_grad for t in tensors)), 0)


def _device_of(experts: nn.Module, x: Any) -> torch.device:
    parameter = next(experts.parameters(), None)
    tensors = [parameter] if parameter is not None else [t for t in pytree.tree_leaves(x) if isinstance(t, Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")


_MESSAGE_BYTES = 4096


def raise_on_all_ranks(
    group: dist.ProcessGroup, failed: list[int], error: Exception | None, device: torch.device
) -> NoReturn:
    """Raise on every rank of the group: its own error on a failed rank, a `PeerError` elsewhere.

    Every rank must call it with the same ``failed``. The `PeerError` has the text of the first failed rank's error.

    Args:
        failed: the failed ranks, as indices in the group.
        error: the error of this rank; None if it did not fail.
    """
    text = f"{type(error).__name__}: {error}".encode()[:_MESSAGE_BYTES] if error is not None else b""
    message = _as_bytes(text, device)
    broadcast(group, message, failed[0], "sharing of an error").wait(for_host=True)
    if error is not None:
        raise error
    ranks = ranks_text([dist.get_global_rank(group, rank) for rank in failed])
    agreed = PeerError(f"{ranks} failed in {monitor_of(group).context}, before the exchange: {_as_text(message)}")
    agreed.is_agreed = True
    raise agreed


def _as_bytes(text: bytes, device: torch.device) -> Tensor:
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
    if text:
        message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return message.to(device)


def _as_text(message: Tensor) -> str:
    return bytes(message.cpu().tolist()).rstrip(b"\0").decode(errors="replace")


def check_consistency(group: dist.ProcessGroup, facts: Mapping[str, object], device: torch.device) -> None:
    """Compare settings between the ranks of a group. Every rank must call it.

    Args:
        facts: settings by name; their values are compared and shown as text.

    Raises:
        UserError: settings differ; raised on all ranks. It names the setting, the ranks that differ from the majority,
            and the values.
    """
    lines = [f"{name}={value}".replace("\n", " ")[:400] for name, value in facts.items()]
    message = _as_bytes("\n".join(lines).encode()[:_MESSAGE_BYTES], device)
    messages = all_gather(group, message, "comparison of settings").wait(for_host=True).view(group.size(), -1)
    rows = [dict(line.split("=", 1) for line in _as_text(message).split("\n") if "=" in line) for message in messages]
    for name in {name: None for row in rows for name in row}:
        column = [row.get(name, "nothing") for row in rows]
        values = sorted(set(column), key=lambda value: (-column.count(value), column.index(value)))
        if len(values) > 1:
            ranks = [dist.get_global_rank(group, rank) for rank, value in enumerate(column) if value != values[0]]
            raise UserError(
                f"{rows[0].get('name')}: {name}={' or '.join(values[1:])} on {ranks_text(ranks)}, "
                f"but {values[0]} on the other ranks of moe_group"
            )


def refuse_replicating_wrapper(experts: nn.Module, group: dist.ProcessGroup, name: str) -> None:
    """Raise if torch's DistributedDataParallel or ``fully_shard`` wraps experts that are spread over ``group``.

    These wrappers treat the experts of several ranks as replicas. Call this function in the forward pass: the wrapper
    cannot be found at other times.

    Args:
        name: the layer's name in errors.

    Raises:
        UserError: such a wrapper wraps the experts.
    """
    if torch.compiler.is_compiling():
        return
    if (wrapper := DistributedDataParallel._active_ddp_module) is not None:
        _refuse_ddp(experts, group, name, wrapper)
    # FSDP replaces parameters by its own tensors, which lack the experts' mark ``allreduce = False``.
    if getattr(experts, "_is_fsdp_managed_module", False):
        _refuse_fully_shard(experts, name)


def _refuse_ddp(experts: nn.Module, group: dist.ProcessGroup, name: str, wrapper: DistributedDataParallel) -> None:
    expert = next(experts.parameters(), None)
    others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    replicas = set(dist.get_process_group_ranks(wrapper.process_group))
    if others & replicas and any(expert is p for p in wrapper._module_parameters):
        raise UserError(
            f"torch's DistributedDataParallel overwrote the experts of {name} on all ranks with the first rank's: "
            "rebuild the model and wrap it in fmoe.parallel.DistributedDataParallel(model, groups)"
        )


def _refuse_fully_shard(experts: nn.Module, name: str) -> None:
    from torch.distributed.fsdp import FSDPModule

    is_marked = not getattr(next(experts.parameters(), None), "allreduce", True)
    if not is_marked and not any(isinstance(module, FSDPModule) for module in experts.modules()):
        raise UserError(
            f"torch's fully_shard treated the experts of {name} on all ranks as replicas of each other: rebuild "
            "the model and shard it with fmoe.parallel.fully_shard(model, groups)"
        )
