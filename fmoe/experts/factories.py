"""Calls of the functions and classes that make experts. Their signatures decide which arguments they get.

A factory that requires an argument ``num_experts`` makes all experts of a rank as one module. Any other factory makes
one expert.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fmoe import random
from fmoe.errors import UserError, parameters_of
from fmoe.experts.modules import ModuleExperts

Factory = Callable[..., nn.Module]

_CONTRACT = (
    "use the signature (d_model) or (d_model, d_hidden) to make one expert, or (num_experts, d_model, d_hidden) to "
    "make all experts of a rank, and pass other arguments in expert_options"
)


def makes_all(factory: Factory) -> bool:
    """Return whether the factory makes all experts of a rank."""
    try:
        parameter = parameters_of(factory)[0].get("num_experts")
    except ValueError:  # a builtin without a signature
        return False
    return parameter is not None and parameter.default is parameter.empty


class Singles:
    """Makes the experts of a rank by a factory of one expert, each under another random seed.

    Args:
        func: the factory (`call`).
        is_default_width: whether ``d_hidden`` is a default. Experts with a default of their own then keep that.
    """

    def __init__(self, func: Factory, *, is_default_width: bool = False):
        self.func, self.is_default_width = func, is_default_width

    def __call__(
        self, num_experts: int, d_model: int, d_hidden: int, *, first_expert: int = 0, seed: int = 0, **options: Any
    ) -> ModuleExperts:
        sizes = {"d_model": d_model, "d_hidden": d_hidden}
        modules = []
        for index in range(first_expert, first_expert + num_experts):
            with random.keyed("expert", seed, index):
                modules.append(call(self.func, sizes, options, is_default_width=self.is_default_width))
        return ModuleExperts(modules, first_expert=first_expert, seed=seed)


def call(
    factory: Factory, sizes: Mapping[str, int], options: Mapping[str, Any], *, is_default_width: bool = False
) -> nn.Module:
    """Call the factory with the ``sizes`` that its signature takes, and with the options as keywords.

    A size is passed as the parameter of its name, or else as the next required parameter that no size names. ``*args``
    takes all sizes. The first parameter takes ``d_model`` even if it is optional.

    Args:
        sizes: ``d_model`` and ``d_hidden``, after ``num_experts`` for all experts of a rank.
        is_default_width: see `Singles`.

    Raises:
        UserError: the signature does not fit, or the factory returned something else than a module.
    """
    try:
        signature = _signature(factory)
    except ValueError as error:
        raise UserError(f"expert={factory!r} cannot be called: {error}; {_CONTRACT}") from None
    parameters = signature.parameters
    fixed = getattr(factory, "keywords", {})  # of a functools.partial
    unnamed = [
        name
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        and p.default is p.empty
        and name not in sizes
        and name not in options
    ]
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    positional: list[int] = []
    keywords = dict(options)
    for name, value in sizes.items():
        keeps_default = name in fixed or (name == "d_hidden" and is_default_width)
        if name in parameters:
            if not keeps_default or parameters[name].default is inspect.Parameter.empty:
                keywords[name] = value
        elif unnamed:
            keywords[unnamed.pop(0)] = value
        elif name == "d_model" or (takes_all and not keeps_default):
            positional.append(value)
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY and name in keywords:
            positional.append(keywords.pop(name))
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        name = getattr(factory, "__name__", repr(factory))
        raise UserError(f"expert={name}{signature} cannot be called: {error}; {_CONTRACT}") from None
    module = factory(*positional, **keywords)
    if not isinstance(module, nn.Module):
        name = getattr(factory, "__name__", repr(factory))
        raise UserError(
            f"expert={name}{signature} returned {type(module).__name__}, which is not a module; {_CONTRACT}"
        )
    return module


def _signature(factory: Factory) -> inspect.Signature:
    """Return the signature; of a class that passes on ``*args, **kwargs``, that of its base class."""
    if not isinstance(factory, type):
        return inspect.signature(factory)
    passes_on = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    for base in factory.__mro__:
        if base is nn.Module:
            return inspect.Signature()  # accepts no argument in fact
        if "__init__" in vars(base):
            parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
            if {parameter.kind for parameter in parameters} != passes_on:
                return inspect.Signature(parameters)
    return inspect.signature(factory)


def call_for_all(
    factory: Factory,
    num_experts: int,
    d_model: int,
    d_hidden: int,
    *,
    first_expert: int,
    seed: int,
    options: Mapping[str, Any],
) -> nn.Module:
    """Call a factory of all experts of a rank, which may take ``first_expert`` and ``seed``."""
    names, is_complete = parameters_of(factory)
    own = {"first_expert": first_expert, "seed": seed}
    taken = {name: value for name, value in own.items() if name in names or not is_complete}
    sizes = {"num_experts": num_experts, "d_model": d_model, "d_hidden": d_hidden}
    return call(factory, sizes, {**taken, **options})
