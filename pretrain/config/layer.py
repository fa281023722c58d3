"""The options of a recipe's MoE layers (of gate, experts, exchange and losses), and the shapes of their parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fmoe import MoE, random
from fmoe.errors import UserError, known_names, option_names
from fmoe.exchange import EXCHANGES
from fmoe.experts import EXPERTS, build_experts, taken_options
from fmoe.gates import GATES, build_gate
from fmoe.losses import DEFAULT_LOSS_WEIGHTS
from pretrain.config.model import ModelConfig
from pretrain.config.parallel import ParallelConfig

Options = dict[str, Any]  # of a gate, of experts, of an exchange, by name

WIRE = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Options of gates that have a key of [moe], under the same name. Those of `_ALWAYS` are passed to each gate that has
# them, the others only if the recipe sets them.
_ALWAYS = ("capacity_factor", "eval_capacity_factor", "jitter")
_IF_SET = ("score", "normalize", "routed_scale", "bias_step")
# Options of exchanges that have a key of [parallel], under the same name.
_OF_EXCHANGE = ("chunks", "max_rows", "shadow", "node_size")

HOMES: dict[str, dict[str, str]] = {
    "gate": {
        **{name: f"`moe.{name}`" for name in (*_ALWAYS, *_IF_SET)},
        "balance_group": "`moe.balance_scope`",
        "init_method": "`model.init`",
        "node_of": "none: a function; register a gate that sets it",
        "table": "none: a tensor computed from the training data; register a gate that sets it",
    },
    "experts": {"init_method": "`model.init`", "output_init_method": "`model.init`"},
    "exchange": {
        **{name: f"`parallel.{name}`" for name in _OF_EXCHANGE},
        "wire_dtype": "`parallel.wire`",
        "cost": "none: a measurement, which changes results only by rounding",
        "groups": "none: a pair of process groups, made from `parallel.node_size`",
    },
    "loss": {"balance": "`moe.balance_loss`", "z": "`moe.z_loss`"},
}
"""Options that must not be set in a recipe's tables of options, such as ``moe.gate_options``.

The value is the key that sets the option, or the reason why there is no key."""

OF_LAYER = ("d_model", "num_experts", "top_k", "d_hidden", "first_expert", "seed", "group")
"""Arguments that the MoE layer sets itself. Only a gate's ``seed`` may also be an option in the recipe."""


def is_shipped(factory: Any) -> bool:
    """Return whether a gate, expert or exchange is part of fmoe, not registered by a plugin."""
    return getattr(getattr(factory, "func", factory), "__module__", "").startswith("fmoe.")


def gate_options(model: ModelConfig) -> Options:
    """Return the gate's options: those with a key of their own in ``[moe]``, and the table ``moe.gate_options``.

    Raises:
        UserError: the gate is unknown; ``model`` sets an option that the gate does not have;
            ``moe.gate_options`` sets an option in `HOMES`; or ``moe.balance_scope`` needs a gate with the
            balance loss.
    """
    moe = model.moe
    gate = _named("moe.gate", moe.gate, GATES)
    known = option_names(gate) if isinstance(gate, type) else []
    options = {name: getattr(moe, name) for name in _ALWAYS if name in (known or ())}
    options |= _set_options("moe", moe, _IF_SET, "gate", GATES, known)
    if moe.balance_scope != "routing_group" and "balance" not in getattr(gate, "common_losses", ()):
        raise UserError(
            f"moe.balance_scope={moe.balance_scope} needs a gate with the balance loss, not moe.gate={moe.gate}"
        )
    return options | _from_table("gate", "moe.gate_options", moe.gate_options, moe.gate, known)


def expert_options(model: ModelConfig) -> Options:
    """Return ``moe.expert_options`` after a check of the option names.

    Raises:
        UserError: ``moe.expert`` is unknown; or ``moe.expert_options`` sets an option that these experts do not
            have, or one in `HOMES`.
    """
    known = option_names(_named("moe.expert", model.moe.expert, EXPERTS))
    return _from_table("experts", "moe.expert_options", model.moe.expert_options, model.moe.expert, known)


def loss_weights(model: ModelConfig) -> dict[str, float]:
    """Return the weights of auxiliary losses by name: ``balance``, ``z`` and those in ``moe.loss_weights``.

    Raises:
        UserError: ``moe.loss_weights`` sets ``balance``, ``z`` or an unknown loss; or a weight in it is negative or
            not a number.
    """
    is_known = model.moe.gate in GATES and is_shipped(GATES[model.moe.gate])
    known = list(DEFAULT_LOSS_WEIGHTS) if is_known else None  # a registered gate may have other losses
    options = _from_table("loss", "moe.loss_weights", model.moe.loss_weights, "the library's gates", known)
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise UserError(f"moe.loss_weights.{name}={value} must be a number of at least 0")
    return {"balance": model.moe.balance_loss, "z": model.moe.z_loss, **options}


def exchange_options(parallel: ParallelConfig) -> Options:
    """Return the options of the exchange (token dispatcher) that ``parallel.exchange`` names.

    They are the table ``parallel.exchange_options``, and the exchange's keys in ``[parallel]`` that differ from their
    defaults.

    Raises:
        UserError: the exchange is unknown; ``parallel`` sets an option that the exchange does not have;
            ``parallel.exchange_options`` sets an option in `HOMES`; or an option has an invalid value.
    """
    known = option_names(_named("parallel.exchange", parallel.exchange, EXCHANGES))
    names: tuple[str, ...] = _OF_EXCHANGE
    if parallel.all_reduce == "hierarchical" and parallel.exchange != "hierarchical":
        names = tuple(name for name in names if name != "node_size")  # of the reduction of gradients
    options = _set_options("parallel", parallel, names, "exchange", EXCHANGES, known)
    if parallel.wire is not None:
        options["wire_dtype"] = WIRE[parallel.wire]
    table = _from_table("exchange", "parallel.exchange_options", parallel.exchange_options, parallel.exchange, known)
    slots = table.get("slots")  # checked here, because no exchange is built with one expert parallel rank
    if parallel.exchange == "padded" and slots is not None and (type(slots) is not int or slots < 1):
        raise UserError(f"parallel.exchange_options.slots={slots!r} is not a positive integer")
    return options | table


def _named(key: str, name: str, registry: Mapping[str, Any]) -> Any:
    if name not in registry:
        raise UserError(f"{key}={name!r} is not known; {known_names(name, sorted(registry))}")
    return registry[name]


def _set_options(
    section: str, config: Any, names: tuple[str, ...], part: str, registry: Mapping[str, Any], known: list[str] | None
) -> Options:
    """Return the options among ``names`` that a section sets to other values than the defaults.

    Args:
        part: key of the section that names the component, such as ``gate``.
        known: options of the component; None if it takes any.

    Raises:
        UserError: the component does not have an option.
    """
    options = {name: getattr(config, name) for name in names if getattr(config, name) != getattr(type(config), name)}
    for name, value in options.items():
        if known is not None and name not in known:
            others = ", ".join(other for other in sorted(registry) if name in (option_names(registry[other]) or ()))
            raise UserError(
                f"{section}.{name}={value} is not an option of {section}.{part}={getattr(config, part)}; use it with "
                f"{others}"
            )
    return options


def _from_table(part: str, table: str, options: Mapping[str, Any], owner: str, known: list[str] | None) -> Options:
    """Return ``options`` after a check that their names are in ``known`` (None allows any name), and not in `HOMES`.

    Args:
        part: key of `HOMES`.
        table: recipe key of the options, for error messages.
        owner: component that takes the options, for error messages.
    """
    homes = HOMES[part]
    allowed = [name for name in known or () if name not in OF_LAYER or (part, name) == ("gate", "seed")]
    for name, value in options.items():
        if known is not None and name not in allowed:
            free = [other for other in allowed if other not in homes]
            raise UserError(f"{table}.{name}={value} is not an option of {owner}; {known_names(name, free)}")
        if name in homes:
            why = homes[name].removeprefix("none: ")
            why = f"use the key {why}" if why == homes[name] else f"it is {why}"
            raise UserError(f"{table}.{name}={value} is not supported: {why}")
    return dict(options)


def moe_options(model: ModelConfig) -> Options:
    """Return the options of `fmoe.build.Spec` that ``[model]`` sets.

    The result lacks ``d_model``, ``num_experts`` and ``shared_options``.

    Raises:
        UserError: an option of the gate, the experts or the losses is invalid.
    """
    return {
        "d_hidden": model.expert_width,
        "expert": model.moe.expert,
        "expert_options": expert_options(model),
        "shared_expert": model.shared_width or None,
        "shared_gate": model.moe.shared_expert_gate,
        "top_k": model.chosen_experts,
        "gate": model.moe.gate,
        "gate_options": gate_options(model),
        "loss_weights": loss_weights(model),
        "group_size": model.moe.group_size,
    }


def build_layer(model: ModelConfig, *, init_methods: tuple[Callable[[Tensor], object], ...] = (), **more: Any) -> MoE:
    """Build one MoE layer of the recipe in this process, without Megatron-core, for inputs [B, S, D].

    Args:
        init_methods: two functions that fill a tensor in place. The first initializes the gate's matrix and the
            experts' input matrices, the second the experts' output matrices. Empty for the layer's defaults.
        more: further options of `fmoe.build.Spec`.

    Raises:
        UserError: see `moe_options`.
    """
    options = moe_options(model)
    of_model: Options = {"activation": model.activation, "gated": model.gated, "bias": False}
    if init_methods:
        of_model |= dict(zip(("init_method", "output_init_method"), init_methods, strict=True))
        if "init_method" in (option_names(GATES[model.moe.gate]) or ()):
            options["gate_options"] = {"init_method": init_methods[0], **options["gate_options"]}
    options["expert_options"] = {**taken_options(model.moe.expert, of_model), **options["expert_options"]}
    if model.moe.expert != "ffn":
        options["shared_options"] = of_model
    return MoE.build(d_model=model.hidden_size, num_experts=model.routed_experts, **{**options, **more})


def router_shapes(model: ModelConfig) -> list[tuple[int, ...]]:
    """Return the shapes of the gate's parameters.

    For a plugin's gate that is not imported, or a gate that rejects its options, return the shape of one matrix,
    [experts, hidden_size].
    """
    sizes = model.hidden_size, model.routed_experts, model.chosen_experts
    try:
        with torch.device("meta"), random.keyed("sizes"):
            return _shapes(build_gate(model.moe.gate, *sizes, **gate_options(model)))
    except UserError:
        return [(model.routed_experts, model.hidden_size)]


def expert_shapes(model: ModelConfig) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of one routed expert.

    For a plugin's experts that are not imported, return the shapes of ``ffn`` experts.
    """
    name, given = (model.moe.expert, expert_options(model)) if model.moe.expert in EXPERTS else ("ffn", {})
    of_model = {"activation": model.activation, "gated": model.gated, "bias": False}
    options = {**taken_options(name, of_model), **given}
    with torch.device("meta"), random.keyed("sizes"):
        experts = build_experts(name, 1, slice(0, 1), model.hidden_size, model.expert_width, 0, options)
    return _shapes(experts)


def _shapes(module: Any) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in module.parameters()] if hasattr(module, "parameters") else []
