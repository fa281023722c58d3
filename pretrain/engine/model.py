"""Megatron-core's model of a recipe: built with experts in its feed-forward blocks, wrapped, checked."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from fmoe.errors import UserError, one_line
from fmoe.exchange import build_exchange
from fmoe.experts import FFNExperts
from fmoe.gates import GATES, HashRouter, build_gate
from megatron_patch.dropout import key_dropout
from megatron_patch.fsdp import FullyShardedDataParallel
from pretrain.config import ModelConfig, Recipe
from pretrain.config.layer import exchange_options, expert_shapes, gate_options, loss_weights, moe_options
from pretrain.engine.compression import check_compression
from pretrain.engine.optimizer import check_optimizer
from pretrain.models import kind_of
from pretrain.models.config import DTYPES


def build_model(
    recipe: Recipe, *, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> nn.Module:
    """Build the model, or a pipeline chunk of it, on its training device, not yet wrapped for data parallelism.

    Args:
        pre_process: the chunk has the embedding.
        post_process: the chunk has the output layer.
        vp_stage: index of the chunk on this rank (virtual pipeline); None for the only chunk.
    """
    model = recipe.model
    # Megatron-core warns about every unknown module, and from 0.19 on about its GPTModel.
    for name in ("transformer.transformer_layer", "models.gpt.gpt_model"):
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)
    kind = kind_of(recipe)
    module = kind.build(recipe, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
    if model.dropout:
        key_dropout(module, recipe.train.seed)
    if model.moe.num_experts:
        options = moe_options(model)
        if model.moe.balance_scope != "routing_group":
            ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
            options["gate_options"] = options["gate_options"] | {"balance_group": ranks}
        kind.fmoefy(
            module,
            model.routed_experts,
            layers=model.layers_with_experts,
            **options,
            overlap_shared=recipe.parallel.overlap_shared_experts,
            exchange=recipe.parallel.exchange,
            exchange_options=exchange_options(recipe.parallel),
            seed=recipe.train.seed,
        )
    _scale(module, model)  # wraps blocks and dropout, so after all of their replacements
    return module.cuda() if torch.cuda.is_available() else module


def _scale(module: Any, model: ModelConfig) -> None:
    """Apply the embedding, residual and logit factors of Granite (arXiv 2408.13359 section 3) to a model."""
    for part in module.modules():
        if isinstance(part, LanguageModelEmbedding) and model.embedding_scale != 1:
            part.word_embeddings.register_forward_hook(lambda _, __, out: out * model.embedding_scale)
        elif isinstance(part, TransformerLayer) and model.residual_scale != 1:
            for name in ("self_attn_bda", "mlp_bda"):
                setattr(part, name, functools.partial(_scaled_add, getattr(part, name), model.residual_scale))
    if model.logit_divisor != 1 and module.post_process:
        # Divides the hidden states instead of the logits, because they have fewer elements.
        module.output_layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] / model.logit_divisor, *inputs[1:]))


def _scaled_add(make: Callable[..., Callable[..., Tensor]], scale: float, *options: Any) -> Callable[..., Tensor]:
    """Wrap the function ``make(*options)``: multiply a block's output and bias by ``scale`` before it adds them."""
    add = make(*options)

    def scale_and_add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        return add((x * scale, None if bias is None else bias * scale), residual, prob)

    return scale_and_add


def wrap(recipe: Recipe, chunk: Any, index: int) -> DistributedDataParallel | FullyShardedDataParallel:
    """Wrap this rank's chunk number ``index`` of a model for its precision and for data parallelism."""
    parallel = recipe.parallel
    for module in chunk.modules():
        if isinstance(module, FFNExperts):  # only the experts' operation adds to their gradients, unless shadowed
            module.into_main_grad = not parallel.shadow
    config = chunk.config
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.shard == "optimizer",
        overlap_grad_reduce=parallel.overlap_gradients,
        overlap_param_gather=parallel.overlap_parameters,
    )
    if recipe.train.precision != "fp32":
        chunk = Float16Module(config, chunk)
    if parallel.is_fully_sharded:
        return FullyShardedDataParallel(
            config,
            chunk,
            reshard_after_forward=parallel.shard == "parameters",
            reduce_dtype=DTYPES[parallel.grad_reduce],
            on_host=recipe.optimizer.cpu_offload > 0,
        )
    # The pipeline hides the reductions of later chunks, as in Megatron-LM.
    return DistributedDataParallel(config, options, chunk, disable_bucketing=index > 0)


def check_parts(recipe: Recipe) -> None:
    """Raise UserError if a part of the recipe is unknown or refuses its options.

    The parts are the kind of model, the optimizer, the gate, the experts and the token exchange.
    """
    model = recipe.model
    parallel = recipe.parallel
    kind_of(recipe)
    check_optimizer(recipe)
    check_compression(recipe)
    moe = model.moe
    if not moe.num_experts:
        return
    with _refusing("moe", f"gate={moe.gate}", "gate_options", moe.gate_options):
        gate: Any = GATES.get(moe.gate)
        if isinstance(gate, type) and issubclass(gate, HashRouter):
            raise UserError(f"gate={moe.gate} needs token ids, which Megatron-core does not pass: use another gate")
        build_gate(moe.gate, model.hidden_size, model.routed_experts, model.chosen_experts, **gate_options(model))
        loss_weights(model)
    with _refusing("moe", f"expert={moe.expert}", "expert_options", moe.expert_options):
        expert_shapes(model)
        if parallel.expert_tensor > 1 and moe.expert not in ("ffn", "swiglu", "geglu"):
            raise UserError(f"expert={moe.expert} needs parallel.expert_tensor=1, not {parallel.expert_tensor}")
    with _refusing("parallel", f"exchange={parallel.exchange}", "exchange_options", parallel.exchange_options):
        build_exchange(None, model.routed_experts, parallel.exchange, exchange_options(parallel))


@contextlib.contextmanager
def _refusing(section: str, part: str, table: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Convert an error of the ``with`` block to a UserError that begins with a recipe key, such as ``moe.gate``."""
    try:
        yield
    except UserError as error:
        if str(error).startswith(f"{section}."):
            raise
        # A key of `options` is in the table, any other in the section.
        home = f"{section}.{table}" if str(error).partition("=")[0] in options else section
        raise UserError(f"{home}.{error}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{section}.{part} fails with {section}.{table}={dict(options)}: {one_line(error)}") from error
