"""Dropout keyed by token and feature, which drops the same elements however a job is split.

Megatron-core draws from a generator. Its dropout therefore depends on the shape of the micro batch and on the number of
tensor parallel ranks. Here each decision is a hash of (seed, step, layer, site, token, feature) (`fmoe.random`). It
does not depend on micro batches, ranks, pipeline stages or recomputation.

Shape letters: S sequence length on this rank, B sequences, H hidden size, A heads on this rank, K keys.
"""

from collections.abc import Callable

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from fmoe import random


class TokenDropout(nn.Dropout):
    """Dropout of hidden states [S, B, H]; under sequence and context parallelism, S is a slice of each sequence.

    A hash of seed, step, module, token and feature decides whether an element is dropped.

    Args:
        rate: probability of dropping an element.
        site: hash of the run's seed and of this module's position in the model (`fmoe.random.key`).
        is_sliced: True if tensor parallel ranks hold slices of the sequences. Context parallel ranks always do.

    Attributes:
        part: name that distinguishes the calls of a module that runs several times per micro batch.
    """

    def __init__(self, rate: float, site: int, is_sliced: bool = False):
        super().__init__(rate)
        self.site = site
        self.is_sliced = is_sliced
        self.part = ""

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.p):
            return x
        keys = self.keys(x)
        dropped = random.dropped(keys.flatten(), x.shape[-1], self.p).view(x.shape)
        return x.masked_fill(dropped, 0).mul_(1 / (1 - random.drop_rate(self.p)))

    def keys(self, x_SBH: Tensor) -> Tensor:
        """Return a hash of each token, int64 [S, B]. It determines which features of the token are dropped."""
        length, batch, _ = x_SBH.shape
        ranks, rank = _tensor_parallel() if self.is_sliced else (1, 0)
        slices, number = _context_parallel()
        begin = (rank + ranks * number) * length
        return self.token_keys(range(begin, begin + length), ranks * slices * length, batch, x_SBH.device).t()

    def token_keys(self, positions: range, length: int, batch: int, device: torch.device) -> Tensor:
        """Return a hash of each token at ``positions`` in each sequence.

        Args:
            length: number of tokens in a whole sequence.
            batch: number of sequences.

        Returns:
            int64 [batch, len(positions)].
        """
        sequences = torch.arange(batch, dtype=torch.int64, device=device).unsqueeze(1) * length + random.first_token()
        tokens = sequences + torch.arange(positions.start, positions.stop, dtype=torch.int64, device=device)
        return random.fold(random.derive(random.noise_key(self.site), f"dropout {self.part}", device), tokens)


class HeadDropout(TokenDropout):
    """Dropout of attention probabilities [B, A, S, K]; each decision depends on query token, head and key position."""

    def keys(self, x_BASK: Tensor) -> Tensor:
        batch, heads, length, _ = x_BASK.shape
        # Context parallel ranks hold a part of the tensor parallel rank's heads, and whole sequences.
        parts, part = _context_parallel()
        first_head = (_tensor_parallel()[1] * parts + part) * heads
        keys_BS = self.token_keys(range(length), length, batch, x_BASK.device)
        heads_A1 = torch.arange(first_head, first_head + heads, dtype=torch.int64, device=x_BASK.device).unsqueeze(1)
        return random.fold(keys_BS.unsqueeze(1), heads_A1)


class _BiasDropoutAdd:
    """Replacement for Megatron-core's `get_bias_dropout_add` that uses `TokenDropout`."""

    def __init__(self, dropout: TokenDropout):
        self.dropout = dropout

    def __call__(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        add = get_bias_dropout_add(training, fused)
        if not training:
            return add

        def drop_and_add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
            x, bias = x_with_bias
            return add((self.dropout(x if bias is None else x + bias), None), residual, 0.0)

        return drop_and_add


def key_dropout(model: nn.Module, seed: int) -> None:
    """Replace the dropout of a Megatron-core language model (embedding, attention, residual branches).

    The new dropout is `TokenDropout` and, in attention, `HeadDropout`.

    Args:
        model: the whole model, or a pipeline stage.
        seed: seed of the run.
    """
    for name, module in model.named_modules():
        stack = name.partition(".")[0]  # a T5 numbers the layers of its encoder and of its decoder from 1
        if isinstance(module, LanguageModelEmbedding):
            is_sliced = module.config.sequence_parallel
            site = random.key("dropout", seed, "embedding")
            module.embedding_dropout = TokenDropout(module.embedding_dropout.p, site, is_sliced)
        elif isinstance(module, TransformerLayer):
            _key_layer(module, seed, stack)


def _key_layer(layer: TransformerLayer, seed: int, stack: str) -> None:
    def site(name: str) -> int:
        return random.key("dropout", seed, stack, layer.layer_number, name)

    for name in ("self_attn_bda", "cross_attn_bda", "mlp_bda"):
        if getattr(layer, name) is get_bias_dropout_add:
            dropout = TokenDropout(layer.hidden_dropout, site(name), layer.config.sequence_parallel)
            setattr(layer, name, _BiasDropoutAdd(dropout))
    for name, module in layer.named_modules():
        if isinstance(module, DotProductAttention):
            module.attention_dropout = HeadDropout(module.attention_dropout.p, site(name))


def _tensor_parallel() -> tuple[int, int]:
    """Return the size of the tensor parallel group, and this rank's index in it."""
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


def _context_parallel() -> tuple[int, int]:
    """Return the size of the context parallel group, and this rank's index in it."""
    return parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
