"""Decoding token by token against full forward passes of the same model, and evaluation against a loop."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from forks import only
from model_kinds import KINDS, recipe_of, samples_of

from fmoe import metrics
from pretrain.config import AttentionConfig, ModelConfig, MoEConfig, Recipe

LENGTH, VOCAB, END = 16, 64, 3
GPT = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=24,
    sequence_length=LENGTH,
    vocab_size=VOCAB,
    dropout=0.2,
    init_std=0.3,
    attention=AttentionConfig(num_heads=2),
    moe=MoEConfig(num_experts=4, top_k=2, gate="switch", eval_capacity_factor=0.5, jitter=0.3),
)
YARN = {
    "position.rope_scaling": "yarn",
    "position.rope_factor": 4.0,
    "position.rope_original_length": 8,
    "position.rope_mscale_all_dim": 0.5,
}
MODELS = {
    "switch": {},
    "learned positions, some layers": {"position.encoding": "learned_absolute", "moe.layers": (2,)},
    "gshard": {"moe.gate": "gshard", "tie_embeddings": False, "gated": True},
    "sigmoid": {"moe.gate": "sigmoid", "moe.eval_capacity_factor": None},
    "sinkhorn, groups": {"moe.gate": "sinkhorn", "moe.group_size": 5},
    "dense": {"moe.num_experts": 0, "moe.top_k": 1},
    "modern": {
        "norm": "rms",
        "attention.num_heads": 4,
        "attention.num_query_groups": 2,
        "attention.head_dim": 12,
        "attention.qk_norm": True,
        "position.rope_theta": 1e6,
        "moe.num_shared_experts": 1,
        "moe.gate": "sigmoid",
        "gated": True,
        "activation": "silu",
    },
    "scales, gated shared expert": {
        "norm": "rms",
        "attention.num_heads": 4,
        "attention.num_query_groups": 2,
        "attention.qk_norm": True,
        "attention.qk_norm_over": "all",
        "attention.qkv_bias": True,
        "attention.output_bias": True,
        "output_bias": True,
        "attention.scale": 0.2,
        "embedding_scale": 3.0,
        "residual_scale": 0.4,
        "logit_divisor": 2.0,
        "tie_embeddings": False,
        "moe.num_shared_experts": 1,
        "moe.shared_ffn_hidden_size": 20,
        "moe.shared_expert_gate": True,
    },
    "windows, sinks and biases": {
        "norm": "rms",
        "attention.num_heads": 4,
        "attention.num_query_groups": 2,
        "attention.qkv_bias": True,
        "attention.output_bias": True,
        "attention.sinks": True,
        "attention.sliding_window": 5,
        "attention.sliding_layers": (1,),
        "attention.sliding_stride": 3,
        "moe.gate": "naive",
        "moe.gate_options": {"bias": True},
        "moe.expert_options": {"bias": True},
        "activation": "swiglu_oai",
        "gated": True,
    },
    "latent attention": {
        "norm": "rms",
        "attention.kv_lora_rank": 12,
        "attention.q_lora_rank": 20,
        "attention.qk_head_dim": 10,
        "attention.qk_rope_head_dim": 6,
        "attention.v_head_dim": 7,
        "moe.num_shared_experts": 1,
    },
    "yarn": YARN | {"attention.num_heads": 4, "position.rotary_fraction": 0.5, "position.rope_theta": 100.0},
    "latent attention, yarn": YARN
    | {
        "norm": "rms",
        "attention.kv_lora_rank": 12,
        "attention.qk_head_dim": 10,
        "attention.qk_rope_head_dim": 6,
        "attention.v_head_dim": 7,
    }
    | {"tie_embeddings": False},
}


def start():
    from megatron_patch import cpu
    from pretrain.engine import init_parallel

    cpu.install()
    init_parallel(Recipe())


def model_of(recipe, *, drops=False):
    from pretrain.engine.model import build_model
    from pretrain.models.config import DTYPES

    if not drops:
        recipe = replace(recipe, model=recipe.model.with_values({"moe.eval_capacity_factor": None}))
    return build_model(recipe).to(DTYPES[recipe.train.precision]).eval().requires_grad_(False)


def full_logits(model, tokens):
    """Return the logits of the token after ``tokens``, from one pass over all of them."""
    tokens = torch.tensor([tokens])
    return model(tokens, torch.arange(tokens.shape[1]).unsqueeze(0), None)[0, -1]


def greedy(decoder, prompt, count):
    from pretrain.inference.decoding import generate
    from pretrain.inference.sampling import Sampling

    options = {"max_tokens": count, "end": END, "vocab_size": VOCAB}
    return [token for (token,) in generate(decoder, prompt, Sampling(0), **options)]


def compare_decoders(options):
    """Worst difference of the logits from those of full passes, and tokens of three ways to decode."""
    from pretrain.inference.decoding import GPTDecoder, window

    start()
    recipe = Recipe(model=GPT.with_values(options))
    model = model_of(recipe)
    before = torch.get_rng_state()
    rng = np.random.default_rng(0)
    text = rng.integers(4, VOCAB, 45).tolist()
    worst = 0.0
    for decoder in (GPTDecoder(model, LENGTH), GPTDecoder(model, LENGTH, keeps=False)):
        for count in [5, *range(6, 36)]:  # a prompt at once, the rest one by one
            found = decoder(torch.tensor([text[:count], text[:count]]))
            expected = full_logits(model, text[window(count, LENGTH) : count])
            assert found.shape == (2, VOCAB) and found.dtype == torch.float32
            worst = max(worst, *((row - expected).norm().item() / expected.norm().item() for row in found))
    prompt, sequence = text[:7], text[:7]
    for _ in range(20):
        sequence = [*sequence, int(full_logits(model, sequence[window(len(sequence), LENGTH) :]).argmax())]
        if sequence[-1] == END:
            break
    ways = [greedy(GPTDecoder(model, LENGTH, keeps=keeps), prompt, 20) for keeps in (True, False)]
    counted = [report.tokens for report in metrics(model).values()]
    return worst, sequence[7:], ways, counted, bool((torch.get_rng_state() == before).all())


@pytest.mark.by_default("learned positions, some layers", "modern", "latent attention")
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_full_passes_in_which_nothing_is_dropped(forks, name):
    worst, expected, ways, counted, is_untouched = only(forks.run(1, compare_decoders, MODELS[name]))
    assert worst < 2e-5
    assert ways == [expected, expected]
    assert len(set(expected)) > 1
    assert not any(counted), "generation was counted as if it were training"
    assert is_untouched, "noise was drawn"


def test_windows():
    from pretrain.inference.decoding import window

    begins = [window(count, 16) for count in range(1, 60)]
    assert begins[:16] == [0] * 16 and begins[16:20] == [2, 2, 4, 4]
    for count, begin in enumerate(begins, start=1):
        assert count - 16 <= begin <= max(count - 14, 0)
    assert [window(count, 1) for count in (1, 2, 3)] == [0, 1, 2]


def several(_):
    from pretrain.inference.decoding import GPTDecoder, generate
    from pretrain.inference.sampling import Sampling

    start()
    model = model_of(Recipe(model=GPT))

    def drawn(count, **options):
        options = {"max_tokens": 25, "end": END, "vocab_size": VOCAB, "num_samples": count} | options
        decoder = GPTDecoder(model, LENGTH)
        return list(zip(*generate(decoder, [9, 8, 7], Sampling(1.5, seed=4), **options), strict=True))

    alone = drawn(1)
    return drawn(6), drawn(6), alone, drawn(3, vocab_size=5), drawn(2, max_tokens=2)


def test_samples_stop_by_themselves_and_do_not_depend_on_each_other(forks):
    first, second, alone, small, short = only(forks.run(1, several, None))
    assert first == second and first[0][: len(alone[0])] == alone[0]
    assert len(set(first)) == 6
    for sample in first + small:
        if END in sample:
            assert set(sample[sample.index(END) + 1 :]) <= {None}
        else:
            assert None not in sample and len(sample) == 25
    assert all(END in sample for sample in small), "of 5 tokens one in some is the end"
    assert max(token for sample in small for token in sample if token is not None) < 5
    assert [len(sample) for sample in short] == [2, 2]


def t5_steps(_):
    from pretrain.inference.decoding import T5Decoder

    start()
    recipe = recipe_of("t5")
    model = model_of(recipe)
    tokens = torch.from_numpy(samples_of(recipe)[0]["tokens"])
    expected_inputs = samples_of(recipe)[0]["decoder_tokens"].tolist()
    decoder = T5Decoder(model, tokens[None], 2)
    worst = 0.0
    for count in range(1, len(expected_inputs) + 1):
        ids = torch.tensor([expected_inputs[:count]])
        expected = model(tokens.unsqueeze(0), ids, None, None, None)[0, -1]
        for row in decoder(ids.expand(2, -1)):
            worst = max(worst, (row - expected).norm().item() / expected.norm().item())
    flipped = T5Decoder(model, tokens.flip(0)[None], 1)(ids)[0]
    return worst, (flipped - row).norm().item() / row.norm().item()


def test_a_t5_decodes_what_a_full_pass_gives(forks):
    worst, change = only(forks.run(1, t5_steps, None))
    assert worst < 2e-5
    assert change > 1e-3, "the encoder's output is not looked at"


def refusal(gate, weight):
    from fmoe import UserError
    from pretrain.inference.decoding import GPTDecoder

    start()
    model = model_of(Recipe(model=GPT.with_values({"moe.gate": gate, "moe.eval_capacity_factor": None})))
    model.decoder.final_layernorm.weight[0] = weight
    try:
        greedy(GPTDecoder(model, LENGTH), [5], 1)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    ("gate", "weight", "message"),
    [("expert_choice", 1.0, "moe.gate=expert_choice"), ("switch", math.nan, "logits are not finite")],
)
def test_models_that_cannot_generate(forks, gate, weight, message):
    assert message in only(forks.run(1, refusal, gate, weight))


def by_hand(kind, precision):
    """An evaluation, and the same by a loop over single tokens in float64."""
    from pretrain.inference.evaluation import evaluate
    from pretrain.models import kind_of
    from pretrain.models.batch import collate

    start()
    recipe = recipe_of(kind)
    recipe = replace(recipe, train=replace(recipe.train, micro_batch=4, precision=precision))
    model, source = model_of(recipe, drops=True), samples_of(recipe)
    samples = [source[n] for n in range(7)]
    lengths = np.random.default_rng(1).integers(0, 5, VOCAB)
    found = evaluate(model, recipe, samples, byte_lengths=lengths)
    nats, tokens, correct, num_bytes = 0.0, 0, 0, 0
    for sample in samples:
        batch = collate([sample])
        labels, mask = batch.pop("labels")[0].tolist(), batch.pop("loss_mask", None)
        logits = kind_of(recipe).forward(model, batch)[0].double()
        for place, label in enumerate(labels):
            if mask is None or mask[0, place]:
                row = logits[place].tolist()
                highest = max(row)
                nats += highest + math.log(sum(math.exp(x - highest) for x in row)) - row[label]
                tokens, correct = tokens + 1, correct + (row.index(highest) == label)
                num_bytes += int(lengths[label])
    return found, (nats, tokens, correct, num_bytes), {m.training for m in model.modules()}, metrics(model)


@pytest.mark.cover(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_figures_are_those_of_a_loop(forks, kind, precision):
    found, (nats, tokens, correct, num_bytes), modes, after = only(forks.run(1, by_hand, kind, precision))
    # In bf16, the rounding of matrix products depends on the micro batch.
    assert found.loss == pytest.approx(nats / tokens, rel=2e-6 if precision == "fp32" else 2e-3)
    assert (found.tokens, found.bytes, found.sequences) == (tokens, num_bytes, 7)
    assert abs(found.correct - correct) <= (0 if precision == "fp32" else 1)
    assert found.accuracy == found.correct / tokens
    assert found.perplexity == pytest.approx(math.exp(nats / tokens), rel=5e-2 if precision == "bf16" else 1e-4)
    assert found.bits_per_byte == pytest.approx(found.nats / math.log(2) / num_bytes)
    assert modes == {False}
    assert sorted(found.layers) == list(recipe_of(kind).model.layers_with_experts)
    for layer in found.layers.values():
        assert sum(layer.load) == pytest.approx(1) and layer.tokens > 0 and layer.entropy > 0
    assert not any(report.tokens for report in after.values())


def dropped(_):
    """Return the drops that evaluation counts, and those of a gate in each pass."""
    from pretrain.inference.evaluation import evaluate

    start()
    recipe = Recipe(model=GPT)
    model = model_of(recipe, drops=True)
    routings = []
    layer = model.decoder.layers[1].mlp
    layer.gate.register_forward_hook(lambda module, inputs, routing: routings.append(routing.expert_TK))
    samples = [(np.arange(LENGTH + 1) * (1 + n % 3) + 5 * n) % VOCAB for n in range(10)]
    found = evaluate(model, recipe, samples)
    return found.layers[2], torch.cat(routings)


def test_drops_and_loads_are_what_the_gates_decided(forks):
    report, expert_TK = only(forks.run(1, dropped, None))
    assert report.tokens == 10 * LENGTH and 0.3 < report.drop_rate < 1
    assert report.drop_rate == pytest.approx((expert_TK < 0).float().mean().item())
    load = torch.bincount(expert_TK[expert_TK >= 0], minlength=4).float()
    assert report.load == pytest.approx((load / load.sum()).tolist())
