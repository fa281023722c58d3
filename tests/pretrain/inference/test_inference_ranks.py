"""Evaluation and decoding of models that are split over ranks: the same figures and tokens as in one process."""

from dataclasses import replace

import pytest
import torch
from engines import LENGTH, Samples, Split
from forks import only, values
from model_kinds import END, KINDS, SENTINELS, recipe_of, samples_of

from pretrain.config import Recipe, TrainConfig

# Four heads and four layers: two of each are left on every rank.
SIZES = {"attention.num_heads": 4, "num_layers": 4, "moe.eval_capacity_factor": 0.6}
MODELS = {
    "gpt": {},
    "shared experts, gated": {"moe.num_shared_experts": 1, "gated": True, "tie_embeddings": False, "moe.layers": (2,)},
    "latent attention": {
        "norm": "rms",
        "attention.kv_lora_rank": 12,
        "attention.qk_head_dim": 10,
        "attention.qk_rope_head_dim": 6,
        "attention.v_head_dim": 8,
    },
    "transformer_xl": {"position.encoding": "transformer_xl", "position.memory_length": 12},
    "mtp": {"mtp_layers": 1},
}


def base(name):
    if name in KINDS:
        recipe = recipe_of(name)
        sizes = SIZES | ({"num_decoder_layers": 2} if recipe.model.kind == "t5" else {})
        return replace(recipe, model=recipe.model.with_values(sizes))
    recipe = recipe_of("documents")
    return Recipe(model=recipe.model.with_values(SIZES | MODELS[name]), train=TrainConfig(micro_batch=2))


def samples(recipe):
    """Seven sequences of one length, and a shorter one if the kind allows it: the last ranks have none."""
    source = Samples() if recipe.model.objective == "gpt" and not recipe.data.document_mask else samples_of(recipe)
    last = [source[8][: LENGTH // 2]] if isinstance(source, Samples) else []
    return [source[n] for n in range(7)] + last


def judged(recipe, streams):
    """The evaluation, and the drawn tokens of a model that generates text."""
    from megatron_patch import cpu
    from pretrain.engine import init_parallel
    from pretrain.engine.model import build_model
    from pretrain.engine.pipeline import stages
    from pretrain.inference.decoding import GPTDecoder, MemoryDecoder, T5Decoder, generate
    from pretrain.inference.evaluation import evaluate
    from pretrain.inference.sampling import Sampling

    cpu.install()
    init_parallel(recipe)

    def built(model):
        return build_model(replace(recipe, model=model), **stages(recipe.parallel)[0]).eval().requires_grad_(False)

    model = recipe.model
    lengths = torch.arange(model.vocab_size).numpy()
    found = evaluate(built(model), recipe, samples(recipe), byte_lengths=lengths, streams=streams)
    if model.kind == "bert" or recipe.data.document_mask or (model.kind == "t5" and recipe.parallel.pipeline > 1):
        return found, None
    module = built(model.with_values({"moe.eval_capacity_factor": None}))
    prompt = [9, 8, 7]
    if model.kind == "t5":
        prompt = [0]
        decoder = T5Decoder(module, torch.tensor([[15, 16, SENTINELS[0], 18, END]]), 3)
    elif model.position.memory_length:
        decoder = MemoryDecoder(module, model.position.memory_length)
    else:
        decoder = GPTDecoder(module, LENGTH)
    # More tokens than the window has.
    steps = generate(
        decoder, prompt, Sampling(1.5, seed=4), max_tokens=20, end=END, vocab_size=model.vocab_size, num_samples=3
    )
    return found, list(steps)


CASES = [
    ("gpt", "EP2"),
    ("gpt", "TP2"),
    ("gpt", "PP2"),
    ("gpt", "DP2"),
    ("gpt", "EP2 TP2 PP2"),
    ("gpt", "TP2 ETP2"),
    ("gpt", "EP4"),
    *((name, split) for name in list(MODELS)[1:] for split in ("EP2", "TP2", "PP2")),
    *((name, split) for name in KINDS for split in ("EP2", "TP2", "PP2")),
]


@pytest.mark.by_default("gpt-EP2", "gpt-TP2", "gpt-PP2", "transformer_xl-EP2", "t5-TP2", "bert-PP2")
@pytest.mark.parametrize(("name", "split"), CASES, ids=[f"{name}-{split}" for name, split in CASES])
def test_figures_and_tokens_are_those_of_one_process(forks, name, split):
    recipe = base(name)
    streams = 2 if recipe.model.position.memory_length else 1
    expected, tokens = only(forks.run(1, judged, recipe, streams))
    parallel = replace(Split.of(split).parallel, sequence=False)
    for found, drawn in values(forks.run(parallel.world_size, judged, replace(recipe, parallel=parallel), streams)):
        assert found.nats == pytest.approx(expected.nats, rel=1e-6)
        for key in ("sequences", "tokens", "correct", "bytes"):
            assert getattr(found, key) == getattr(expected, key), key
        assert found.layers.keys() == expected.layers.keys()
        for number, layer in expected.layers.items():
            assert found.layers[number].load == pytest.approx(layer.load)
            assert found.layers[number].tokens == layer.tokens > 0
            assert found.layers[number].drop_rate == pytest.approx(layer.drop_rate)
            assert found.layers[number].entropy == pytest.approx(layer.entropy, rel=1e-5)
        assert drawn == tokens or (drawn is None and split == "PP2")
    assert expected.sequences >= 7 and (tokens is None or len(tokens) == 20)
