"""Encoders for masked language modelling: Megatron-core's BERT with one segment, without next sentence prediction."""

import copy
from typing import Any

import numpy as np
import torch
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from torch import Tensor, nn

from fmoe import random
from megatron_patch.attention import SDPAttention
from megatron_patch.initialization import key_output_layer, keyed_layer_spec
from pretrain.config import Recipe
from pretrain.data.masking import Masking
from pretrain.data.samples import TokenBlocks
from pretrain.data.tokenizers import Tokenizer
from pretrain.models.batch import Batch, other_document
from pretrain.models.config import own_norms, set_rope_theta, transformer_config


class UnpaddedBert(BertModel):
    """`BertModel` for sequences without padding.

    They need no mask, which allows the fused attention kernel. If the model has a segment embedding, tokens are of
    segment 0 by default.
    """

    # Megatron-core would treat any attention module but its own as Transformer Engine's, and require a mask.
    def _sanity_check_attention_and_get_attn_mask_dimension(self) -> str:
        return "b1ss"

    def bert_extended_attention_mask(self, attention_mask: Tensor | None) -> Tensor | None:
        return attention_mask  # of `other_document`

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None, tokentype_ids: Tensor | None = None, **options):
        if tokentype_ids is None and self.pre_process and self.embedding.num_tokentypes:
            tokentype_ids = torch.zeros_like(input_ids)
        return super().forward(input_ids, attention_mask, tokentype_ids, **options)


def build(recipe: Recipe, **stage: Any) -> BertModel:
    """Build a BERT; see `pretrain.models`."""
    model = recipe.model
    spec = copy.deepcopy(bert_layer_local_spec)
    spec.submodules.self_attention.submodules.core_attention = SDPAttention
    own_norms(spec, model)
    seed = recipe.train.seed
    with random.keyed("embedding", seed):
        module = UnpaddedBert(
            transformer_config(recipe),
            model.segment_types,
            keyed_layer_spec(spec, seed, without_mlp=model.layers_with_experts),
            vocab_size=model.vocab_size,
            max_sequence_length=model.sequence_length,
            share_embeddings_and_output_weights=model.tie_embeddings,
            position_embedding_type=model.position.encoding,
            add_binary_head=False,
            **stage,
        )
    set_rope_theta(module, recipe)
    if module.post_process:
        with random.keyed("head", seed), torch.no_grad():
            module.config.init_method(module.lm_head.dense.weight)
    key_output_layer(module, seed)
    return module


def forward(model: nn.Module, batch: Batch) -> Tensor:
    """Run a BERT on a micro batch; see `pretrain.models`."""
    documents = batch.get("documents")  # of a registered source
    mask = None if documents is None else other_document(documents, documents)
    output = model(batch["tokens"], mask, lm_labels=batch.get("labels"))
    # The last stage returns losses or logits, and the output of an unused binary head.
    return output[0] if isinstance(output, tuple) else output


def block_length(recipe: Recipe) -> int:
    """Return the tokens of text of a sample, all but CLS and SEP; see `pretrain.models`."""
    return recipe.model.sequence_length - 2


def samples(recipe: Recipe, blocks: TokenBlocks, tokenizer: Tokenizer, seed: int, length: int) -> Masking:
    """Return the samples of a BERT; see `pretrain.models`."""
    return Masking(
        blocks,
        length + 2,
        recipe.data.noise_density,
        cls=tokenizer.role("cls"),
        sep=tokenizer.role("sep"),
        mask=tokenizer.role("mask"),
        end=tokenizer.end_of_document,
        text=np.array(sorted(set(range(tokenizer.vocab_size)) - tokenizer.special_ids), dtype=np.int64),
        seed=seed,
    )
