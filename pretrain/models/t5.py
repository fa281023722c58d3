"""Encoder-decoders that fill in spans: Megatron-core's T5.

Encoder and decoder share the embedding. Layers are numbered from 1 through the encoder and then on through the decoder:
in ``moe.layers``, in metrics and in the keys of weights and noise. Nothing is padded: the only mask is the
decoder's causal one.
"""

from dataclasses import replace

import torch
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from fmoe import random
from megatron_patch.attention import SDPAttention
from pretrain.config import Recipe
from pretrain.data.samples import TokenBlocks
from pretrain.data.spans import SpanCorruption, Spans
from pretrain.data.tokenizers import Tokenizer
from pretrain.models.batch import Batch
from pretrain.models.config import own_norms, set_rope_theta, transformer_config


def build(
    recipe: Recipe, *, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> T5Model:
    """Build a T5; see `pretrain.models`. Pipeline stages are not supported."""
    if not (pre_process and post_process) or vp_stage is not None:
        raise ValueError("pipeline stages of a T5 are not supported")
    model = recipe.model
    encoder = encoder_model_with_local_spec()
    decoder = decoder_model_with_local_spec()
    decoder.submodules.cross_attention.submodules.core_attention = SDPAttention
    for spec in (encoder, decoder):
        spec.submodules.self_attention.submodules.core_attention = SDPAttention
        own_norms(spec, model)
    module = T5Model(
        transformer_config(recipe, num_layers=model.decoder_layers),
        transformer_config(recipe),
        # get_t5_*_with_local_block_spec drops the last norm without Transformer Engine, silently (t5_spec.py:242).
        TransformerBlockSubmodules([encoder] * model.num_layers, layer_norm=WrappedTorchNorm),
        TransformerBlockSubmodules([decoder] * model.decoder_layers, layer_norm=WrappedTorchNorm),
        vocab_size=model.vocab_size,
        max_sequence_length=max(model.sequence_length, recipe.decoder_length),
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type=model.position.encoding,
    )
    set_rope_theta(module, recipe)
    if not model.tied_output_bias:
        module.output_layer.bias = None
    if model.output_scale:
        factor = model.hidden_size**-0.5
        module.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * factor, *inputs[1:]))
    if model.position.encoding == "relative":
        _key_relative_positions(module, recipe.train.seed)
    lengths = model.sequence_length, recipe.decoder_length
    module.register_forward_pre_hook(lambda module, _: _enter_encoder(module))
    # The decoder's embedding runs before the decoder does.
    module.encoder.register_forward_hook(lambda *_: _enter_decoder(module, *lengths))
    return module


def forward(model: nn.Module, batch: Batch) -> Tensor:
    """Run a T5 on a micro batch; see `pretrain.models`."""
    return model(batch["tokens"], batch["decoder_tokens"], None, None, None, lm_labels=batch.get("labels"))


def block_length(recipe: Recipe) -> int:
    """Return the tokens of text of a sample; see `pretrain.models`."""
    return recipe.spans.block


def samples(recipe: Recipe, blocks: TokenBlocks, tokenizer: Tokenizer, seed: int, length: int) -> SpanCorruption:
    """Return the samples of a T5; see `pretrain.models`."""
    spans = Spans.of_block(length, recipe.data.noise_density, recipe.data.mean_span)
    spans = replace(spans, count=min(spans.count, spans.block - spans.noise))  # the short end of a text
    return SpanCorruption(blocks, spans, tokenizer.sentinels, tokenizer.end_of_document, tokenizer.role("pad"), seed)


@torch.no_grad()
def _key_relative_positions(module: T5Model, seed: int) -> None:
    """Draw each stack's relative position biases [buckets, heads] with the initializer of embeddings."""
    for part in ("encoder", "decoder"):
        weight = getattr(module, f"{part}_relative_pos_emb").relative_attention_bias.weight
        if not weight.is_meta:
            whole = torch.empty(weight.shape, device="cpu", dtype=torch.float32)
            with random.keyed("relative positions", seed, part):
                module.config.embedding_init_method(whole)
            weight.copy_(whole)


def _enter_encoder(module: T5Model) -> None:
    """Switch the dropout of the shared embedding to the encoder's random numbers."""
    module.embedding.embedding_dropout.part = "encoder"


def _enter_decoder(module: T5Model, encoder_length: int, decoder_length: int) -> None:
    """Switch the dropout of the shared embedding, and `random.position`, to the decoder's random numbers."""
    module.embedding.embedding_dropout.part = "decoder"
    # Random numbers depend on the index of the micro batch's first token: count it in decoder tokens.
    where = random.position()
    if module.training and where is not None:
        first_token = where.first_token // encoder_length * decoder_length
        random.set_position(where.seed, where.step, first_token, stream=_DECODER)


_DECODER = 1 << 32  # above the other streams of a position, which are the pipeline stages
