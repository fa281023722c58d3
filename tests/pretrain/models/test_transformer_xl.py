"""Transformer-XL's attention and recurrence equal the formulas of arXiv 1901.02860 in float64, by loops."""

import math
from dataclasses import replace

import pytest
import torch
from compare import assert_close
from engines import engine_of
from forks import only
from torch import Tensor
from torch.nn import functional as F

from fmoe.errors import UserError
from fmoe.kernels.attention import relative_shift, sinusoids
from pretrain.config import (
    AttentionConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    PositionConfig,
    Recipe,
    TrainConfig,
)

HEADS = 4
GROUPS = 2
WIDTH = 6
HIDDEN = 16
LENGTH = 5
VOCAB = 32
BATCH = 3
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=HIDDEN,
    ffn_hidden_size=24,
    sequence_length=LENGTH,
    vocab_size=VOCAB,
    norm="rms",
    init_std=0.5,
    attention=AttentionConfig(num_heads=HEADS, num_query_groups=GROUPS, head_dim=WIDTH),
    position=PositionConfig(encoding="transformer_xl", memory_length=7),
    moe=MoEConfig(num_experts=0),
)


def encoding(distance: int) -> Tensor:
    """Sines and cosines of one distance."""
    angles = [distance / 10000 ** (2 * i / HIDDEN) for i in range(HIDDEN // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def attend(w: dict[str, Tensor], past: Tensor, x: Tensor) -> Tensor:
    """Attention of one sequence, [s, h], to the memory [m, h] and itself, pair by pair of query and key."""
    attention = "self_attention."
    weight = w["input_layernorm.weight"]
    states = norm(torch.cat([past, x]), weight)
    # Per group of heads: the rows of its queries, then those of its key, then those of its value.
    rows = w[f"{attention}linear_qkv.weight"].view(GROUPS, HEADS // GROUPS + 2, WIDTH, HIDDEN)
    u, v = (w[f"{attention}biases.{name}"].view(HEADS, WIDTH) for name in ("content", "position"))
    project = w[f"{attention}linear_position.weight"].view(HEADS, WIDTH, HIDDEN)
    outputs = []
    for i in range(len(x)):
        heads = []
        for head in range(HEADS):
            group, query = divmod(head, HEADS // GROUPS)
            q = rows[group, query] @ states[len(past) + i]
            scores = []
            values = []
            for j in range(len(past) + i + 1):
                k = rows[group, -2] @ states[j]
                r = project[head] @ encoding(len(past) + i - j)
                # (a), (b), (c) and (d) of section 3.3
                scores.append((q @ k + q @ r + u[head] @ k + v[head] @ r) / math.sqrt(WIDTH))
                values.append(rows[group, -1] @ states[j])
            weights = torch.stack(scores).softmax(0)
            heads.append(sum(p * value for p, value in zip(weights, values, strict=True)))
        outputs.append(w[f"{attention}linear_proj.weight"] @ torch.cat(heads))
    return torch.stack(outputs)


def forward(w: dict[str, Tensor], past: list[Tensor], tokens: Tensor, length: int) -> tuple[Tensor, list[Tensor]]:
    """Logits [s, v] of one segment, and the memory of each layer for the next one."""
    embedding = w["embedding.word_embeddings.weight"]
    x = embedding[tokens]
    present = []
    for number in range(MODEL.num_layers):
        prefix = f"decoder.layers.{number}."
        layer = {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}
        present.append(torch.cat([past[number], x]).detach()[-length:])
        x = x + attend(layer, past[number], x)
        hidden = F.gelu(norm(x, layer["pre_mlp_layernorm.weight"]) @ layer["mlp.linear_fc1.weight"].t())
        x = x + hidden @ layer["mlp.linear_fc2.weight"].t()
    return norm(x, w["decoder.final_layernorm.weight"]) @ embedding.t(), present


def stream(n: int, count: int) -> Tensor:
    return torch.as_tensor([(7 * n + i * (i + n) + 3) % VOCAB for i in range(count)])


class Segments:
    """Sample n: segment n // BATCH of stream n % BATCH."""

    samples_per_epoch = 4 * BATCH

    def __getitem__(self, n: int) -> dict:
        number = n % BATCH
        segment = n // BATCH % 4
        tokens = stream(number, 4 * LENGTH + 1)[segment * LENGTH : (segment + 1) * LENGTH + 1].numpy()
        return {"tokens": tokens[:-1], "labels": tokens[1:], "starts": torch.tensor([int(segment == 0)]).numpy()}


def gradients(recipe: Recipe, steps: int) -> tuple[dict[str, Tensor], list[tuple[float, dict[str, Tensor]]]]:
    """The weights, and the loss and gradients of each step, without updates."""
    engine = engine_of(recipe)
    named = dict(engine.gpt.named_parameters())
    found = []
    for step in range(steps):
        loss = engine.backward(step, Segments())
        found.append((float(loss), {name: p.main_grad.clone() for name, p in named.items()}))
    return {name: p.detach().clone() for name, p in named.items()}, found


def test_the_shift_is_that_of_a_loop():
    scores = torch.randn(2, 4, 9)
    shifted = relative_shift(scores)
    for i in range(4):
        for j in range(5 + i + 1):
            assert torch.equal(shifted[:, i, j], scores[:, i, 8 - (5 + i - j)])


def test_sinusoids_are_those_of_the_distances():
    expected = torch.stack([encoding(distance) for distance in reversed(range(40))])
    assert_close(sinusoids(40, HIDDEN, "cpu").double(), expected, 1e-6, "encodings")


@pytest.mark.by_default("none")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_loss_and_gradients_of_four_segments_are_those_of_the_paper(forks, recompute):
    """The memory, of 7 states, holds parts of two segments of 5; the fifth step begins the streams anew."""
    train = TrainConfig(steps=8, global_batch=BATCH, micro_batch=1, validation_sequences=BATCH)
    recipe = Recipe(model=MODEL, train=train, optimizer=OptimizerConfig(warmup_steps=0))
    recipe = replace(recipe, parallel=replace(recipe.parallel, recompute=recompute))
    weights, found = only(forks.run(1, gradients, recipe, 5))
    memory = {}
    for step, (loss, ours) in enumerate(found):
        w = {name: value.double().requires_grad_() for name, value in weights.items()}
        total = torch.zeros((), dtype=torch.float64)
        for n in range(BATCH):
            past = memory[n] if step % 4 else [torch.zeros(0, HIDDEN, dtype=torch.float64)] * MODEL.num_layers
            sample = Segments()[step * BATCH + n]
            logits, memory[n] = forward(w, past, torch.as_tensor(sample["tokens"]), MODEL.position.memory_length)
            total = total + F.cross_entropy(logits, torch.as_tensor(sample["labels"])) / BATCH
        total.backward()
        assert loss == pytest.approx(total.item(), rel=1e-6), step
        assert w.keys() == ours.keys()
        for name, value in w.items():
            assert value.grad.norm() > 0, name
            assert_close(ours[name].double(), value.grad, 1e-5, f"{name} of step {step}")
    assert found[0][0] == found[4][0] != found[1][0]


def cached(segment: int, memory_length: int) -> dict:
    """A model's weights; evaluation of a stream in windows of `LENGTH`; logits of a decoder, whose prompt is a segment
    of ``segment`` tokens."""
    from pretrain.inference.decoding import MemoryDecoder
    from pretrain.inference.evaluation import evaluate
    from pretrain.inference.windows import gpt_windows

    train = TrainConfig(steps=1, global_batch=BATCH, micro_batch=BATCH, validation_sequences=BATCH)
    recipe = Recipe(model=MODEL, train=train, optimizer=OptimizerConfig(warmup_steps=0))
    model = engine_of(recipe).gpt.eval()
    tokens = stream(5, TEXT).numpy()
    windows = [block for block, _ in gpt_windows([tokens], 0, LENGTH, LENGTH)]
    lengths = torch.arange(VOCAB).numpy()
    result = evaluate(model, recipe, windows, memory_length=memory_length, byte_lengths=lengths)
    # As validation is read, beyond the end of the streams; the last micro batch is shorter.
    sides = [Segments()[n] for n in range(6 * BATCH - 1)]
    side_by_side = evaluate(model, recipe, sides, streams=BATCH)
    with torch.no_grad():
        decoder = MemoryDecoder(model, memory_length)
        decoded = [decoder(torch.as_tensor(tokens[None, :count])) for count in range(segment, TEXT + 1)]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"result": result, "sides": side_by_side, "decoded": torch.cat(decoded), "weights": weights}


TEXT = 23  # tokens: the last window is shorter


@pytest.mark.by_default("7")
@pytest.mark.parametrize("memory_length", [7, 12])
def test_cached_evaluation_and_decoding_are_those_of_the_paper(forks, memory_length):
    segment = 6
    found = only(forks.run(1, cached, segment, memory_length))
    w = {name: value.double() for name, value in found["weights"].items()}
    nothing = [torch.zeros(0, HIDDEN, dtype=torch.float64)] * MODEL.num_layers
    text = stream(5, TEXT)
    tokens = torch.cat([torch.zeros(1, dtype=torch.int64), text])
    nats = 0.0
    past = nothing
    for begin in range(0, TEXT, LENGTH):
        block = tokens[begin : begin + LENGTH + 1]
        logits, past = forward(w, past, block[:-1], memory_length)
        nats += F.cross_entropy(logits, block[1:], reduction="sum").item()
    result = found["result"]
    assert result.tokens == TEXT and result.nats == pytest.approx(nats, rel=1e-6)
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / int(text.sum()), rel=1e-6)
    nats = 0.0
    past = {}
    for n in range(6 * BATCH - 1):
        sample = Segments()[n]
        before = past[n % BATCH] if n // BATCH % 4 else nothing
        logits, past[n % BATCH] = forward(w, before, torch.as_tensor(sample["tokens"]), MODEL.position.memory_length)
        nats += F.cross_entropy(logits, torch.as_tensor(sample["labels"]), reduction="sum").item()
    assert found["sides"].nats == pytest.approx(nats, rel=1e-6)
    logits, past = forward(w, nothing, text[:segment], memory_length)
    expected = [logits[-1]]
    for token in text[segment:]:
        logits, past = forward(w, past, token.view(1), memory_length)
        expected.append(logits[-1])
    assert_close(found["decoded"].double(), torch.stack(expected), 1e-5, "logits")


def masked() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a block of two documents that do not see each other, and of each document alone."""
    from pretrain.models.gpt import forward

    recipe = Recipe(model=MODEL.with_values({"position.memory_length": 0}), optimizer=OptimizerConfig(warmup_steps=0))
    recipe = replace(recipe, data=replace(recipe.data, document_mask=True))
    model = engine_of(recipe).gpt.eval()
    for name in ("packed_seq_params", "rotary_pos_emb"):
        with pytest.raises(UserError, match=name):
            model.decoder.layers[0].self_attention(torch.zeros(3, 1, HIDDEN), **{name: torch.zeros(3)})
    tokens = stream(2, 11)[None]
    with torch.no_grad():
        both = forward(model, {"tokens": tokens, "documents": torch.tensor([[0] * 4 + [1] * 7])})
        return both, forward(model, {"tokens": tokens[:, :4]}), forward(model, {"tokens": tokens[:, 4:]})


def test_documents_of_a_block_do_not_see_each_other(forks):
    both, first, second = only(forks.run(1, masked))
    assert_close(both, torch.cat([first, second], dim=1), 1e-6, "logits")
