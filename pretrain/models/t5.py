"""Encoder-decoders that fill in spans: Megatron-core's T5.

Encoder and decoder share the embedding. Layers are numbered from 1 through the encoder and then on through the decoder:
in ``moe.layers``, in metrics and in the keys of weights and noise. Nothing is padded: the only mask is the
decoder's causal one.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.T5.t5_model import T5Model, t5_position_ids
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from fmoe import random
from megatron_patch.attention import SDPAttention
from megatron_patch.initialization import key_output_layer, keyed_layer_spec
from pretrain.config import Recipe
from pretrain.data.samples import TokenBlocks
from pretrain.data.spans import SpanCorruption, Spans
from pretrain.data.tokenizers import Tokenizer
from pretrain.models.batch import Batch, other_document
from pretrain.models.config import own_norms, set_rope_theta, transformer_config
from pretrain.models.gpt import document_mask


def build(
    recipe: Recipe, *, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> T5Model:
    """Build a T5; see `pretrain.models`. A pipeline stage has one chunk."""
    model = recipe.model
    seed = recipe.train.seed
    stage = parallel_state.get_pipeline_model_parallel_rank()
    begin = sum(recipe.stage_layers[:stage])
    end = begin + recipe.stage_layers[stage]
    depth = model.num_layers
    encoder_layers = range(min(begin, depth), min(end, depth))
    decoder_layers = range(max(begin, depth), max(end, depth))
    encoder = encoder_model_with_local_spec()
    decoder = decoder_model_with_local_spec()
    decoder.submodules.cross_attention.submodules.core_attention = SDPAttention
    for spec in (encoder, decoder):
        spec.submodules.self_attention.submodules.core_attention = SDPAttention
        own_norms(spec, model)
    encoder = keyed_layer_spec(encoder, seed, "encoder", first=encoder_layers.start)
    decoder = keyed_layer_spec(decoder, seed, first=decoder_layers.start - depth)
    config = partial(transformer_config, recipe, pipeline_model_parallel_layout=None)
    with random.keyed("embedding", seed):
        module = StagedT5(
            config(num_layers=model.decoder_layers),
            config(),
            # get_t5_*_with_local_block_spec drops the last norm without Transformer Engine, silently (t5_spec.py:242).
            TransformerBlockSubmodules([encoder] * len(encoder_layers), layer_norm=WrappedTorchNorm),
            TransformerBlockSubmodules([decoder] * len(decoder_layers), layer_norm=WrappedTorchNorm),
            vocab_size=model.vocab_size,
            max_sequence_length=max(model.sequence_length, recipe.decoder_length),
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=model.tie_embeddings,
            position_embedding_type=model.position.encoding,
            add_encoder=bool(encoder_layers),
            add_decoder=bool(decoder_layers),
        )
    key_output_layer(module, seed)
    if encoder_layers.stop == depth and encoder_layers and not post_process:
        # Megatron-core builds the last norm of both stacks on the last stage.
        own = module.encoder_config
        norm = WrappedTorchNorm(config=own, hidden_size=own.hidden_size, eps=own.layernorm_epsilon)
        module.encoder.final_layernorm = norm
    set_rope_theta(module, recipe)
    if post_process and not model.tied_output_bias:
        module.output_layer.bias = None
    if post_process and model.output_scale:
        factor = model.hidden_size**-0.5
        module.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * factor, *inputs[1:]))
    if model.position.encoding == "relative":
        _key_relative_positions(module, seed, stage)
    lengths = model.sequence_length, recipe.decoder_length
    if encoder_layers:
        module.register_forward_pre_hook(lambda module, _: _enter(module, "encoder"))
        # The decoder's embedding runs before the decoder does.
        module.encoder.register_forward_hook(lambda *_: _enter_decoder(module, *lengths))
    else:
        module.register_forward_pre_hook(lambda module, _: _enter_decoder(module, *lengths))
    return module


class StagedT5(T5Model):
    """A T5 or a pipeline stage of it.

    Stages exchange hidden states [encoder tokens + decoder tokens, batch, hidden size], also where a stage has layers
    of one stack only. The encoder's output thus reaches all layers of the decoder, and gradients return the same way.
    """

    _entering: Any

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Set the hidden states from the previous stage; [None] on the first stage."""
        (self._entering,) = input_tensor

    def forward(self, encoder_input_ids: Tensor, decoder_input_ids: Tensor, *masks: None, **options: Any) -> Tensor:
        """Run the stage: arguments and result are those of `T5Model`, but hidden states on all stages but the last."""
        if self.pre_process and self.post_process:
            return super().forward(encoder_input_ids, decoder_input_ids, *masks, **options)
        encoder_x: Any = None
        decoder_x: Any = None
        if not self.pre_process:
            slices = self.tp_group.size() if self.config.sequence_parallel else 1
            lengths = [ids.shape[1] // slices for ids in (encoder_input_ids, decoder_input_ids)]
            encoder_x, decoder_x = self._entering.split(lengths)
            for stack, x in ((self.encoder, encoder_x), (self.decoder, decoder_x)):
                if stack is not None:
                    stack.set_input_tensor(x)
        run = partial(super().forward, encoder_input_ids, decoder_input_ids, *masks)
        if self.encoder is not None:
            encoder_x = run(output_encoder_hidden_only=True)
        if self.decoder is not None:
            decoder_x = run(encoder_hidden_states=encoder_x, **options)
        elif self.pre_process:
            decoder_x = self.embedding(decoder_input_ids, t5_position_ids(decoder_input_ids))
        return decoder_x if self.post_process else torch.cat([encoder_x, decoder_x])

    def sharded_state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Return Megatron's sharded tensors; the first stage writes relative position biases, which all stages have."""
        state = super().sharded_state_dict(*arguments, **options)
        for name, tensor in state.items():
            if "relative_pos_emb" in name:
                tensor.replica_id = (parallel_state.get_pipeline_model_parallel_rank(), *tensor.replica_id[1:])
        return state


def forward(model: nn.Module, batch: Batch) -> Tensor:
    """Run a T5 on a micro batch; see `pretrain.models`."""
    masks: list[Tensor | None] = [None, None, None]
    if "documents" in batch:  # of a registered source
        encoder = batch["documents"]
        decoder = batch["decoder_documents"]
        masks = [other_document(encoder, encoder), document_mask(decoder), other_document(decoder, encoder)]
    return model(batch["tokens"], batch["decoder_tokens"], *masks, lm_labels=batch.get("labels"))


def block_length(recipe: Recipe) -> int:
    """Return the tokens of text of a sample; see `pretrain.models`."""
    return recipe.spans.block


def samples(recipe: Recipe, blocks: TokenBlocks, tokenizer: Tokenizer, seed: int, length: int) -> SpanCorruption:
    """Return the samples of a T5; see `pretrain.models`."""
    spans = Spans.of_block(length, recipe.data.noise_density, recipe.data.mean_span)
    spans = replace(spans, count=min(spans.count, spans.block - spans.noise))  # the short end of a text
    return SpanCorruption(blocks, spans, tokenizer.sentinels, tokenizer.end_of_document, tokenizer.role("pad"), seed)


@torch.no_grad()
def _key_relative_positions(module: T5Model, seed: int, stage: int) -> None:
    """Draw each stack's relative position biases [buckets, heads], which all pipeline stages share, as embeddings."""
    for part in ("encoder", "decoder"):
        weight = getattr(module, f"{part}_relative_pos_emb").relative_attention_bias.weight
        weight.is_shared_by_stages = True
        weight.shared_embedding = True  # for a bucket of its own, which optimizers shard alike on all stages
        weight.shared = stage > 0  # counts once in the norm of gradients
        if not weight.is_meta:
            whole = torch.empty(weight.shape, device="cpu", dtype=torch.float32)
            with random.keyed("relative positions", seed, part):
                module.config.embedding_init_method(whole)
            weight.copy_(whole)


def _enter(module: T5Model, part: str) -> None:
    """Switch the dropout of the shared embedding to the random numbers of the encoder or decoder."""
    if module.pre_process:
        module.embedding.embedding_dropout.part = part


def _enter_decoder(module: T5Model, encoder_length: int, decoder_length: int) -> None:
    """Switch the dropout of the shared embedding, and `random.position`, to the decoder's random numbers."""
    _enter(module, "decoder")
    # Random numbers depend on the index of the micro batch's first token: count it in decoder tokens.
    where = random.position()
    if module.training and where is not None:
        first_token = where.first_token // encoder_length * decoder_length
        random.set_position(where.seed, where.step, first_token, stream=_DECODER)


_DECODER = 1 << 32  # above the other streams of a position, which are the pipeline stages
