"""Parameters and floating point operations of a model by arithmetic alone, without building it.

Width h, sequences of s tokens; of a T5, s tokens into the encoder and t into the decoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretrain.config.model import ModelConfig


def num_params(model: ModelConfig, experts: int, decoder_length: int = 0) -> int:
    """Parameters, of a layer's experts those of ``experts`` only.

    Args:
        decoder_length: t; learned positions are as many as the longer of the two sequences.
    """
    width = model.hidden_size
    total = model.vocab_size * width + sum(_layer(model, number, experts) for number in model.layer_numbers)
    if model.position == "learned_absolute":
        total += max(model.sequence_length, decoder_length) * width
    total += 2 * width * (2 if model.kind == "t5" else 1)  # the last norm of a stack
    return total + _head(model) + (0 if model.tie_embeddings else model.vocab_size * width)


def flops_per_token(model: ModelConfig, decoder_length: int = 0) -> float:
    """Floating point operations of a training step per token, forward and backward: 6 for each active parameter that
    is a matrix, and the attention scores (PaLM, arXiv 2204.02311 appendix B; recomputation not counted). Of a T5, of a
    token that goes into either stack, on average."""
    width, length = model.hidden_size, model.sequence_length
    head = model.vocab_size * width + _head(model)
    if model.kind != "t5":
        matrices = sum(_layer(model, number, model.top_k) for number in model.layer_numbers) + 2 * width + head
        matrices += length * width if model.position == "learned_absolute" else 0
        return 6.0 * matrices + 12.0 * model.num_layers * width * length
    encoder = sum(_layer(model, number, model.top_k) for number in model.layer_numbers[: model.num_layers])
    decoder = sum(_layer(model, number, model.top_k) for number in model.layer_numbers[model.num_layers :])
    keys_and_values = model.decoder_layers * 2 * width * width  # of the encoder's output
    flops = 6.0 * ((encoder + keys_and_values) * length + (decoder - keys_and_values + head) * decoder_length)
    scores = model.num_layers * length * length + model.decoder_layers * decoder_length * (decoder_length + length)
    return (flops + 12.0 * width * scores) / (length + decoder_length)


def _layer(model: ModelConfig, number: int, experts: int) -> int:
    width = model.hidden_size
    ffn = (3 if model.gated else 2) * width * model.ffn_hidden_size
    if number in model.layers_with_experts:
        ffn = experts * ffn + model.num_experts * width
    is_decoder = model.kind == "t5" and number > model.num_layers
    # Query, key, value, output; a norm of weight and bias before each block.
    return ffn + (2 if is_decoder else 1) * 4 * width * width + (3 if is_decoder else 2) * 2 * width


def _head(model: ModelConfig) -> int:
    """Between the last norm and the output matrix, and the output's bias."""
    width = model.hidden_size
    if model.kind == "bert":
        return width * width + width + 2 * width + model.vocab_size
    return model.vocab_size if model.kind == "t5" and model.tie_embeddings else 0
