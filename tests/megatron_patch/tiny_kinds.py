"""A tiny Megatron-core T5, BERT and vision transformer beside `tiny_gpt`. Not a test itself."""

import copy

import torch
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from tiny_gpt import LAYERS, LENGTH, VOCAB, tiny_config

DECODER_LAYERS = 3
TARGETS = 6


def tiny_t5(change=lambda spec, **options: spec, **options) -> T5Model:
    """2 layers of encoder, 3 of decoder. ``change`` gets each layer spec, and where its layers lie in the model."""
    torch.manual_seed(0)
    encoder_config = tiny_config(**options)
    config = tiny_config(**options)
    config.num_layers = DECODER_LAYERS
    total = LAYERS + DECODER_LAYERS
    encoder = change(encoder_model_with_local_spec(), model_layers=total)
    decoder = change(decoder_model_with_local_spec(), model_layers=total, layer_offset=LAYERS)
    return T5Model(
        config,
        encoder_config,
        TransformerBlockSubmodules([encoder] * LAYERS, layer_norm=WrappedTorchNorm),
        TransformerBlockSubmodules([decoder] * DECODER_LAYERS, layer_norm=WrappedTorchNorm),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )


def tiny_bert(change=lambda spec, **options: spec, **options) -> BertModel:
    """2 layers, no binary head."""
    torch.manual_seed(0)
    return BertModel(
        tiny_config(**options),
        0,
        change(copy.deepcopy(bert_layer_local_spec)),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        add_binary_head=False,
    )


def tiny_vit(change=lambda spec, **options: spec, **options) -> CLIPViTModel:
    """2 layers, images of 8 x 8 in four patches."""
    torch.manual_seed(0)
    spec = change(copy.deepcopy(get_gpt_layer_local_spec()))
    norm = {"ln_pre_impl": WrappedTorchNorm, "ln_post_impl": WrappedTorchNorm}
    return CLIPViTModel(tiny_config(**options), spec, patch_dim=4, img_h=8, img_w=8, **norm)


BUILD = {"t5": tiny_t5, "bert": tiny_bert, "vit": tiny_vit}


def run(model, labels: bool = False, masks: bool = True) -> torch.Tensor:
    """Logits, or losses, of the same tokens every time; ``masks`` that hide nothing but what comes later, or none."""
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, CLIPViTModel):
        return model(torch.randn(4, 3, 8, 8, generator=generator))
    tokens, targets = (torch.randint(VOCAB, (4, length), generator=generator) for length in (LENGTH, TARGETS))
    if isinstance(model, BertModel):
        return model(tokens, torch.ones_like(tokens) if masks else None, lm_labels=tokens if labels else None)[0]
    source, cross = (torch.zeros(4, 1, length, LENGTH).bool() for length in (LENGTH, TARGETS))
    later = torch.ones(4, 1, TARGETS, TARGETS).triu(1).bool()
    given = (source, later, cross) if masks else (None, None, None)
    return model(tokens, targets, *given, lm_labels=targets if labels else None)
