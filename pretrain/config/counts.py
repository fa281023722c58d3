"""Parameters and floating point operations of a model, computed without building it.

Symbols: h is the hidden size, s the tokens per sequence (in a T5's encoder), t the tokens in a T5's decoder.
"""

from pretrain.config.model import ModelConfig

# Number of router matrices [num_experts, h] by gate; 1 for gates that are not listed.
_ROUTER_MATRICES = {"hash": 0, "random": 0, "zero": 0, "noisy": 2}


def num_params(model: ModelConfig, experts: int, decoder_length: int = 0) -> int:
    """Return the number of parameters, with ``experts`` routed experts and all shared ones in each layer with experts.

    Args:
        decoder_length: t; learned positions cover the longer of the two sequences.
    """
    width = model.hidden_size
    total = model.vocab_size * width
    total += sum(_matrices(model, number, experts) + _norms(model, number) for number in model.layer_numbers)
    if model.position == "learned_absolute":
        total += max(model.sequence_length, decoder_length) * width
    total += _norm(model, width) * (2 if model.kind == "t5" else 1)  # the final norm of each stack
    total += 0 if model.tie_embeddings else model.vocab_size * width
    if model.kind == "bert":  # a linear map and a norm before the output matrix, and the output bias
        total += width * width + width + _norm(model, width) + model.vocab_size
    if model.kind == "t5" and model.tie_embeddings:
        total += model.vocab_size
    return total


def flops_per_token(model: ModelConfig, decoder_length: int = 0) -> float:
    """Return the floating point operations per token of a training step, forward and backward.

    Counts 6 operations for each active matrix parameter, and adds those of the attention scores, without recomputation
    (PaLM, arXiv 2204.02311 appendix B). Embeddings, positions, norms and biases are not counted. For a T5, returns the
    mean over the tokens of both stacks."""
    width, length = model.hidden_size, model.sequence_length
    heads = model.num_heads * model.head_width
    layers = [_matrices(model, number, model.top_k) for number in model.layer_numbers]
    output = model.vocab_size * width + (width * width if model.kind == "bert" else 0)
    if model.kind != "t5":
        return 6.0 * (sum(layers) + output) + 12.0 * model.num_layers * heads * length
    encoder, decoder = sum(layers[: model.num_layers]), sum(layers[model.num_layers :])
    keys_and_values = model.decoder_layers * 2 * width * heads  # of the encoder's output
    flops = 6.0 * ((encoder + keys_and_values) * length + (decoder - keys_and_values + output) * decoder_length)
    scores = model.num_layers * length * length + model.decoder_layers * decoder_length * (decoder_length + length)
    return (flops + 12.0 * heads * scores) / (length + decoder_length)


def _matrices(model: ModelConfig, number: int, experts: int) -> int:
    """Return the number of matrix parameters of a layer."""
    width, head = model.hidden_size, model.head_width
    # Queries and output, keys and values; a decoder also attends to the encoder's output.
    attention = 2 * width * head * (model.num_heads + model.query_groups)
    if _is_decoder(model, number):
        attention += 4 * width * head * model.num_heads
    of_hidden_unit = (3 if model.gated else 2) * width
    if number not in model.layers_with_experts:
        return attention + of_hidden_unit * model.dense_width
    router = _ROUTER_MATRICES.get(model.gate, 1) * model.num_experts * width
    return attention + (experts + model.num_shared_experts) * of_hidden_unit * model.ffn_hidden_size + router


def _norms(model: ModelConfig, number: int) -> int:
    """Return the number of norm parameters of a layer: one norm per block, plus query and key norms."""
    total = (3 if _is_decoder(model, number) else 2) * _norm(model, model.hidden_size)
    return total + (2 * _norm(model, model.head_width) if model.qk_norm else 0)


def _norm(model: ModelConfig, width: int) -> int:
    return width if model.norm == "rms" else 2 * width


def _is_decoder(model: ModelConfig, number: int) -> bool:
    return model.kind == "t5" and number > model.num_layers
