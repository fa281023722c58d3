"""Megatron-core's model of a recipe, with experts in its feed-forward blocks."""

import inspect
import logging
from typing import Any

import torch
from torch import nn

from fmoe.errors import UserError
from fmoe.exchange import build_exchange
from fmoe.gates import GATES, build_gate
from megatron_patch import fmoefy
from megatron_patch.dropout import key_dropout
from pretrain.config import ModelConfig, ParallelConfig, Recipe
from pretrain.models import kind_of

# Keys of [model] that only some gates accept, under the same names.
_OF_SOME = ("score", "normalize", "routed_scale", "bias_step")


def build_model(
    recipe: Recipe, *, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> nn.Module:
    """Build the model, or a pipeline chunk of it, on its training device, not yet wrapped for data parallelism."""
    model = recipe.model
    # Megatron-core warns about every unknown module, and from 0.19 on about its GPTModel.
    for name in ("transformer.transformer_layer", "models.gpt.gpt_model"):
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)
    module = kind_of(recipe).build(recipe, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
    if model.dropout:
        key_dropout(module, recipe.train.seed)
    if model.num_experts:
        fmoefy(
            module,
            model.num_experts,
            layers=model.layers_with_experts,
            d_hidden=model.ffn_hidden_size,
            shared_expert=model.num_shared_experts * model.ffn_hidden_size or None,
            top_k=model.top_k,
            gate=model.gate,
            gate_options=gate_options(model),
            loss_weights={"balance": model.balance_loss, "z": model.z_loss},
            group_size=model.group_size,
            exchange=recipe.parallel.exchange,
            exchange_options=exchange_options(recipe.parallel),
            seed=recipe.train.seed,
        )
    return module.cuda() if torch.cuda.is_available() else module


def check_parts(recipe: Recipe) -> None:
    """Raise UserError for an invalid gate or exchange."""
    model = recipe.model
    if model.num_experts:
        options = gate_options(model)
        try:
            build_gate(model.gate, model.hidden_size, model.num_experts, model.top_k, **options)
        except UserError as error:
            raise UserError(f"model.{error}") from error
        try:
            build_exchange(None, model.num_experts, recipe.parallel.exchange, exchange_options(recipe.parallel))
        except UserError as error:
            raise UserError(f"parallel.{error}") from error


def gate_options(model: ModelConfig) -> dict[str, Any]:
    """Return the keywords of the gate: its capacity factors, and the options that the recipe sets.

    Raises:
        UserError: the gate has no such option.
    """
    known = _keywords(GATES.get(model.gate))
    options: dict[str, Any] = {
        "capacity_factor": model.capacity_factor,
        "eval_capacity_factor": model.eval_capacity_factor,
    }
    if "jitter" in known:
        options["jitter"] = model.jitter
    for name in _OF_SOME:
        value = getattr(model, name)
        if value == getattr(ModelConfig, name):
            continue
        if name not in known:
            gates = ", ".join(gate for gate in sorted(GATES) if name in _keywords(GATES[gate]))
            raise UserError(f"model.{name}={value} is not an option of model.gate={model.gate}; use it with {gates}")
        options[name] = value
    return options


def _keywords(gate: Any) -> set[str]:
    """Return the parameter names of a gate's constructor, including those passed on to base classes."""
    if not isinstance(gate, type):
        return set()
    return {name for cls in gate.__mro__ if "__init__" in vars(cls) for name in inspect.signature(cls).parameters}


def exchange_options(parallel: ParallelConfig) -> dict[str, Any]:
    """Return the exchange's keywords that the recipe sets to other values than the defaults: not every exchange has all
    of them."""
    names = ("chunks", "max_rows", "shadow", "node_size")
    options = {name: getattr(parallel, name) for name in names}
    options = {name: value for name, value in options.items() if value != getattr(ParallelConfig, name)}
    if parallel.wire is not None:
        options["wire_dtype"] = {"fp32": torch.float32, "bf16": torch.bfloat16}[parallel.wire]
    return options
