"""Calls of the functions and classes that make experts. Their signatures decide which arguments they get.

A factory that requires an argument ``num_experts`` makes all experts of a rank as one module. Any other factory makes
one expert.
"""

import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fmoe import random
from fmoe.errors import UserError, parameters_of
from fmoe.experts.modules import ModuleExperts

Factory = Callable[..., nn.Module]
_PASSES_ON = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}

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


def registers_all(factory: Factory) -> bool:
    """Return whether a registered factory makes all experts of a rank. Unlike `makes_all`, ``*args`` alone says so.

    Raises:
        UserError: the signature does not decide.
    """
    if makes_all(factory):
        return True
    try:
        parameters = _signature(factory).parameters.values()
    except ValueError:
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    has_size = any(p.name in ("d_model", "d_hidden") for p in parameters)
    if len(required) > 2 or (takes_any and positional and not has_size):
        raise UserError(
            f"expert={_described(factory)} may make one expert or all experts of a rank: pass stacked=True if it is "
            "called with (num_experts, d_model, d_hidden), or stacked=False"
        )
    return takes_any and not has_size


class Singles:
    """Makes the experts of a rank by a factory of one expert, each under another random seed.

    Args:
        func: the factory (`make`).
        is_default_width: whether ``d_hidden`` is a default. Experts with a default of their own then keep that.
    """

    def __init__(self, func: Factory, *, is_default_width: bool = False):
        self.func = func
        self.is_default_width = is_default_width

    def __call__(
        self, num_experts: int, d_model: int, d_hidden: int, *, first_expert: int = 0, seed: int = 0, **options: Any
    ) -> ModuleExperts:
        sizes = {"d_model": d_model, "d_hidden": d_hidden}
        modules = []
        for index in range(first_expert, first_expert + num_experts):
            with random.keyed("expert", seed, index):
                modules.append(make(self.func, sizes, options, is_default_width=self.is_default_width))
        return ModuleExperts(modules, first_expert=first_expert, seed=seed)


def make(
    factory: Factory, sizes: Mapping[str, int], options: Mapping[str, Any], *, is_default_width: bool = False
) -> nn.Module:
    """Call the factory with the ``sizes`` that its signature takes, and with the options as keywords.

    A size is passed as the parameter of its name, or else as the next required parameter that no size names, or else
    in ``*args``. The first parameter takes ``d_model`` even if it is optional.

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
    named = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    free = [name for name in named if name not in sizes and name not in options]
    unnamed = [name for name in free if parameters[name].default is inspect.Parameter.empty]
    if not unnamed and not parameters.keys() & sizes.keys():
        unnamed = free if "num_experts" in sizes else free[:1]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    surplus: list[int] = []
    keywords = dict(options)
    for name, value in sizes.items():
        keeps_default = name in fixed or (name == "d_hidden" and is_default_width)
        if name in parameters:
            if not keeps_default or parameters[name].default is inspect.Parameter.empty:
                keywords[name] = value
        elif unnamed:
            keywords[unnamed.pop(0)] = value
        elif name == "d_model" or (takes_any and not keeps_default):
            surplus.append(value)
    positional: list[Any] = []
    for name in named:
        parameter = parameters[name]
        if surplus and takes_any:  # *args begins after the named parameters
            positional.append(keywords.pop(name, parameter.default))
        elif parameter.kind is parameter.POSITIONAL_ONLY and name in keywords:
            positional.append(keywords.pop(name))
    positional += surplus
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        raise UserError(f"expert={_described(factory)} cannot be called: {error}; {_CONTRACT}") from None
    try:
        module = factory(*positional, **keywords)
    except TypeError as error:
        if _is_refused_by_module(factory, error):
            raise UserError(f"expert={_described(factory)} cannot be called: {error}; {_CONTRACT}") from None
        raise
    if not isinstance(module, nn.Module):
        raise UserError(
            f"expert={_described(factory)} returned {type(module).__name__}, which is not a module; {_CONTRACT}"
        )
    return module


def _described(factory: Factory) -> str:
    return f"{getattr(factory, '__name__', repr(factory))}{_signature(factory)}"


def _signature(factory: Factory) -> inspect.Signature:
    """Return the signature; of a class that passes on ``*args, **kwargs``, that of its base class."""
    if not isinstance(factory, type):
        return inspect.signature(factory)
    if inspect.getattr_static(factory, "__init__") is nn.Module.__init__:
        return inspect.Signature()  # accepts no argument in fact
    for base in factory.__mro__:
        if base is nn.Module:  # accepts none, but the class may keep its arguments to itself
            break
        if "__init__" in vars(base):
            parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
            if {parameter.kind for parameter in parameters} != _PASSES_ON:
                return inspect.Signature(parameters)
    return inspect.signature(factory)


def _is_refused_by_module(factory: Factory, error: TypeError) -> bool:
    """Return whether the error is nn.Module's, about arguments that the class passed on to it."""
    kinds = {parameter.kind for parameter in _signature(factory).parameters.values()}
    if not isinstance(factory, type) or kinds != _PASSES_ON:
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = frames[-1]
    # By name, because torch._dynamo wraps nn.Module.__init__.
    is_modules = (last.f_globals.get("__name__"), last.f_code.co_name) == (nn.Module.__module__, "__init__")
    return is_modules and type(last.f_locals["self"]) is factory


def make_stacked(
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
    layer_options = {"first_expert": first_expert, "seed": seed}
    taken = {name: value for name, value in layer_options.items() if name in names or not is_complete}
    sizes = {"num_experts": num_experts, "d_model": d_model, "d_hidden": d_hidden}
    return make(factory, sizes, {**taken, **options})
