"""Experts of a rank as one module: ``experts(rows, counts_L) -> rows``.

The rows are sorted by the local index of their expert. ``counts_L`` is the number of rows of each local expert, an
int64 tensor on the CPU. The option ``expert`` of a layer takes a name in `EXPERTS`, a module class or function, or a
sequence with one entry per expert. `build_experts` makes the module: stacked weights (`FFNExperts`) or a list of
modules (`ModuleExperts`).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe import random
from fmoe.errors import UserError, add_name, check_options, known_names, option_names
from fmoe.experts.factories import Factory, Singles, make, make_stacked, makes_all, registers_all
from fmoe.experts.ffn import BACKENDS, FFNExperts, Stacked
from fmoe.experts.modules import ModuleExperts
from fmoe.experts.shared import SharedExpert
from fmoe.experts.tensor_parallel import ShardedFFNExperts

EXPERTS: dict[str, Factory] = {
    "ffn": FFNExperts,
    "swiglu": functools.partial(FFNExperts, gated=True, activation="silu"),
    "geglu": functools.partial(FFNExperts, gated=True, activation="gelu"),
}
"""Classes or functions that make the experts of a rank as one module, by name.

They are called as ``factory(num_experts, d_model, d_hidden, first_expert=..., seed=..., **options)``."""


def register_expert(name: str, factory: Factory, *, stacked: bool | None = None) -> None:
    """Register experts under a new name, for the option ``expert`` of a layer and ``moe.expert`` of a recipe.

    Args:
        factory: a module class or function. If it requires an argument ``num_experts``, or has ``*args`` and names no
            size, it is called as ``factory(num_experts, d_model, d_hidden, first_expert=..., seed=..., **options)``,
            without ``first_expert`` and ``seed`` if it does not take them. It returns
            all experts of a rank as one module (`fmoe.experts`).
            Otherwise it is called once per expert, each time under another random seed, as
            ``factory(d_model, **options)``, or ``factory(d_model, d_hidden, **options)`` if it has a second required
            argument or one named ``d_hidden``. It returns one expert, which maps rows [n, D] to [n, D].
        stacked: True if the factory returns all experts of a rank, False if it returns one; None to tell it from the
            signature as above.

    Raises:
        UserError: the name is not a string, is empty, or belongs to other experts; ``factory`` is not a class or
            function; or ``stacked`` is None and the signature does not decide, because it requires more than two
            positional arguments or has ``*args`` after others.
    """
    _check_callable(factory)
    is_stacked = registers_all(factory) if stacked is None else stacked
    add_name(EXPERTS, "expert", name, factory if is_stacked else Singles(factory))


def _check_callable(factory: Any) -> None:
    if isinstance(factory, nn.Module) or not callable(factory):
        raise UserError(f"expert={factory!r} must be a class or function that returns a module")


def taken_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``options`` that the experts named ``name`` accept.

    Options that the name fixes, such as the activation of "swiglu", are left out.
    """
    factory = EXPERTS.get(name)
    taken = option_names(factory)
    fixed = getattr(factory, "keywords", {})
    return {key: value for key, value in options.items() if (taken is None or key in taken) and key not in fixed}


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
    expert: str | Factory | Sequence[Any] | nn.Module,
    num_experts: int,
    local: slice,
    d_model: int,
    d_hidden: int,
    seed: int,
    options: Mapping[str, Any],
    tensor_group: dist.ProcessGroup | None = None,
    backend: str = "auto",
    *,
    is_default_width: bool = False,
) -> nn.Module:
    """Build this rank's experts. Their weights depend on the seed and on their global ids.

    Args:
        expert: as in `fmoe.build.Spec`.
        num_experts: number of experts on all ranks.
        local: global ids of this rank's experts.
        tensor_group: ranks over which the hidden units of each expert are spread; None if they are not.
        backend: one of `fmoe.experts.ffn.BACKENDS`; only "auto" and "torch" for experts that are not `FFNExperts`.
        is_default_width: whether ``d_hidden`` is a default. Experts with a default of their own then keep that.

    Raises:
        UserError: an unknown name; a sequence whose length is not ``num_experts``; an invalid option; options for a
            sequence; a class or function whose signature does not fit; ``tensor_group`` with experts other than ffn,
            swiglu and geglu; an unavailable backend.
    """
    count = local.stop - local.start
    if backend not in BACKENDS:
        raise UserError(f"backend={backend!r} is not known; {known_names(backend, BACKENDS)}")
    factory: Any = EXPERTS.get(expert, expert) if isinstance(expert, str) else expert
    fixed = factory.keywords if isinstance(factory, functools.partial) else {}
    made_by = getattr(factory, "func", factory)
    is_ffn = isinstance(made_by, type) and issubclass(made_by, FFNExperts)
    if backend not in ("auto", "torch") and not is_ffn:
        raise UserError(f"backend={backend!r} supports ffn, swiglu and geglu, not expert={expert!r}")
    if isinstance(expert, str) and expert not in EXPERTS:
        raise UserError(f"expert={expert!r} is not known; {known_names(expert, sorted(EXPERTS))}")
    if tensor_group is not None and made_by is not FFNExperts:
        raise UserError(f"expert={expert!r} is not supported with expert_tensor_group: use ffn, swiglu or geglu")
    if isinstance(factory, Sequence):
        return _build_each(factory, num_experts, local, d_model, d_hidden, seed, options, is_default_width)
    if isinstance(factory, nn.Module):
        raise UserError(
            f"expert is one module, {type(factory).__name__}: pass a list of {num_experts} modules, or a function of "
            "d_model that returns a module"
        )
    _check_callable(factory)
    is_single = isinstance(factory, Singles)
    if is_single:
        factory = factory.func
    elif not isinstance(expert, str) and not is_ffn:
        is_single = not makes_all(factory)
    if is_single:
        factory = Singles(factory, is_default_width=is_default_width)
    own = ("num_experts", "d_model", "d_hidden", "first_expert", "seed")
    check_options("expert_options", factory, options, getattr(expert, "__name__", str(expert)), own)
    if backend != "auto" and is_ffn:
        options = {**options, "backend": backend}
    if tensor_group is not None:
        options = {**fixed, **options, "group": tensor_group}
        return ShardedFFNExperts(count, d_model, d_hidden, first_expert=local.start, seed=seed, **options)
    if is_ffn or is_single:
        return factory(count, d_model, d_hidden, first_expert=local.start, seed=seed, **options)
    return make_stacked(factory, count, d_model, d_hidden, first_expert=local.start, seed=seed, options=options)


def _build_each(
    sources: Sequence[Any],
    num_experts: int,
    local: slice,
    d_model: int,
    d_hidden: int,
    seed: int,
    options: Mapping[str, Any],
    is_default_width: bool,
) -> ModuleExperts:
    """Build this rank's experts from one module, class or function for each expert of all ranks."""
    if options:
        raise UserError(f"expert_options={dict(options)!r} need one expert for all: set them on each of your experts")
    if len(sources) != num_experts:
        raise UserError(f"expert has {len(sources)} entries for {num_experts} experts: pass one for each expert")
    sizes = {"d_model": d_model, "d_hidden": d_hidden}
    modules = []
    for index in range(local.start, local.stop):
        source = sources[index]
        if not isinstance(source, nn.Module):
            _check_callable(source)
            with random.keyed("expert", seed, index):
                source = make(source, sizes, {}, is_default_width=is_default_width)
        modules.append(source)
    return ModuleExperts(modules, first_expert=local.start, seed=seed)


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
