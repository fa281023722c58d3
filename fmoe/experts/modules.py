"""Experts that are a list of arbitrary modules, called one after the other.

Shape letters: R rows, L experts of this rank.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fmoe import random
from fmoe.errors import UserError


class ModuleExperts(nn.ModuleList):
    """A list of L experts, each of which maps its rows [n, D] to outputs [n, width]. Rows may be pytrees of tensors.

    An expert that has no rows is called with zero rows, so that its gradients are zero and not None. As in FastMoE, an
    expert also gets its number of rows, int64 [1], if its forward requires two arguments or has one named
    ``fwd_expert_count`` or ``fec``.

    Args:
        modules: the experts of this rank.
        first_expert: global id of the first module.
        seed: the layer's seed. `reset_parameters` draws each module from (seed, global id of the module), as
            `fmoe.experts.build_experts` does.
    """

    def __init__(self, modules: Iterable[nn.Module] | None = None, *, first_expert: int = 0, seed: int = 0):
        super().__init__(modules)
        self.first_expert = first_expert
        self.seed = seed

    def forward(self, rows: Any, counts_L: Tensor | Sequence[int]) -> Any:
        """Return the outputs of rows that are sorted by expert, in the same order.

        Raises:
            UserError: the outputs of two experts differ in shape or structure.
        """
        return ModuleExperts._run([expert.__call__ for expert in self], list(self), rows, counts_L)

    @property
    def kind(self) -> str:
        """Description of the experts, which must be equal on all ranks."""
        return "modules"

    def shadow(self, local: int) -> list[Tensor]:
        """Return the parameters of expert ``local`` of this rank, for `run_with` on another rank.

        Raises:
            UserError: the modules differ in class or parameter shapes, or have buffers, which are not sent.
        """
        kinds = {(type(m), tuple((n, p.shape) for n, p in m.named_parameters())) for m in self}
        if len(kinds) > 1 or next(self.buffers(), None) is not None:
            raise UserError(
                "exchange_options.shadow needs experts of one class with equal parameter shapes, and without buffers: "
                "use shadow=0"
            )
        return list(self[local].parameters())

    def run_with(
        self, parameters: list[list[Tensor]], rows: Any, counts: Sequence[int], keys_R: Tensor | None = None
    ) -> Any:
        """Run rows as `forward` does, but through experts of other ranks.

        Args:
            parameters: for each expert, the result of `shadow` on its rank.
            keys_R: ignored.
        """
        names = [name for name, _ in self[0].named_parameters()]
        calls = [
            functools.partial(_call_with, self[0], dict(zip(names, tensors, strict=True))) for tensors in parameters
        ]
        return ModuleExperts._run(calls, [self[0]] * len(calls), rows, counts)

    @staticmethod
    def _run(
        calls: Sequence[Callable[..., Any]], modules: Sequence[nn.Module], rows: Any, counts_L: Tensor | Sequence[int]
    ) -> Any:
        counts = counts_L.tolist() if isinstance(counts_L, Tensor) else list(counts_L)
        leaves, nest = pytree.tree_flatten(rows)
        outputs = []
        begin = 0
        for call, expert, count in zip(calls, modules, counts, strict=True):
            part = pytree.tree_unflatten([leaf[begin : begin + count] for leaf in leaves], nest)
            outputs.append(
                call(part, torch.tensor([count], dtype=torch.int64, device="cpu"))
                if _takes_count(expert)
                else call(part)
            )
            begin += count
        flat = [pytree.tree_flatten(output) for output in outputs]
        shapes = [(spec, [leaf.shape[1:] for leaf in parts]) for parts, spec in flat]
        for index, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise UserError(
                    f"local expert {index} returned rows of {_describe(shape)}, local expert 0 of "
                    f"{_describe(shapes[0])}: all experts must return the same shape and structure"
                )
        joined = [torch.cat(parts) for parts in zip(*(parts for parts, _ in flat), strict=True)]
        return pytree.tree_unflatten(joined, flat[0][1])

    def reset_parameters(self) -> None:
        """Call ``reset_parameters`` of all submodules that have it. The values do not depend on the number of ranks."""
        for index, expert in enumerate(self, self.first_expert):
            with random.keyed("expert", self.seed, index):
                for module in expert.modules():
                    if (reset := getattr(module, "reset_parameters", None)) is not None:
                        reset()


def _call_with(module: nn.Module, parameters: dict[str, Tensor], *args: Any) -> Any:
    return torch.func.functional_call(module, parameters, args)


def _takes_count(module: nn.Module) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return sum(p.kind in kinds and p.default is p.empty for p in parameters) >= 2 or any(
        p.kind in kinds and p.name in ("fwd_expert_count", "fec") for p in parameters
    )


def _describe(shape: tuple[Any, list[torch.Size]]) -> str:
    return f"shape {pytree.tree_unflatten([tuple(s) for s in shape[1]], shape[0])}"
