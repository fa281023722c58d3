"""Experts of a rank as one module: ``experts(rows, counts_L) -> rows``.

The rows are sorted by the local index of their expert. ``counts_L`` is the number of rows of each local expert, an
int64 tensor on the CPU. The option ``expert`` of a layer takes a name in `EXPERTS`, a module class or function, or a
sequence with one entry per expert. `build_experts` makes the module: stacked weights (`FFNExperts`) or a list of
modules (`ModuleExperts`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe import random
from fmoe.errors import UserError, add_name, check_options, known_names, option_names
from fmoe.experts.ffn import BACKENDS, FFNExperts, Stacked
from fmoe.experts.modules import ModuleExperts
from fmoe.experts.shared import SharedExpert
from fmoe.experts.tensor_parallel import ShardedFFNExperts

EXPERTS: dict[str, Callable[..., nn.Module]] = {
    "ffn": FFNExperts,
    "swiglu": functools.partial(FFNExperts, gated=True, activation="silu"),
    "geglu": functools.partial(FFNExperts, gated=True, activation="gelu"),
}
"""Classes or functions that make the experts of a rank as one module, by name.

They are called as ``factory(num_experts, d_model, d_hidden, first_expert=..., seed=..., **options)``."""


def register_expert(name: str, factory: Callable[..., nn.Module], *, stacked: bool = True) -> None:
    """Register experts under a new name, for the option ``expert`` of a layer and ``model.expert`` of a recipe.

    Args:
        factory: called as ``factory(num_experts, d_model, d_hidden, first_expert=..., seed=..., **options)``, and
            returns all experts of a rank as one module (`fmoe.experts`).
        stacked: False if ``factory(d_model, d_hidden, **options)`` returns a single expert, which maps rows [n, D] to
            [n, D]. The factory is then called once per expert, each time under another random seed.

    Raises:
        UserError: the name is not a string, is empty, or belongs to other experts.
    """
    add_name(EXPERTS, "expert", name, factory if stacked else _Singles(factory))


def taken_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``options`` that the experts named ``name`` accept.

    Options that the name fixes, such as the activation of "swiglu", are left out.
    """
    factory = EXPERTS.get(name)
    taken, fixed = option_names(factory), getattr(factory, "keywords", {})
    return {key: value for key, value in options.items() if (taken is None or key in taken) and key not in fixed}


class _Singles:
    """Expert factory, for `EXPERTS`, that makes each expert by ``func(d_model, d_hidden, **options)``."""

    def __init__(self, func: Callable[..., nn.Module]):
        self.func = func

    def __call__(
        self, num_experts: int, d_model: int, d_hidden: int, *, first_expert: int = 0, seed: int = 0, **options: Any
    ) -> ModuleExperts:
        return _keyed(lambda _: self.func(d_model, d_hidden, **options), first_expert, num_experts, seed)


def _keyed(make: Callable[[int], nn.Module], first: int, count: int, seed: int) -> ModuleExperts:
    """Make ``count`` experts by ``make(id)``, for global ids from ``first`` on. Each has its own random seed."""
    modules = []
    for index in range(first, first + count):
        with random.keyed("expert", seed, index):
            modules.append(make(index))
    return ModuleExperts(modules, first_expert=first, seed=seed)


@torch.no_grad()
def truncated_normal_(weight: Tensor, scale: float = 0.1) -> Tensor:
    """Fill an [out, in] matrix with normal numbers of standard deviation ``sqrt(scale / in)``, and return it.

    The distribution is truncated at two standard deviations. This is the Switch Transformer's initialization (arXiv
    2101.03961 section 2.4). The default scale, a tenth of the usual one, makes the training of large sparse models
    stable.
    """
    std = (scale / weight.shape[-1]) ** 0.5
    return nn.init.trunc_normal_(weight, mean=0.0, std=std, a=-2 * std, b=2 * std)


def build_experts(
    expert: str | Callable[..., nn.Module] | Sequence[Any] | nn.Module,
    num_experts: int,
    local: slice,
    d_model: int,
    d_hidden: int,
    seed: int,
    options: Mapping[str, Any],
    tensor_group: dist.ProcessGroup | None = None,
    backend: str = "auto",
) -> nn.Module:
    """Build this rank's experts. Their weights depend on the seed and on their global ids.

    Args:
        expert: as in `fmoe.build.Spec`.
        num_experts: number of experts on all ranks.
        local: global ids of this rank's experts.
        tensor_group: ranks over which the hidden units of each expert are spread; None if they are not.
        backend: one of `fmoe.experts.ffn.BACKENDS`; only "auto" and "torch" for experts that are not `FFNExperts`.

    Raises:
        UserError: an unknown name; a sequence whose length is not ``num_experts``; an invalid option; options for
            experts that take none; ``tensor_group`` with experts other than ffn, swiglu and geglu; an unavailable
            backend.
    """
    count = local.stop - local.start
    if backend not in BACKENDS:
        raise UserError(f"backend={backend!r} is not known; {known_names(backend, BACKENDS)}")
    factory = EXPERTS.get(expert, expert) if isinstance(expert, str) else expert
    fixed = factory.keywords if isinstance(factory, functools.partial) else {}
    made_by = getattr(factory, "func", factory)
    is_ffn = isinstance(made_by, type) and issubclass(made_by, FFNExperts)
    if options and (is_ffn or factory is not expert):
        own = ("num_experts", "d_model", "d_hidden", "first_expert", "seed")
        check_options("expert_options", factory, options, getattr(expert, "__name__", str(expert)), own)
    if backend not in ("auto", "torch") and not is_ffn:
        raise UserError(f"backend={backend!r} supports ffn, swiglu and geglu, not expert={expert!r}")
    if backend != "auto" and is_ffn:
        options = {**options, "backend": backend}
    if tensor_group is not None:
        if made_by is not FFNExperts:
            raise UserError(f"expert={expert!r} is not supported with expert_tensor_group: use ffn, swiglu or geglu")
        options = {**fixed, **options, "group": tensor_group}
        return ShardedFFNExperts(count, d_model, d_hidden, first_expert=local.start, seed=seed, **options)
    if isinstance(expert, str):
        if expert not in EXPERTS:
            raise UserError(f"expert={expert!r} is not known; {known_names(expert, sorted(EXPERTS))}")
        return EXPERTS[expert](count, d_model, d_hidden, first_expert=local.start, seed=seed, **options)
    if isinstance(expert, type) and issubclass(expert, FFNExperts):
        return expert(count, d_model, d_hidden, first_expert=local.start, seed=seed, **options)
    if options:
        raise UserError(f"expert_options={dict(options)!r} need a named expert or FFNExperts: set them on your expert")
    if isinstance(expert, nn.Module):
        raise UserError(
            f"expert is one module, {type(expert).__name__}: pass a list of {num_experts} modules, or a function of "
            "d_model that returns a module"
        )
    sources: list[Any] = list(expert) if isinstance(expert, Sequence) else [expert] * num_experts
    if len(sources) != num_experts:
        raise UserError(f"expert has {len(sources)} entries for {num_experts} experts: pass one for each expert")
    ready = [isinstance(source, nn.Module) for source in sources]
    return _keyed(lambda i: sources[i] if ready[i] else sources[i](d_model), local.start, count, seed)


__all__ = [
    "EXPERTS",
    "FFNExperts",
    "ModuleExperts",
    "ShardedFFNExperts",
    "SharedExpert",
    "Stacked",
    "build_experts",
    "register_expert",
    "taken_options",
    "truncated_normal_",
]
