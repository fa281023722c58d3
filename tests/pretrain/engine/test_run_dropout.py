"""With dropout, too, no result depends on micro batches, ranks, pipeline stages or recomputation."""

import math
from dataclasses import replace

import pytest
import torch
from engines import engine_of
from forks import only, values
from model_kinds import LENGTH, losses, samples_of, with_dropout


@pytest.fixture(scope="module")
def alone(forks):
    """``alone(kind)``: in one process and one micro batch."""
    found = {}

    def run(kind):
        if kind not in found:
            found[kind] = only(forks.run(1, losses, with_dropout(kind)))
        return found[kind]

    return run


ONE_PROCESS = {
    "micro batch of 2": {"micro_batch": 2},
    "micro batch of 1, recomputed blocks": {"micro_batch": 1, "recompute": "selective"},
    "recomputed layers": {"recompute": "full"},
}
TWO_PROCESSES = {
    "tensor and sequence": {"tensor": 2},
    "tensor alone": {"tensor": 2, "sequence": False, "micro_batch": 4, "recompute": "full"},
    "tensor and sequence, recomputed": {"tensor": 2, "recompute": "full"},
    "expert": {"expert": 2, "micro_batch": 2},
    "data": {"data": 2, "micro_batch": 4},
}
PIPELINES = {
    "pipeline": {"pipeline": 2, "micro_batch": 2},
    "virtual pipeline": {"pipeline": 2, "virtual_pipeline": 2, "micro_batch": 2, "recompute": "full"},
}


def check(forks, alone, kind, options):
    size = math.prod(options.get(name, 1) for name in ("tensor", "expert", "data", "pipeline"))
    for found in values(forks.run(size, losses, with_dropout(kind, **options))):
        for step, (got, expected) in enumerate(zip(found, alone(kind), strict=True)):
            assert got == pytest.approx(expected, rel=1e-5), f"loss and gradient norm of step {step}"


@pytest.mark.by_default(
    "micro batch of 1, recomputed blocks",
    "tensor and sequence, recomputed",
    "expert",
    "virtual pipeline",
)
@pytest.mark.parametrize("split", [*ONE_PROCESS, *TWO_PROCESSES, *PIPELINES])
def test_a_split_of_a_gpt_changes_nothing(forks, alone, split):
    check(forks, alone, "gpt", {**ONE_PROCESS, **TWO_PROCESSES, **PIPELINES}[split])


@pytest.mark.by_default("bert-tensor and sequence", "t5-micro batch of 1, recomputed blocks", "documents-data")
@pytest.mark.parametrize("split", [*ONE_PROCESS, *TWO_PROCESSES])
@pytest.mark.parametrize("kind", ["bert", "t5", "documents"])
def test_a_split_of_other_kinds_changes_nothing(forks, alone, kind, split):
    check(forks, alone, kind, {**ONE_PROCESS, **TWO_PROCESSES}[split])


def masks(recipe, steps):
    """Return the elements of ones that each dropout of a model drops at each step, by the name of its site."""
    from fmoe import random
    from megatron_patch.dropout import TokenDropout, _BiasDropoutAdd

    engine = engine_of(recipe)
    found = {}
    hidden = torch.ones(LENGTH, 8, 32)
    scores = torch.ones(8, 4, LENGTH, LENGTH)
    for step in steps:
        random.set_position(7, step)
        for name, module in engine.gpt.named_modules():
            if isinstance(module, TokenDropout):
                found[f"{name} {step}"] = module(scores if "attention" in name else hidden)
            for bda, value in vars(module).items():
                if isinstance(value, _BiasDropoutAdd):
                    out = value(True, False)((hidden, None), torch.zeros_like(hidden), recipe.model.dropout)
                    found[f"{name} {bda} {step}"] = out
    return found


def test_every_place_layer_and_step_drops_other_elements_at_the_rate(forks):
    found = only(forks.run(1, masks, with_dropout("t5"), (0, 1)))
    assert len(found) == 2 * (1 + 4 * 3 + 1 * 5)  # embedding; 4 layers of the encoder; one of the decoder
    for name, value in found.items():
        kept = value != 0
        assert float((~kept).float().mean()) == pytest.approx(0.2, abs=0.03), name
        torch.testing.assert_close(value[kept], torch.full_like(value[kept], 1.25), rtol=1e-4, atol=0)
    masks_of_hidden = torch.stack([value.flatten()[:4096] for value in found.values()]) == 0
    together = torch.corrcoef(masks_of_hidden.double()).fill_diagonal_(0)
    assert together.abs().max() < 0.1
    rows = (found["embedding.embedding_dropout 0"] == 0).flatten(0, 1).double()
    assert torch.corrcoef(rows).fill_diagonal_(0).abs().mean() < 0.2, "tokens drop the same features"


def test_a_t5s_decoder_drops_other_elements_of_the_embedding(forks):
    encoder, decoder = only(forks.run(1, embeddings_of_a_t5))
    assert not torch.equal(encoder[: len(decoder)], decoder)


def embeddings_of_a_t5():
    engine = engine_of(with_dropout("t5"))
    seen = []
    dropout = engine.gpt.embedding.embedding_dropout
    dropout.register_forward_hook(lambda module, inputs, out: seen.append(out == 0))
    engine.train_step(0, samples_of(engine.recipe))
    return seen


def test_a_resumed_run_drops_what_it_would_have(forks):
    """Nothing is drawn from a generator: step 2 alone has the noise that it has after steps 0 and 1."""
    recipe = with_dropout("gpt")
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, lr=1e-30, min_lr=0.0))
    whole = only(forks.run(1, losses, recipe))
    assert only(forks.run(1, losses, recipe, (2,)))[0] == whole[2]
    assert whole[0][0] != whole[2][0]


def test_bf16_drops_the_same(forks, alone):
    for micro_batch in (8, 2):
        found = only(forks.run(1, losses, with_dropout("gpt", micro_batch, precision="bf16")))
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in alone("gpt")], rel=5e-3)
