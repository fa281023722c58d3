"""From a recipe to a Megatron-core model whose feed-forward blocks are experts."""

import logging

import torch
from torch import nn

from megatron_patch import fmoefy
from megatron_patch.dropout import key_dropout
from pretrain.config import Recipe
from pretrain.gate import exchange_options, gate_options
from pretrain.models import kind_of


def build_model(
    recipe: Recipe, *, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> nn.Module:
    """The model, or a pipeline chunk of it, on the device it trains on, not yet wrapped for data parallelism."""
    model = recipe.model
    # Megatron-core warns about every module that it does not know.
    logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)
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
