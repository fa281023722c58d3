"""Batches that a thread builds ahead: the same ones, bounded, and gone with the run."""

import threading
import time

import pytest
from runs import steps, train

from fmoe import UserError
from pretrain.data.indexed import IndexedCorpus
from pretrain.data.prefetch import Prefetch
from pretrain.models.batch import collate
from pretrain.tracking import read_metrics


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fmoe-data")]


@pytest.fixture
def prefetch():
    made = []

    def make(build, end, ahead):
        made.append(Prefetch(build, end, ahead))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert not threads()


@pytest.mark.parametrize("ahead", [0, 1, 2, 7, 100])
def test_every_step_once_and_in_order(ahead, prefetch):
    built = []
    batches = prefetch(lambda step: built.append(step) or [step], 20, ahead)
    assert [batches.take(step) for step in range(5, 20)] == [[step] for step in range(5, 20)]
    assert built == list(range(5, 20))  # none beyond the last step
    assert bool(threads()) == (ahead > 0)


def test_no_more_are_built_than_asked_for(prefetch):
    built = []
    third = threading.Event()

    def build(step):
        built.append(step)
        if step == 3:
            third.set()
        return [step]

    batches = prefetch(build, 1000, 2)
    batches.take(1)
    assert third.wait(60)
    batches._pool.submit(int).result()  # whatever else waited is done
    assert built == [1, 2, 3]


def test_building_goes_on_while_the_step_is_made(prefetch):
    ahead = threading.Event()
    batches = prefetch(lambda step: ahead.set() if step == 1 else [step], 5, 1)
    batches.take(0)
    assert ahead.wait(60)


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_is_that_of_its_step(ahead, prefetch):
    def build(step):
        if step == 2:
            raise UserError("sample 7 is bad")
        return [step]

    batches = prefetch(build, 5, ahead)
    assert batches.take(0) == [0] and batches.take(1) == [1]
    with pytest.raises(UserError, match=r"^sample 7 is bad$"):
        batches.take(2)


def test_another_step_than_the_next(prefetch):
    batches = prefetch(lambda step: [step], 50, 3)
    assert [batches.take(step)[0] for step in (0, 1, 7, 8, 2, 3, 49)] == [0, 1, 7, 8, 2, 3, 49]


def test_closing_waits_for_the_batch_at_hand_alone(prefetch):
    begun = threading.Event()
    built = []

    def build(step):
        if step:
            begun.set()
            time.sleep(0.05)
        built.append(step)

    batches = prefetch(build, 1000, 100)
    batches.take(0)
    begun.wait(60)
    batches.close()
    assert not threads() and len(built) <= 3


def test_a_run_is_the_same_with_and_without(forks, recipe_file, tmp_path):
    """Also one that goes on, whose thread had built ahead of the checkpoint."""
    recipe = recipe_file(train={"steps": 6}, checkpoint={"every": 3}, parallel={"data": 2})
    for ahead in (0, 5):
        train(forks, recipe, "--run.folder", tmp_path / str(ahead), "--data.prefetch", ahead, size=2)
    resumed = ["--resume", tmp_path / "5" / "checkpoints" / "step-00000003", "--data.prefetch", "2"]
    train(forks, recipe, "--run.folder", tmp_path / "resumed", *resumed, size=2)
    expected = steps(tmp_path / "0")
    assert steps(tmp_path / "5") == expected
    assert steps(tmp_path / "resumed") == {step: row for step, row in expected.items() if step > 3}
    for row in read_metrics(tmp_path / "5" / "metrics.jsonl"):
        assert row["step"] == 0 or 0 <= row["data_wait_seconds"] <= row["step_seconds"]


class Break:
    """Lets sample ``n`` raise, in the process it is called in."""

    def __init__(self, n):
        self.n = n

    def __call__(self):
        from pretrain.data.samples import GPTSamples

        get = GPTSamples.__getitem__

        def item(samples, n):
            if n == self.n and samples.seed:  # not of the validation
                raise UserError(f"sample {n} is bad")
            return get(samples, n)

        GPTSamples.__getitem__ = item


def test_an_error_in_the_thread_ends_the_run_with_its_line(forks, recipe_file, tmp_path):
    (end,) = forks.command(
        "pretrain", recipe_file(), "--run.folder", tmp_path / "run", "--data.prefetch", 2, before=Break(9)
    )
    assert end.code == 2
    assert end.err.splitlines()[-1] == "pretrain: error: sample 9 is bad"
    assert max(row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2  # 4 samples a step


def test_a_corpus_that_changed_under_the_run(tiny_corpus):
    ids = IndexedCorpus(tiny_corpus.train).flat[:17].astype("int64")
    assert collate([ids, ids], 384)["tokens"].shape == (2, 16)
    for wrong in (384, -1):
        for place in (0, 7, 16):
            changed = ids.copy()
            changed[place] = wrong
            with pytest.raises(UserError, match=rf"token id {wrong}, outside model.vocab_size=384"):
                collate([ids, changed], 384)
    with pytest.raises(UserError, match=r"token id 500, outside model.vocab_size=384"):
        collate([{"tokens": ids, "labels": ids, "decoder_tokens": ids * 0 + 500}], 384)
