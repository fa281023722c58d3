"""Parameters and floating point operations of a model, computed without building it."""

import itertools
import math

from pretrain.config.model import ModelConfig

_RELATIVE_BUCKETS = 32  # Megatron-core's default


def num_params(model: ModelConfig, experts: int, decoder_length: int = 0) -> int:
    """Return the number of parameters of a model with ``experts`` routed experts in each MoE layer.

    All shared experts are counted.

    Args:
        experts: number of routed experts before the split by ``moe.granularity``.
        decoder_length: tokens in a T5's decoder. Learned positions cover the longer of encoder and decoder.
    """
    if model.kind == "classifier":
        from pretrain.config import classifier  # imports transformers

        return classifier.num_params(model, experts)
    width = model.hidden_size
    total = model.vocab_size * width
    total += sum(map(sum, _layers(model, experts))) + sum(_norms(model, number) for number in model.layer_numbers)
    if model.position.encoding == "learned_absolute":
        total += max(model.sequence_length, decoder_length) * width
    if model.position.encoding == "relative":
        total += 2 * _RELATIVE_BUCKETS * model.attention.num_heads
    if model.position.encoding == "transformer_xl":  # of each layer: projection of distances, and two biases per head
        total += model.num_layers * (width + 2) * model.attention.num_heads * model.head_width
    total += _norm(model, width) * (2 if model.kind == "t5" else 1)  # the final norm of each stack
    total += model.mtp_layers * 3 * _norm(model, width)  # norms of the hidden state, the embedding and the output
    total += 0 if model.tie_embeddings else model.vocab_size * width
    if model.kind == "bert":  # a linear map and a norm before the output matrix, and the output bias
        total += width * width + width + _norm(model, width) + model.vocab_size
        total += model.segment_types * width
    total += model.vocab_size if model.output_bias else 0
    if model.kind == "t5" and model.tie_embeddings and model.tied_output_bias:
        total += model.vocab_size
    return total


def flops_per_token(model: ModelConfig, decoder_length: int = 0) -> float:
    """Return the floating point operations per token of a training step, forward and backward.

    Counts 6 operations for each active parameter of a matrix, output layer included. Adds attention's scores and
    weighted sums of values, not halved for causal masks (PaLM, arXiv 2204.02311 appendix B). Recomputation, norms,
    biases, embeddings and Transformer-XL's projection of relative positions are not counted. For a T5, returns the mean
    over the tokens of both stacks.
    """
    if model.kind == "classifier":
        from pretrain.config import classifier

        return classifier.flops_per_token(model)
    width = model.hidden_size
    length = model.sequence_length
    heads = model.attention.num_heads * (model.head_width + model.value_width)
    far = 0  # tokens that a layer with a window does not see
    if model.attention.sliding_window is not None:
        far = max(0, length - model.attention.sliding_window)
        far -= far // model.attention.sliding_stride if model.attention.sliding_stride else 0
    layers = [matrices for matrices, _ in _layers(model, model.moe.top_k)]
    output = model.vocab_size * width + (width * width if model.kind == "bert" else 0)
    if model.kind != "t5":
        depth = len(model.layer_numbers)
        scores = depth * length - len(model.layers_with_window) * far
        flops = 6.0 * (sum(layers) + (1 + model.mtp_layers) * output) + 6.0 * heads * scores
        return flops + (_relative_flops(model) if model.position.encoding == "transformer_xl" else 0)
    encoder = sum(layers[: model.num_layers])
    decoder = sum(layers[model.num_layers :])
    keys_and_values = model.decoder_layers * width * heads  # of the encoder's output
    flops = 6.0 * ((encoder + keys_and_values) * length + (decoder - keys_and_values + output) * decoder_length)
    scores = model.num_layers * length * length + model.decoder_layers * decoder_length * (decoder_length + length)
    return (flops + 6.0 * heads * scores) / (length + decoder_length)


def balanced_stages(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """Return numbers of layers of pipeline stages such that the costliest stage costs least, then the next, and so on.

    A layer costs the parameters in the matrices that a token uses, plus attention's products; the last stage has the
    output layer and the layers of multi-token prediction, too. Every stage has a layer at least.
    """
    heads = model.attention.num_heads * (model.head_width + model.value_width)
    costs = [matrices + heads * model.sequence_length for matrices, _ in _layers(model, model.moe.top_k)]
    last = (1 + model.mtp_layers) * model.vocab_size * model.hidden_size + sum(costs[model.num_layers :])
    costs = costs[: model.num_layers]
    ends = [0, *itertools.accumulate(costs)]
    # best[n]: costs in falling order, and numbers of layers, of the stages so far with the first n layers.
    best: dict[int, tuple[list[int], tuple[int, ...]]] = {0: ([], ())}
    for stage in range(stages):
        extra = last if stage == stages - 1 else 0
        found: dict[int, tuple[list[int], tuple[int, ...]]] = {}
        for begin, (before, numbers) in best.items():
            for end in range(begin + 1, model.num_layers - (stages - 1 - stage) + 1):
                candidate = sorted([*before, ends[end] - ends[begin] + extra], reverse=True), (*numbers, end - begin)
                found[end] = min(candidate, found.get(end, candidate))
        best = found
    return best[model.num_layers][1]


def _relative_flops(model: ModelConfig) -> float:
    """Return the operations per token that relative positions and memory add in a Transformer-XL."""
    memory = model.position.memory_length
    length = model.sequence_length
    width = model.head_width
    by_distance = 6.0 * model.attention.num_heads * width * (length + memory)
    by_content = 6.0 * model.attention.num_heads * (width + model.value_width) * memory
    # The memory is projected to keys and values again for each sequence, without gradient.
    projections = 4.0 * 2 * model.hidden_size * model.query_groups * width * memory / length
    return model.num_layers * (by_distance + by_content + projections)


def _layers(model: ModelConfig, experts: int) -> list[tuple[int, int]]:
    """Return two numbers for each layer: parameters in matrices, and other parameters.

    Norms and Transformer-XL's additions are not counted.

    Args:
        experts: number of routed experts before the split by ``moe.granularity``.
    """
    sparse = _experts(model, experts) if model.layers_with_experts else (0, 0)
    dense = (_block(model, model.dense_width), 0)
    biases = model.head_width * (model.attention.num_heads + 2 * model.query_groups) if model.attention.qkv_bias else 0
    biases += model.hidden_size * model.attention.output_bias + model.attention.num_heads * model.attention.sinks
    if model.linear_bias:  # of attention and the feed-forward block
        biases += (model.attention.num_heads + 2 * model.query_groups) * model.head_width
        biases += 2 * model.hidden_size + (2 if model.gated else 1) * model.dense_width
    layers = []
    for number in model.layer_numbers:
        matrices, others = sparse if number in model.layers_with_experts else dense
        # Multi-token prediction projects hidden state and embedding to the layer's input.
        projection = 2 * model.hidden_size**2 if number in model.mtp_numbers else 0
        layers.append((matrices + _attention(model, number) + projection, others + biases))
    return layers


def _experts(model: ModelConfig, experts: int) -> tuple[int, int]:
    """Return two numbers for the router and experts of one layer: parameters in matrices, and other parameters.

    All shared experts are counted.

    Args:
        experts: number of routed experts before the split by ``moe.granularity``.
    """
    from pretrain.config.layer import expert_shapes, router_shapes  # imports torch, which other commands do not need

    expert = [shape[1:] if shape[:1] == (1,) else shape for shape in expert_shapes(model)]  # without an axis of experts
    shapes = expert * (experts * model.moe.granularity) + router_shapes(model)
    matrices = sum(math.prod(shape) for shape in shapes if len(shape) > 1)
    shared, biases = _shared(model) if model.moe.num_shared_experts else (0, 0)
    return matrices + shared, sum(map(math.prod, shapes)) - matrices + biases


def _shared(model: ModelConfig) -> tuple[int, int]:
    """Return two numbers for a layer's shared experts and their gate: parameters in matrices, and biases."""
    options = model.moe.expert_options if model.moe.expert == "ffn" else {}
    rows = (1 + options.get("gated", model.gated)) * model.shared_width
    biases = rows + model.hidden_size if options.get("bias") else 0
    return model.hidden_size * (rows + model.shared_width + model.moe.shared_expert_gate), biases


def _block(model: ModelConfig, hidden: int) -> int:
    """Return the number of parameters in the matrices of a feed-forward block."""
    return (3 if model.gated else 2) * model.hidden_size * hidden


def _attention(model: ModelConfig, number: int) -> int:
    """Return the number of parameters in the matrices of layer ``number``'s attention, cross-attention included."""
    width = model.hidden_size
    head = model.head_width
    if model.attention.kv_lora_rank is not None:
        return _latent_attention(model, model.attention.kv_lora_rank)
    attention = 2 * width * head * (model.attention.num_heads + model.query_groups)
    return attention + (4 * width * head * model.attention.num_heads if _is_decoder(model, number) else 0)


def _latent_attention(model: ModelConfig, rank: int) -> int:
    """Return the number of parameters in the matrices of multi-latent attention of rank ``rank``."""
    width = model.hidden_size
    queries = model.attention.num_heads * model.head_width
    rotary = model.attention.qk_rope_head_dim or 0
    values = model.attention.num_heads * model.value_width
    ranks = model.attention.q_lora_rank
    total = width * queries if ranks is None else ranks * (width + queries)
    return (
        total
        + width * (rank + rotary)
        + rank * (queries - model.attention.num_heads * rotary + values)
        + values * width
    )


def _norms(model: ModelConfig, number: int) -> int:
    """Return the number of parameters in the norms of layer ``number``, those in its attention included."""
    total = (3 if _is_decoder(model, number) else 2) * _norm(model, model.hidden_size)
    total += sum(
        _norm(model, rank) for rank in (model.attention.kv_lora_rank, model.attention.q_lora_rank) if rank is not None
    )
    heads = 2 if model.attention.qk_norm_over == "head" else model.attention.num_heads + model.query_groups
    return total + (_norm(model, heads * model.head_width) if model.attention.qk_norm else 0)


def _norm(model: ModelConfig, width: int) -> int:
    return width if model.norm == "rms" else 2 * width


def _is_decoder(model: ModelConfig, number: int) -> bool:
    return model.kind == "t5" and number > model.num_layers
