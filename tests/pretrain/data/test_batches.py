"""A batch that grows: every sample once, at every split, after every resume."""

from dataclasses import replace

import pytest
from engines import RECIPE, Samples, Split, engine_of, load, save
from forks import only, values

from pretrain.config import Recipe, TrainConfig
from pretrain.config.batches import Batches

CASES = {
    "no ramp": Batches(16, 16, 1, 0),
    "one increment": Batches(16, 8, 8, 100),
    "many": Batches(64, 4, 4, 1000),
    "a share is less than a step": Batches(64, 8, 8, 20),
    "at once": Batches(64, 8, 8, 1),
    "a share that is no number": Batches(10, 3, 1, 97),
}


def by_the_rule(batches, steps):
    """(first sample, sequences) of each step, from the samples seen before it."""
    seen = 0
    found = []
    count = (batches.size - batches.start) // batches.increment
    for _ in range(steps):
        level = count if seen >= batches.ramp_samples else count * seen // batches.ramp_samples
        size = batches.start + batches.increment * level
        found.append((seen, size))
        seen += size
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_rule(case):
    batches = CASES[case]
    expected = by_the_rule(batches, 300)
    assert [(batches.first(step), batches.sequences(step)) for step in range(300)] == expected
    ends = [first + size for first, size in expected]
    for samples in range(1, 500):
        assert batches.steps_of(samples) == next(step for step, end in enumerate(ends, start=1) if end >= samples)
    assert batches.steps_of(0) == 0
    assert expected[-1][1] == batches.size


def test_warmup_tokens_count_what_the_ramp_takes():
    recipe = Recipe(train=TrainConfig(global_batch=16, micro_batch=4, ramp_batch=4, ramp_increment=4, ramp_samples=24))
    # A share is 8 samples; after the fourth step 28 were seen.
    assert [recipe.batches.sequences(step) for step in range(6)] == [4, 4, 8, 12, 16, 16]
    tokens = recipe.model.sequence_length
    warm = replace(recipe, optimizer=replace(recipe.optimizer, warmup_tokens=17 * tokens))
    assert warm.warmup_steps == 4


RAMP = {"global_batch": 16, "micro_batch": 2, "ramp_batch": 4, "ramp_increment": 4, "ramp_samples": 24}


def taken(folder, split, first, last):
    """Samples and losses of steps ``first ... last - 1``, resumed at the first and saved after the last."""
    recipe = split.recipe(replace(RECIPE, train=replace(RECIPE.train, **RAMP)))
    engine = engine_of(recipe)
    samples = Samples()
    if first:
        load(engine, folder / f"step-{first:08d}")
    losses = [engine.train_step(step, samples).loss for step in range(first, last)]
    save(engine, folder, last)
    return samples.taken, losses


def test_every_sample_once_at_every_split(forks, tmp_path):
    """A run through three splits, within the ramp and after it, makes the losses of one process."""
    alone_samples, alone = only(forks.run(1, taken, tmp_path / "alone", Split(), 0, 7))
    assert alone_samples == list(range(4 + 4 + 8 + 12 + 16 * 3))
    samples = []
    losses = []
    for first, last, text in ((0, 2, "DP2"), (2, 4, "EP2"), (4, 7, "DP2 ZeRO1")):
        split = Split.of(text)
        ranks = values(forks.run(split.parallel.world_size, taken, tmp_path / "split", split, first, last))
        samples += [n for numbers, _ in ranks for n in numbers]
        losses += ranks[0][1]
    assert sorted(samples) == alone_samples
    assert losses == pytest.approx(alone, rel=1e-5)
