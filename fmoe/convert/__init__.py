"""``fmoefy`` converts the feed-forward blocks of a model to experts, or takes over the experts that it has, in place.

`fmoe.convert.families` finds the blocks, module by module. Models whose layers have another interface, such as
Megatron-core's, need a converter of whole models. Converters are entry points of the group ``fmoe.converters``. An
entry point has the name of the models' package, and is loaded only if that package is imported: fmoe imports no model
library.

A converter takes the model. It returns a function that converts the model, or None for a model of another family.
`fmoefy` calls this function with the model, ``num_experts`` and the options that differ from their defaults.
"""

import contextlib
import copy
import inspect
import logging
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from fmoe.convert.blocks import Block, LinearMap, known_activation, linear_map
from fmoe.convert.experts import ExpertBlock
from fmoe.convert.families import FAMILIES, Found, find_blocks, find_experts, register_family, search
from fmoe.convert.routed import Form, RoutedMoE
from fmoe.convert.upcycle import Upcycling, check_block, plan_upcycling, upcycle_
from fmoe.errors import UserError
from fmoe.moe import MoE
from fmoe.packaging import entries
from fmoe.random import draw_seed, key
from fmoe.runtime.versions import installed, warn_untested

Convert = Callable[..., nn.Module]
logger = logging.getLogger("fmoe")

# Wrappers of torch (FSDPModule is FSDP2's), Megatron and DeepSpeed, by class name, so that no package is imported.
_WRAPPERS = frozenset(
    ["DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"]
)


def fmoefy(
    model: nn.Module,
    num_experts: int | None = None,
    *,
    layers: str | int | Collection[int] = "all",
    upcycle: bool = True,
    exact: bool = True,
    noise: float = 0.0,
    granularity: int = 1,
    seed: int | None = None,
    **options: Any,
) -> nn.Module:
    """Convert the feed-forward blocks of ``model`` to Mixture-of-Experts layers, in place; return the model.

    Without ``num_experts``, convert the experts that the model has already to `fmoe.convert.routed.RoutedMoE` layers
    with the same weights, and leave its dense blocks.

    Call it before you wrap the model in DDP, FSDP or another wrapper, or create an optimizer. Each block keeps its
    dtype, device, mode (training or evaluation), biases and dropout. An error leaves the model unchanged.

    Args:
        num_experts: number of experts of each layer, over all ranks; None for a model with experts.
        layers: ``"all"``; indices of blocks in order of occurrence, counted from 0; or n for every n-th block (indices
            n - 1, 2 n - 1, ...). `fmoe.convert.find_blocks` lists the blocks, and `fmoe.convert.find_experts` those of
            a model with experts.
        upcycle: make every expert a copy of the dense block (arXiv 2212.05055). False draws new experts of the block's
            sizes.
        exact: with ``upcycle``, raise an error with the reason if anything but ``noise`` would change the model's
            output. False accepts a changed output, for example if the gate drops tokens.
        noise: with ``upcycle``, standard deviation of noise on each expert's weights, relative to their root mean
            square.
        granularity: number m of small experts among which the hidden units of one block are split. ``num_experts`` and
            ``top_k`` count small experts. With ``upcycle``, both must be multiples of m, because m small experts form a
            copy of the block (`fmoe.convert.upcycle`).
        seed: seed of new weights and noise; None draws one from torch's default generator. All ranks of ``moe_group``
            must use the same.
        options: options of `fmoe.build.Spec`: ``top_k``, ``gate``, ``gate_options``, ``loss_weights``, ``moe_group``,
            ... Without ``num_experts``, only ``layers``, ``moe_group``, ``exchange``, ``exchange_options``, ``backend``
            and ``check`` are supported. For Megatron-core models, options of `megatron_patch.fmoefy`, which counts
            layers from 1 and uses seed 0 by default.

    Raises:
        UserError: no block is found (the message counts the modules by class); the model is wrapped or has MoE layers
            already; its own experts have an unknown form, or are quantized or shared between layers; ``layers`` is out
            of range; upcycling cannot keep the output; an option is invalid.
    """
    chosen_here: dict[str, Any] = {"layers": layers, "upcycle": upcycle, "exact": exact, "noise": noise}
    chosen_here |= {"granularity": granularity, "seed": seed}
    changed = {name: value for name, value in chosen_here.items() if value != _DEFAULTS[name]}
    convert, converters = _whole_model(model)
    if convert is not None and num_experts is not None:
        return convert(model, num_experts=num_experts, **changed, **options)
    if any(base.__module__.startswith("transformers.") for base in type(model).__mro__):
        warn_untested("transformers")
    check_model(model)
    if num_experts is None:
        return _take_over(model, **changed, **options)
    found, refused = search(model)
    if not found:
        raise UserError(_nothing_found(model, converters, refused))
    if refused:
        logger.warning("fmoefy leaves these modules unchanged: %s", _listed(refused))
    chosen = {index: found[index] for index in _choose(layers, len(found))}
    check_chosen(model, chosen.values(), granularity, options)
    seed = draw_seed() if seed is None else seed
    options = {"num_experts": num_experts, "granularity": granularity, **options}
    how = plan_blocks(list(chosen.values()), upcycle=upcycle, exact=exact, noise=noise, options=options)
    # All layers are made before the first is installed, so that an error leaves the model unchanged.
    made = [(f.block, _make(f.block, how, options, key("layer", seed, index))) for index, f in chosen.items()]
    for block, layer in made:
        _install(model, block, layer)
    return model


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(fmoefy).parameters.items()
    if parameter.default is not parameter.empty
}


# Options that keep a model's own experts as they are.
_TAKEN = ("moe_group", "exchange", "exchange_options", "backend", "check")

# First version of transformers whose experts can be converted, by `model_type`. Granite had other experts before;
# Phi-MoE and HunYuan used combine weights of the wrong experts.
_SINCE = dict.fromkeys(("granitemoe", "granitemoehybrid", "granitemoeshared"), (5, 13))
_SINCE |= dict.fromkeys(("phimoe", "hunyuan_v1_moe"), (5, 1))


def own_experts(model: nn.Module, layers: str | int | Collection[int] = "all", **options: Any) -> list[Found]:
    """Return the experts of a model that `fmoefy` without ``num_experts`` converts; an empty list if it has none.

    Raises:
        UserError: they cannot be converted, or an option is not for them.
    """
    needed = _SINCE.get(getattr(getattr(model, "config", None), "model_type", ""), (0, 0))
    if installed("transformers") < needed:
        raise UserError(f"the experts of {type(model).__name__} need transformers>={needed[0]}.{needed[1]}: update it")
    found, refused = search(model, ExpertBlock)
    known = {f.name for f in found}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts" and name not in known:
            refused.setdefault(name, f"is a {type(module).__name__}, which has no form that fmoe knows")
    if refused:
        raise UserError(f"the experts of {type(model).__name__} cannot be converted: {_listed(refused)}")
    if not found:
        return []
    for option, value in options.items():
        if option not in _TAKEN:
            raise UserError(f"{option}={value!r} is for dense blocks: pass num_experts too, or omit {option}")
    chosen = [found[index] for index in _choose(layers, len(found))]
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for name, _, block in chosen:
        tied = [tensor for tensor, value in block.tensors.items() if uses[id(value)] > 1]
        if tied:
            raise UserError(f"{name}.{tied[0]} is shared with another module: each layer needs experts of its own")
    return chosen


def _take_over(model: nn.Module, **options: Any) -> nn.Module:
    """Convert the model's own experts, in place; arguments as in `fmoefy`."""
    chosen = own_experts(model, **options)
    if not chosen:
        raise UserError(f"num_experts is missing: {type(model).__name__} has no experts, only dense blocks")
    options.pop("layers", None)
    made = [(block, block.layer(name, **options)) for name, _, block in chosen]
    for block, layer in made:
        _install(model, block, layer)
    return model


def _whole_model(model: nn.Module) -> tuple[Convert | None, list[str]]:
    """Return a function that converts ``model``, or None; and the names of the converters considered.

    The converters are entry points of the group ``fmoe.converters``.
    """
    names = []
    for entry in entries("fmoe.converters"):
        if entry.name not in sys.modules:  # so the model is not of its family; loading may take seconds
            names.append(f"{entry.name} (not imported)")
            continue
        names.append(entry.name)
        if (convert := entry.load()(model)) is not None:
            return convert, names
    return None, names


def check_model(model: nn.Module) -> None:
    """Raise a UserError if the model is wrapped or already has MoE layers."""
    for module in model.modules():
        if wrapper := next((c.__name__ for c in type(module).__mro__ if c.__name__ in _WRAPPERS), None):
            raise UserError(f"the model is wrapped in {wrapper}: convert it before you wrap it")
    present = sum(isinstance(module, MoE) for module in model.modules())
    if present:
        raise UserError(f"the model already has MoE layers ({present}): convert all `layers` in one call")


def _listed(refused: dict[str, str]) -> str:
    """Format the refused modules by reason, with the name of one module as an example of each."""
    names: dict[str, list[str]] = {}
    for name, reason in refused.items():
        names.setdefault(reason, []).append(name)
    lines = [f"{n[0]}{f' and {len(n) - 1} more' if n[1:] else ''} ({reason})" for reason, n in names.items()]
    return ", ".join(lines[:4]) + (f" and {len(lines) - 4} other reasons" if lines[4:] else "")


def _nothing_found(model: nn.Module, converters: list[str], refused: dict[str, str]) -> str:
    counts = Counter(type(module).__name__ for module in model.modules())
    modules = ", ".join(f"{count} {name}" for name, count in counts.most_common(12))
    more = f" and {len(counts) - 12} other classes" if len(counts) > 12 else ""
    return (
        f"fmoefy found no feed-forward block in {type(model).__module__}.{type(model).__qualname__}. "
        f"Families searched: {', '.join(reversed(FAMILIES))}; "
        f"converters of whole models: {', '.join(converters) or 'none'}. "
        f"Modules seen: {modules}{more}. A block is Linear D -> H, activation, Linear H -> D, or its gated form; "
        "fmoe.register_family adds a family" + (f". Refused: {_listed(refused)}" if refused else "")
    )


def _choose(layers: str | int | Collection[int], count: int) -> list[int]:
    there = f"number of feed-forward blocks: {count}; indices start at 0"
    if isinstance(layers, str):
        if layers != "all":
            raise UserError(f"layers={layers!r} is neither 'all', nor indices, nor n for every n-th block; {there}")
        return list(range(count))
    if isinstance(layers, int) and not isinstance(layers, bool):
        if not 1 <= layers <= count:
            raise UserError(f"layers={layers} (every n-th block) selects no block; {there}")
        return list(range(layers - 1, count, layers))
    indices = list(layers) if isinstance(layers, Collection) else [layers]
    if not indices or not all(type(index) is int and 0 <= index < count for index in indices):
        raise UserError(f"layers={layers!r} must be one or more indices of blocks; {there}")
    return sorted(set(indices))


def check_chosen(model: nn.Module, chosen: Collection[Found], granularity: int, options: dict[str, Any]) -> None:
    """Raise a UserError if experts cannot replace a chosen block, or if ``granularity`` or an option is invalid."""
    if granularity < 1:
        raise UserError(f"granularity={granularity} must be at least 1")
    if "d_model" in options:
        raise UserError(f"d_model={options['d_model']} must not be set: fmoefy takes the width from the model")
    if isinstance(options.get("gate"), nn.Module) and len(chosen) > 1:
        raise UserError(
            f"gate is a single {type(options['gate']).__name__}, but {len(chosen)} layers need one each: "
            "pass the gate's class or name, and gate_options"
        )
    for name, _, block in chosen:
        if block.module is model and block.install is None:
            raise UserError(
                f"the model itself is one feed-forward block ({type(model).__name__}), which cannot be replaced in "
                "place: put it into another module, or build fmoe.MoE"
            )
        if any(hasattr(t, "placements") for t in block.tensors):
            raise UserError(f"the weights of {name} are sharded (DTensor): call fmoefy before sharding")
        kinds = {(str(t.dtype).removeprefix("torch."), str(t.device)) for t in block.tensors}
        if len(kinds) > 1:
            raise UserError(
                f"the weights of {name} differ in dtype or device ({', '.join(map(' on '.join, sorted(kinds)))}): "
                "convert them to one dtype and device first, e.g. with model.to(device, torch.bfloat16)"
            )
        if torch.finfo(block.tensors[0].dtype).bits < 16:
            raise UserError(f"the weights of {name} are {block.tensors[0].dtype}: experts need 16 bits or more")


def plan_blocks(
    chosen: list[Found], *, upcycle: bool, exact: bool, noise: float, options: dict[str, Any]
) -> Upcycling | None:
    """Return the settings for upcycling the chosen blocks; None if ``upcycle`` is False or no block is chosen.

    Args:
        options: options of `fmoe.build.Spec`, with ``num_experts`` and `fmoefy`'s ``granularity``.

    Raises:
        UserError: see `fmoefy`.
    """
    if noise and not upcycle:
        raise UserError(f"noise={noise} is not supported with upcycle=False, which draws new experts: use noise=0")
    if not upcycle or not chosen:
        return None
    expert_options = options.get("expert_options") or {}
    fixed: list[str] = [n for n in ("expert", "d_hidden") if n in options]
    fixed += [f"expert_options[{n!r}]" for n in ("activation", "gated", "bias", *NOT_DRAWN) if n in expert_options]
    if fixed:
        raise UserError(f"upcycle=True copies experts from the dense blocks: {', '.join(fixed)} must not be set")
    granularity = options["granularity"]
    for name, _, block in chosen:
        check_block(block, name, granularity)

    def build(block: Block) -> MoE:
        # One rank and a copy of the gate: the trial neither communicates nor changes the caller's gate.
        gate = {"gate": copy.deepcopy(options["gate"])} if "gate" in options else {}
        return _make(block, None, {**options, **gate, "moe_group": None, "expert_options": None}, seed=0)

    gate = options.get("gate")
    return plan_upcycling(
        build,
        chosen[0].block,
        granularity=granularity,
        exact=exact,
        noise=noise,
        gate=repr(gate) if isinstance(gate, str) else None,
    )


def _leave(weight: torch.Tensor) -> None:
    """Do nothing, in place of an initializer: ``weight`` will be overwritten."""
    # Drawing it would dominate the time.


# Options of experts whose weights `upcycle_` will fill.
NOT_DRAWN = {"init_method": _leave, "output_init_method": _leave}


def _make(block: Block, how: Upcycling | None, options: dict[str, Any], seed: int) -> MoE:
    """Return an MoE layer of the block's sizes, dtype, device and mode. If ``how`` is None, its experts are new."""
    options = {"sequence_first": block.sequence_first, **options}
    granularity = options.pop("granularity")
    options.setdefault("d_hidden", max(block.d_hidden // granularity, 1))
    if "expert" not in options:
        options["expert_options"] = {
            "activation": known_activation(block.activation, block.tensors[0].dtype),
            "gated": block.is_gated,
            "bias": block.has_bias,
            "dropout": block.dropout,
            **(NOT_DRAWN if how is not None else {}),
            **(options.get("expert_options") or {}),
        }
    like = block.tensors[0]
    with torch.device("meta") if like.is_meta else contextlib.nullcontext():
        layer = MoE.build(d_model=block.d_model, seed=seed, **options)
    layer.to(like.device)
    for parameter in layer.parameters():  # not buffers: some gates keep float32 ones on purpose
        parameter.data = parameter.data.to(like.dtype)
    if how is not None:
        upcycle_(layer, block, how)
        layer.experts.init_method, layer.experts.output_init_method = None, None
        for parameter in layer.experts.parameters():
            parameter.requires_grad_(any(t.requires_grad for t in block.tensors))
    return layer.train(block.module.training)


def _install(model: nn.Module, block: Block | ExpertBlock, layer: nn.Module) -> None:
    if block.install is not None:
        block.install(layer)
        return
    if block.after:
        names = ["dropout", *(f"dropout{i}" for i in range(2, len(block.after) + 1))]
        layer = nn.Sequential(OrderedDict(moe=layer, **dict(zip(names, block.after, strict=True))))
        layer.training = block.module.training
    for parent in list(model.modules()):
        for name in [n for n, child in parent._modules.items() if child is block.module]:
            setattr(parent, name, layer)


__all__ = [
    "FAMILIES",
    "Block",
    "ExpertBlock",
    "Form",
    "Found",
    "LinearMap",
    "RoutedMoE",
    "find_blocks",
    "find_experts",
    "fmoefy",
    "linear_map",
    "own_experts",
    "register_family",
]
