"""Multi-token prediction (MTP) with Megatron-core's modules: DeepSeek-V3, arXiv 2412.19437 section 2.2.

Module k predicts the token k + 1 positions ahead. Its inputs are the embedding of the token k positions ahead and the
hidden state of module k - 1. Module 1 takes the hidden state of the decoder instead. A module normalizes its inputs,
projects them together and runs a transformer layer with the number ``config.num_layers + k``. It shares the model's
embedding and output layer.

The loss of module k is the mean over the tokens that it predicts: all labels of a sequence but the first k. In the
backward pass, Megatron-core adds the gradient of the modules' mean loss, times ``config.mtp_loss_scaling_factor``.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from fmoe import random

_LAYER = ("transformer_layer", "mtp_model_layer")  # up to megatron-core 0.16, and from 0.17 on


class MTPModel(GPTModel):
    """`GPTModel` that runs its multi-token prediction (MTP) modules only in training, with labels.

    The state dict always has the weights of the modules. A pipeline stage with the modules has a copy of the embedding,
    which Megatron-core keeps equal to the first stage's.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        if self.mtp_process and not self.pre_process:
            self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
            if self.share_embeddings_and_output_weights:
                # Megatron-core uses the copy of the embedding instead, and refuses to save this unused matrix.
                self.output_layer.weight = None

    def _postprocess(self, *args, mtp_in_postprocess: bool | None = None, **options) -> Tensor:
        if self.training and options.get("labels") is not None:
            return super()._postprocess(*args, mtp_in_postprocess=mtp_in_postprocess, **options)
        depth = self.config.mtp_num_layers
        self.config.mtp_num_layers = None
        try:
            return super()._postprocess(*args, mtp_in_postprocess=False, **options)
        finally:
            self.config.mtp_num_layers = depth


def mtp_block_spec(
    config: TransformerConfig,
    layer_spec: ModuleSpec,
    keyed_spec: ModuleSpec,
    seed: int,
    vp_stage: int | None = None,
    norm: Any = None,
) -> Any:
    """Return the spec of this pipeline stage's MTP modules; None if the stage has none.

    The modules' initial weights depend only on the seed and on their numbers.

    Args:
        layer_spec: spec of a transformer layer.
        keyed_spec: ``layer_spec`` after `megatron_patch.initialization.keyed_layer_spec`, which determines the initial
            weights.
        norm: class of the norms; None for Megatron-core's choice.
    """
    block = get_gpt_mtp_block_spec(config, layer_spec, use_transformer_engine=False, vp_stage=vp_stage)
    if block is None:
        return None
    spec = block.layer_specs[0]

    class KeyedMTPLayer(spec.module):  # type: ignore[name-defined]
        def __init__(self, config, submodules, layer_number: int = 1, **options):
            with random.keyed("multi-token prediction", seed, layer_number):
                super().__init__(config, submodules, layer_number=layer_number, **options)

    changed: dict[str, Any] = {name: keyed_spec for name in _LAYER if hasattr(spec.submodules, name)}
    if norm is not None:
        changed |= {"enorm": norm, "hnorm": norm, "layer_norm": norm}
    keyed = copy.copy(spec)
    keyed.module = KeyedMTPLayer
    keyed.submodules = replace(spec.submodules, **changed)
    return replace(block, layer_specs=[keyed] * len(block.layer_specs))


def mtp_layers(model: Any) -> Iterator[tuple[TransformerLayer, int]]:
    """Yield each MTP module's transformer layer and the offset from its ``layer_number`` to its number in the model."""
    block = getattr(model, "mtp", None)  # None on a pipeline stage without the modules
    for module in () if block is None else block.layers:
        layer = next(getattr(module, name) for name in _LAYER if hasattr(module, name))
        yield layer, model.config.num_layers + module.layer_number - layer.layer_number


def take_losses() -> Tensor | None:
    """Return the loss of each MTP module, summed over the micro batches since the last call: [modules].

    Returns None if this rank has no losses.
    """
    tracker: dict[str, Any] = MTPLossLoggingHelper.tracker
    losses = tracker.get("values", tracker.get("loss_values"))  # before and from megatron-core 0.19 on
    tracker.clear()
    return None if losses is None else losses.detach()
