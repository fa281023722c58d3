"""Assignment of an engine's functions to the regions of a step."""

import sys
from collections.abc import Iterator

from torch import nn

from bench.step.regions import LAYER, Mark
from fmoe.kernels.rows import DispatchPlan
from megatron_patch import MegatronMoE
from pretrain.engine import Engine


def marks_of(engine: Engine) -> Iterator[Mark]:
    """Return the marks of a step of a GPT whose experts are ours or megatron-core's.

    The native operation gathers, computes and combines in one: all of it is `experts`, and dispatch and combine are 0.
    """
    for layer in engine.gpt.decoder.layers:
        yield layer.self_attention, "forward", "attention"
    for block in blocks(engine):
        yield block, "forward", LAYER
        yield from _of_ours(block) if isinstance(block, MegatronMoE) else _of_megatron(block)
    yield DispatchPlan, "from_routing", "plan"
    yield DispatchPlan, "permute", "dispatch"
    yield DispatchPlan, "combine", "combine"
    for chunk in engine.model:
        yield chunk, "zero_grad_buffer", "optimizer"
    for name in ("zero_grad", "prepare_grads", "get_grad_norm", "step_with_ready_grads"):
        yield engine.optimizer, name, "optimizer"
    yield sys.modules[Engine.__module__], "clip_gradients", "optimizer"


def blocks(engine: Engine) -> list[nn.Module]:
    """Return the layers' feed-forward blocks that have experts."""
    return [layer.mlp for layer in engine.gpt.decoder.layers if hasattr(layer.mlp, "experts")]


def _of_ours(block: MegatronMoE) -> Iterator[Mark]:
    yield block.gate, "forward", "router"
    if block.exchange.group is not None:  # the exchange of counts
        yield block.exchange, "open", "plan"
    # A changed `forward` of experts would keep the layer from the native operation (`ExpertCall`).
    yield block.experts, "forward" if block.experts.backend == "torch" else "fused_forward", "experts"


def _of_megatron(block: nn.Module) -> Iterator[Mark]:
    dispatcher = block.token_dispatcher
    yield block.router, "forward", "router"
    yield dispatcher, "preprocess", "plan"
    for name in ("dispatch_preprocess", "token_dispatch", "dispatch_postprocess"):
        yield dispatcher, name, "dispatch"
    yield block.experts, "forward", "experts"
    for name in ("combine_preprocess", "token_combine", "combine_postprocess"):
        yield dispatcher, name, "combine"
