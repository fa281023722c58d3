"""T5, BERT and GPT with a document mask through the engine: the loss does not depend on how a global batch is cut."""

from dataclasses import replace

import pytest
import torch
from engines import assert_figures, engine_of, figures
from forks import only, values
from model_kinds import KINDS, recipe_of, samples_of

from pretrain.config import ParallelConfig


def train(recipe):
    return figures(recipe, make_samples=samples_of)


@pytest.fixture(scope="module", params=KINDS)
def alone(request, forks):
    """A kind, and its figures in one process and one micro batch."""
    return request.param, only(forks.run(1, train, recipe_of(request.param, micro_batch=8)))


@pytest.mark.by_default("t5", "bert", "documents")
def test_micro_batches_change_nothing(forks, alone):
    kind, expected = alone
    assert_figures(values(forks.run(1, train, recipe_of(kind, micro_batch=1))), expected)


@pytest.mark.by_default("t5", "documents")
def test_fp16_is_close(forks, alone):
    kind, expected = alone
    recipe = recipe_of(kind, micro_batch=8)
    optimizer = replace(recipe.optimizer, initial_loss_scale=1024.0)
    recipe = replace(recipe, train=replace(recipe.train, precision="fp16"), optimizer=optimizer)
    found = only(forks.run(1, train, recipe))
    for name, value in expected.items():
        if name.startswith(("loss", "validation")):
            assert found[name] == pytest.approx(value, rel=1e-2), name


@pytest.mark.by_default("t5-expert=2", "bert-expert=2 shard=optimizer micro_batch=1", "documents-data=2")
@pytest.mark.parametrize(
    "options",
    [
        {"data": 2},
        {"expert": 2},
        {"expert": 2, "shard": "optimizer", "micro_batch": 1},
        {"expert": 2, "shard": "parameters"},
    ],
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()),
)
def test_two_processes_equal_one(forks, alone, options):
    kind, expected = alone
    assert_figures(values(forks.run(2, train, recipe_of(kind, **options))), expected, options.get("expert", 1))


@pytest.mark.by_default("{'pipeline': 2}")
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipeline": 2}], ids=str)
def test_a_bert_with_biases_and_segments_equals_one_process(forks, parallel):
    recipe = recipe_of("bert")
    model = {
        "moe.num_experts": 0,
        "moe.top_k": 1,
        "linear_bias": True,
        "segment_types": 2,
        "position.encoding": "learned_absolute",
    }
    recipe = replace(recipe, model=recipe.model.with_values({**model, "dropout": 0.1}))
    expected = only(forks.run(1, train, recipe))
    for rank in values(forks.run(2, train, replace(recipe, parallel=ParallelConfig(**parallel)))):
        for name, value in expected.items():
            if not torch.is_tensor(value):
                assert rank[name] == pytest.approx(value, rel=1e-5), name
    moved = [name for name, value in expected.items() if name.endswith("linear_proj.bias") and value.abs().sum() > 0]
    assert len(moved) == 2 and expected["validation"] < expected["validation before"]
    assert len(expected["embedding.tokentype_embeddings.weight"]) == 2


def by_hand(kind):
    """Mean over all that is predicted in 8 samples, one at a time, and what the engine says in micro batches of 2."""
    from pretrain.models.batch import collate

    recipe = recipe_of(kind)
    engine = engine_of(recipe)
    samples = samples_of(recipe)
    told = engine.evaluate(samples, 8)
    total = 0.0
    count = 0
    engine.gpt.eval()
    for n in range(8):
        batch = collate([samples[n]])
        with torch.no_grad():
            losses = engine.kind.forward(engine.gpt, batch)
        mask = batch.get("loss_mask", torch.ones_like(losses)).bool()
        total += float(losses[mask].sum())
        count += int(mask.sum())
    return told, total / count


@pytest.mark.by_default("t5", "documents")
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_mean_over_what_is_predicted(forks, kind):
    told, expected = only(forks.run(1, by_hand, kind))
    assert told == pytest.approx(expected, rel=1e-5)


def documents_apart(position):
    """Losses of a block with the mask, and of each of its documents alone; dense attention of megatron-core as well."""
    from pretrain.models.batch import collate
    from pretrain.models.gpt import document_mask

    recipe = recipe_of("documents" if position == "rope" else "documents, learned positions")
    engine = engine_of(recipe)
    samples = samples_of(recipe)
    module = engine.gpt.eval()
    worst = 0.0
    for n in range(4):
        batch = collate([samples[n]])
        documents = batch["documents"][0]
        with torch.no_grad():
            together = engine.kind.forward(module, batch)[0]
            for number in documents.unique():
                own = documents == number
                tokens = batch["tokens"][:, own]
                labels = batch["labels"][:, own]
                positions = torch.arange(tokens.shape[1]).unsqueeze(0)
                apart = module(tokens, positions, None, labels=labels)[0]
                difference = (together[own] - apart).abs().max() / apart.abs().max()
                worst = max(worst, float(difference))
    mask = document_mask(torch.tensor([[0, 0, 1, 1]]))
    return worst, (~mask[0, 0]).int().tolist()


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_masked_document_has_the_losses_that_it_has_alone(forks, position):
    """Experts drop nothing in evaluation here: what a token gets does not depend on the others of its group."""
    worst, seen = only(forks.run(1, documents_apart, position))
    assert worst < 1e-5
    assert seen == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
