"""Decoder-only language models: Megatron-core's GPT."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from fmoe import random
from megatron_patch import fmoefy as fmoefy  # of `Kind`
from megatron_patch import patches
from megatron_patch.attention import SDPAttention
from megatron_patch.biases import BiasedRowParallelLinear, add_output_bias
from megatron_patch.context import slice_rotary_positions
from megatron_patch.initialization import key_output_layer, keyed_layer_spec
from megatron_patch.latent_attention import LatentAttention
from megatron_patch.mtp import MTPModel, mtp_block_spec
from megatron_patch.transformer_xl import RecurrentLayer, RelativeAttention
from pretrain.config import Recipe
from pretrain.data.packing import DocumentMask
from pretrain.data.samples import GPTSamples, Samples, Segments, TokenBlocks
from pretrain.data.tokenizers import Tokenizer
from pretrain.models.batch import Batch, other_document
from pretrain.models.config import norm_class, own_norms, transformer_config
from pretrain.models.memory import Memory
from pretrain.models.yarn import scale_positions


def build(recipe: Recipe, **stage: Any) -> GPTModel:
    """Build a GPT; see `pretrain.models`."""
    patches.install()  # before attention is built
    is_latent = recipe.model.attention.kv_lora_rank is not None
    layer_spec = get_gpt_layer_local_spec(multi_latent_attention=is_latent)
    if is_latent:
        layer_spec.submodules.self_attention.module = LatentAttention
    if recipe.model.position.encoding == "transformer_xl":
        layer_spec.module = RecurrentLayer
        layer_spec.submodules.self_attention.module = RelativeAttention
    return build_gpt(
        recipe,
        transformer_config(recipe),
        layer_spec,
        without_mlp=recipe.model.layers_with_experts,
        **stage,
    )


def build_gpt(
    recipe: Recipe,
    config: TransformerConfig,
    layer_spec: ModuleSpec,
    *,
    without_mlp: Collection[int] = (),
    vp_stage: int | None = None,
    **stage,
) -> GPTModel:
    """Build a pipeline stage of a GPT: the layers of the spec, with torch's fused attention.

    The first stage also has the embedding. The last stage also has the output layer and multi-token prediction.

    Args:
        without_mlp: numbers of the layers to build without an MLP, because experts will replace it.
        stage: `GPTModel`'s ``pre_process`` and ``post_process``.
    """
    layer_spec.submodules.self_attention.submodules.core_attention = SDPAttention
    options = recipe.model
    own_norms(layer_spec, options)
    if options.attention.output_bias:
        layer_spec.submodules.self_attention.submodules.linear_proj = BiasedRowParallelLinear
    seed = recipe.train.seed
    keyed_spec = keyed_layer_spec(layer_spec, seed, without_mlp=without_mlp)
    mtp = {}
    if options.mtp_layers:
        mtp_spec = mtp_block_spec(config, layer_spec, keyed_spec, seed, vp_stage, norm_class(options))
        mtp = {"mtp_block_spec": mtp_spec}
    position = options.position
    with random.keyed("embedding", seed):
        model = (MTPModel if mtp else GPTModel)(
            config,
            keyed_spec,
            vocab_size=options.vocab_size,
            max_sequence_length=options.sequence_length,
            share_embeddings_and_output_weights=options.tie_embeddings,
            # Transformer-XL's attention encodes positions itself.
            position_embedding_type=position.encoding if position.encoding != "transformer_xl" else "none",
            rotary_base=position.rope_theta,
            rotary_percent=position.rotary_fraction,
            vp_stage=vp_stage,
            **mtp,
            **stage,
        )
    if position.rope_scaling is not None:
        scale_positions(model, options)
    slice_rotary_positions(model)
    key_output_layer(model, seed)
    if options.output_bias:
        add_output_bias(model)
    return model


def forward(model: nn.Module, batch: Batch) -> Tensor:
    """Run a GPT on a micro batch; see `pretrain.models`.

    With ``documents`` in the batch, tokens attend only within their document. The batch's tokens may be a slice of the
    sequences (`pretrain.models.batch.context_slice`).
    """
    tokens = batch["tokens"]
    positions = batch.get("positions")
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int64).expand_as(tokens)
    # Causal attention makes its own mask.
    mask = document_mask(batch["documents"]) if "documents" in batch else None
    return model(tokens, positions, mask, labels=batch.get("labels"))


def block_length(recipe: Recipe) -> int:
    """Return the tokens of text of a sample; see `pretrain.models`."""
    return recipe.model.sequence_length


def samples(recipe: Recipe, blocks: TokenBlocks, tokenizer: Tokenizer, seed: int, length: int) -> Samples:
    """Return the samples of a GPT; see `pretrain.models`."""
    if recipe.data.chat:
        return blocks  # samples of conversations already
    if isinstance(blocks, GPTSamples) and blocks.streams:
        return Segments(blocks)
    return DocumentMask(blocks, tokenizer.end_of_document) if recipe.data.document_mask else blocks


def memories(recipe: Recipe, chunks: Sequence[nn.Module]) -> list[Memory]:
    """Return an empty Transformer-XL memory for each chunk; [] without ``position.memory_length``."""
    length = recipe.model.position.memory_length
    return [Memory(chunk, length, recipe.streams) for chunk in chunks] if length else []


def document_mask(documents: Tensor) -> Tensor:
    """Return Megatron's attention mask, bool [b, 1, s, s], from the document numbers of tokens [b, s].

    The mask is True where a query (third axis) must not see a key (fourth axis), because the key is in another document
    or comes later.
    """
    # Rotary positions need not restart in each document: scores depend only on differences of positions.
    length = documents.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=documents.device).triu(1)
    return later | other_document(documents, documents)
