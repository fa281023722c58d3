"""Initial weights of a dense model that do not depend on the pipeline split.

Megatron-core draws the weights of a stage's layers from one generator, one layer after the other, so they depend on the
split. Here only the seed and the layer number determine a layer's weights (`fmoe.random`). With
``config.use_cpu_initialization``, tensor parallel ranks take slices of whole matrices.
"""

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from fmoe import random


def keyed_layer_spec(
    spec: ModuleSpec,
    seed: int,
    part: str = "decoder",
    without_mlp: Collection[int] = (),
    first: int | None = None,
) -> ModuleSpec:
    """Return a copy of a transformer layer's spec that draws weights from (seed, part, layer number) alone.

    Args:
        part: name of the stack, in models where several stacks number their layers from 1.
        without_mlp: numbers of layers to build without an MLP, because experts will replace it. The other weights of
            these layers stay the same.
        first: number of the stack's layers on earlier pipeline stages; None for Megatron-core's division into stages.
    """

    class KeyedLayer(spec.module):
        def __init__(self, config, submodules, layer_number: int = 1, vp_stage: int | None = None, **options):
            offset = get_transformer_layer_offset(config, vp_stage)
            if first is not None:
                layer_number += first - offset  # Megatron-core adds the offset
            number = layer_number + offset
            if options.get("is_mtp_layer"):  # from megatron-core 0.17 on, which counts these layers from 1
                number = config.num_layers + layer_number
            if number in without_mlp:
                submodules = replace(submodules, mlp=IdentityOp)
            with random.keyed("layer's dense weights", seed, part, number):
                super().__init__(config, submodules, layer_number=layer_number, vp_stage=vp_stage, **options)

    KeyedLayer.__name__ = KeyedLayer.__qualname__ = spec.module.__name__
    keyed = copy.copy(spec)
    keyed.module = KeyedLayer
    return keyed


@torch.no_grad()
def key_output_layer(model: Any, seed: int) -> None:
    """Draw the weight of the output layer, depending only on the seed.

    A model is unchanged if it is on the meta device, has no output layer on this stage, or shares the output weight
    with the embedding.
    """
    if not model.post_process or model.share_embeddings_and_output_weights:
        return
    weight = model.output_layer.weight
    if weight.is_meta:
        return
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    whole = torch.empty(weight.shape[0] * size, weight.shape[1], device="cpu", dtype=torch.float32)
    with random.keyed("output layer", seed):
        (model.config.embedding_init_method or model.config.init_method)(whole)
    weight.copy_(whole.chunk(size)[rank])
