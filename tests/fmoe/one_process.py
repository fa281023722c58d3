"""A layer spread over ranks, compared with the same layer in one process. Not a test itself."""

import contextlib
import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from compare import relative_error
from exchange_libraries import installed
from torch import nn
from torch.utils.checkpoint import checkpoint

import fmoe
from fmoe.exchange import Cost, collectives

WIDTH = 16
EXPERTS = 4


class AlwaysShadow(Cost):
    """The hottest experts are always shadowed."""

    def seconds(self, loads_WE, num_local, shadows):
        return -len(shadows)


ALWAYS = AlwaysShadow(row_seconds=0.0, row_bytes=0.0, expert_bytes=0.0, bandwidth=1.0)
WAYS = {
    "all_to_all": ("all_to_all", {}),
    "chunks": ("all_to_all", {"chunks": 3}),
    "bound": ("all_to_all", {"max_rows": 16}),
    "shadow": ("all_to_all", {"shadow": 2, "cost": ALWAYS}),
    "padded": ("padded", {}),
    "padded chunks": ("padded", {"chunks": 2}),
    "all_gather": ("all_gather", {}),
    "hierarchical": ("hierarchical", {"node_size": 1, "chunks": 2, "shadow": 1, "cost": ALWAYS}),
    "deepep": ("deepep", {}),
    "symmetric": ("symmetric", {}),
    "symmetric bound": ("symmetric", {"max_rows": 16}),
}


class Square(nn.Module):
    """An expert with second derivatives, of plain autograd."""

    def __init__(self, d_model):
        super().__init__()
        self.map = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.map(x).square()


class Mixed(nn.Module):
    """An expert whose norm is float64 where its map is float32."""

    def __init__(self, d_model):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(d_model, dtype=torch.float64))
        self.map = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.map((x.double() * self.scale).to(self.map.weight.dtype))


class Ignores(nn.Module):
    """A constant expert (MoE++, arXiv 2410.07348): the output does not depend on the input."""

    def __init__(self, d_model):
        super().__init__()
        self.value = nn.Parameter(torch.ones(d_model))

    def forward(self, x):
        return self.value.expand(len(x), -1)


class Copies(nn.Module):
    """A copy expert of the same paper, which keeps nothing for the backward pass."""

    def __init__(self, d_model):
        super().__init__()

    def forward(self, x):
        return x


@dataclass
class Kind:
    """What is special about a step."""

    options: dict[str, Any] = field(default_factory=dict)  # of the layer
    dtype: torch.dtype = torch.float32
    recompute: dict[str, Any] | None = None  # options of a checkpoint
    is_second: bool = False  # second derivatives
    frozen_on: tuple[int, ...] = ()  # ranks whose experts are frozen
    inputs_on: tuple[int, ...] = (0, 1, 2, 3)  # ranks whose input needs gradients
    experts: list[type] | None = None  # classes of the single experts


KINDS = {
    "plain": Kind(),
    "drops": Kind({"gate": "switch", "gate_options": {"capacity_factor": 0.5, "jitter": 0.0}}),
    "three of eight": Kind({"num_experts": 8, "top_k": 3, "expert": "swiglu"}),
    "choice per expert": Kind({"gate": "expert_choice", "group_size": 4}),
    "modules": Kind({"expert": Square}, torch.float64),
    "several dtypes": Kind({"expert": Mixed}),
    "recomputed": Kind(recompute={"use_reentrant": False}),
    "recomputed, reentrant": Kind(recompute={"use_reentrant": True}),
    "second derivatives": Kind({"expert": Square}, torch.float64, is_second=True),
    "frozen": Kind(frozen_on=(0, 1)),
    "frozen on one": Kind(frozen_on=(0,)),
    "no input": Kind(frozen_on=(0,), inputs_on=()),
    "input on one": Kind(inputs_on=(1,)),
    "constant": Kind(experts=[nn.Linear, nn.Linear, Ignores, Ignores]),
    "copy": Kind({"num_experts": 2}, experts=[nn.Linear, Copies]),
}


def compared(way, kind, exchange_options=None):
    """Largest relative error of outputs and gradients in two steps, the second without tokens on rank 1.

    Args:
        way: a key of `WAYS`.
        kind: a `Kind` or a key of `KINDS`.
        exchange_options: instead of those of the way.

    Raises:
        AssertionError: a rank reported a failure, or a frozen expert got a gradient.
    """
    kind = KINDS[kind] if isinstance(kind, str) else kind
    exchange, options = WAYS[way]
    options = exchange_options or options
    is_installed = exchange in ("deepep", "symmetric")
    with installed(options.get("wire_dtype", kind.dtype)) if is_installed else contextlib.nullcontext():
        return _compared(exchange, options, kind)


def _compared(exchange, exchange_options, kind):
    failures = []
    collectives.GroupMonitor.post_failure = lambda self, error: failures.append(repr(error))
    rank = dist.get_rank()
    torch.manual_seed(0)
    options = {"d_model": WIDTH, "num_experts": EXPERTS, "d_hidden": 12, "seed": 5, **kind.options}
    if kind.experts is not None:
        options["expert"] = [cls(WIDTH, WIDTH) if cls is nn.Linear else cls(WIDTH) for cls in kind.experts]
    group = {"moe_group": dist.group.WORLD, "exchange": exchange, "exchange_options": exchange_options}
    alone = fmoe.FMoE(**copy.deepcopy(options))
    spread = fmoe.FMoE(**group, **options)
    if kind.dtype != torch.float32:
        alone = alone.to(kind.dtype)
        spread = spread.to(kind.dtype)
    if rank in kind.frozen_on:
        spread.experts.requires_grad_(False)
    torch.manual_seed(rank)
    errors = []
    for sequences in (3, 3 if kind.is_second or rank != 1 else 0):
        x = torch.randn(sequences, 8 - 4 * (rank % 2), WIDTH, dtype=kind.dtype)
        upstream = torch.randn_like(x)
        found = _step(spread, kind, x.clone().requires_grad_(rank in kind.inputs_on), upstream)
        expected = _step(alone, kind, x.clone().requires_grad_(), upstream)
        errors += [relative_error(a, b) for a, b in zip(found, expected, strict=False)]  # all but an input without one
        errors += _errors_of_experts(spread, alone)
    assert not failures, failures
    return max(errors)


def _step(layer, kind, x, upstream):
    """Output, and gradients of the gate and of the input if it needs one."""
    layer.zero_grad()
    run = layer if kind.recompute is None else functools.partial(checkpoint, layer, **kind.recompute)
    y = run(x)
    loss = (y * upstream).sum()
    if kind.is_second:
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = first.square().sum()
    loss.backward()
    inputs = [x.grad] if x.requires_grad else []
    return [y, *(p.grad for p in layer.gate.parameters()), *inputs]


def _errors_of_experts(spread, alone):
    """Relative errors of the gradients of this rank's experts; those of one process are summed over ranks."""
    local = slice(spread.first_expert, spread.first_expert + spread.num_local_experts)
    if isinstance(alone.experts, nn.ModuleList):
        expected = [[summed(p) for p in expert.parameters()] for expert in alone.experts][local]
        expected = [gradient for gradients in expected for gradient in gradients]
    else:
        expected = [summed(p)[local] for p in alone.experts.parameters()]
    errors = []
    for parameter, gradient in zip(spread.experts.parameters(), expected, strict=True):
        if parameter.requires_grad:
            errors.append(relative_error(parameter.grad, gradient))
        else:
            assert parameter.grad is None
    return errors


def summed(parameter):
    """The parameter's gradient, summed over ranks."""
    total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    dist.all_reduce(total)
    return total.detach()
