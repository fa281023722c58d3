"""Backward passes in two parts: gradients of inputs and small parameters first, gradients of large weights later.

Zero-bubble pipelines (arXiv 2401.10241) send a stage's input gradient before they compute weight gradients. An autograd
Function supports this if

* its forward pass sets ``ctx.is_deferrable = True``,
* its backward pass is decorated with `deferrable`, and computes only gradients of ``ctx.needs_input_grad``.
"""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Compute = Callable[[], Sequence[Tensor | None]]


class WeightGradients:
    """Weight gradients that a call of `backward_inputs` left out. They hold their operands until `run`.

    Attributes:
        weights: the weights.
    """

    def __init__(self, weights: set[Tensor]):
        self.weights = weights
        self._parts: dict[tuple[Tensor, ...], list[Compute]] = {}

    def add(self, weights: tuple[Tensor, ...], compute: Compute) -> None:
        """Add a function that returns a gradient for each of ``weights``."""
        self._parts.setdefault(weights, []).append(compute)

    def run(self) -> None:
        """Compute the gradients and accumulate them, which runs the parameters' hooks. Call it once."""
        for weights in list(self._parts):
            _Accumulate.apply(self._parts.pop(weights), *weights).backward()


# Not a ContextVar, because autograd calls backward functions in threads of its own.
_current: WeightGradients | None = None


def backward_inputs(output: Tensor, grad: Tensor | None) -> WeightGradients:
    """Run the backward pass of ``output``, except for gradients of weights that only deferrable Functions use.

    These Functions must have an input whose gradient is needed: otherwise their weights are not left out either.

    Args:
        output: result of a forward pass on an input that requires a gradient.
        grad: gradient of ``output``; None for a scalar.

    Returns:
        The remaining gradients.
    """
    global _current
    others, weights = _leaves(output)
    _current = WeightGradients(weights)
    try:
        torch.autograd.backward(output, grad, inputs=list(others))
        return _current
    finally:
        _current = None


def deferrable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward pass of a Function, so that `backward_inputs` can leave out gradients of weights."""

    @functools.wraps(backward)
    def split(ctx: Any, *grads: Tensor | None) -> Any:
        if _current is None:
            return backward(ctx, *grads)
        edges = iter([node for node, _ in ctx.next_functions if node is not None])  # one per tensor with a gradient
        owners = [getattr(next(edges), "variable", None) if needed else None for needed in ctx.needs_input_grad]
        is_later = [owner in _current.weights for owner in owners]
        if not any(is_later):
            return backward(ctx, *grads)

        def compute() -> list[Tensor | None]:
            gradients = backward(later, *grads)  # may end with None for arguments that had their default value
            return [gradient for gradient, is_chosen in zip(gradients, is_later, strict=False) if is_chosen]

        # Autograd frees the tensors of ``ctx`` after this pass.
        saved = vars(ctx) | {"saved_tensors": ctx.saved_tensors}
        later = SimpleNamespace(**saved, needs_input_grad=is_later)
        now = [needed and not left for needed, left in zip(ctx.needs_input_grad, is_later, strict=True)]
        _current.add(tuple(owner for owner in owners if owner in _current.weights), compute)
        return backward(SimpleNamespace(**saved, needs_input_grad=now), *grads)

    return split


def _leaves(output: Tensor) -> tuple[set[Tensor], set[Tensor]]:
    """Return the leaves of a graph in two sets: those of the first part of the backward pass, and weights to leave out.

    Weights are left out if all nodes that use them are deferrable and run in the first part. These lead to a leaf of
    the first part: a product with a constant does not.
    """
    nodes: list[Any] = [output.grad_fn]
    callers: dict[Any, list[Any]] = {output.grad_fn: []}  # the nodes from which each node gets its gradient
    users: dict[Tensor, list[Any]] = {}
    for node in nodes:
        for following, _ in node.next_functions:
            if hasattr(following, "variable"):
                users.setdefault(following.variable, []).append(node)
            elif following is not None:
                if following not in callers:
                    callers[following] = []
                    nodes.append(following)
                callers[following].append(node)
    others = {leaf for leaf, by in users.items() if not all(getattr(node, "is_deferrable", False) for node in by)}
    pending = [node for leaf in others for node in users[leaf]]
    visited = set(pending)
    while pending:
        above = set(callers[pending.pop()]) - visited
        visited |= above
        pending += above
    others |= {leaf for leaf, by in users.items() if not visited.issuperset(by)}
    return others, users.keys() - others


class _Accumulate(torch.autograd.Function):
    """Give weights their gradients within a backward pass, so that autograd accumulates them and runs hooks."""

    @staticmethod
    def forward(ctx: Any, parts: list[Compute], *weights: Tensor) -> Tensor:
        ctx.parts = parts
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        total, *others = [compute() for compute in ctx.parts]
        for gradients in others:
            total = [None if a is None or b is None else a + b for a, b in zip(total, gradients, strict=True)]
        return None, *total
