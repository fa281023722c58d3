"""Training on conversations: the loss of answers, at any split, and commands that go on bit for bit."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from compare import assert_close
from engines import LENGTH, RECIPE, VOCAB, assert_figures, engine_of, figures
from forks import only, values
from runs import KillAtStep, steps, tensor_hash, train

from fmoe.errors import UserError
from pretrain.config import DataConfig, ParallelConfig, load_recipe
from pretrain.data.conversations import Conversations
from pretrain.data.indexed import IndexedCorpus, IndexedWriter
from pretrain.data.inputs import open_inputs
from pretrain.data.prepare import prepare
from pretrain.tracking.events import read_events

COUNT = 60
# A conversation's loss is its own: no noise, drops and losses of the router, which depend on the rest of the batch.
ALONE = {"moe.jitter": 0.0, "moe.capacity_factor": None, "moe.balance_loss": 0.0, "moe.z_loss": 0.0}
CHAT = replace(
    RECIPE,
    data=DataConfig(chat=True),
    model=RECIPE.model.with_values(ALONE),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Prefix of conversations of 4 to 16 tokens, so that all fit."""
    prefix = tmp_path_factory.mktemp("chat") / "a"
    draw = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(COUNT):
            sizes = draw.integers(2, 5, draw.choice([2, 4]))
            for size in sizes[:-1]:
                writer.append(draw.integers(0, VOCAB, size))
                writer.end_sequence()
            writer.append(draw.integers(0, VOCAB, sizes[-1]))
            writer.end_document()
    return prefix


def samples_of(prefix, recipe):
    return Conversations([IndexedCorpus(prefix)], LENGTH, 0, padding=0)


def gradients_and_reference(prefix):
    """Loss and gradients of a step on an epoch of packs, and of a loop over the answer tokens of each conversation."""
    samples = samples_of(prefix, CHAT)
    count = samples.samples_per_epoch
    engine = engine_of(replace(CHAT, train=replace(CHAT.train, global_batch=count, micro_batch=1)))
    loss = engine.backward(0, samples)
    found = {name: p.main_grad.clone() for name, p in engine.gpt.named_parameters()}
    corpus = IndexedCorpus(prefix)
    sequences = np.split(corpus.flat.astype(np.int64), np.cumsum(corpus.sequence_lengths)[:-1])
    logarithms = []
    for first, last in zip(corpus.document_boundaries[:-1], corpus.document_boundaries[1:], strict=True):
        tokens = torch.from_numpy(np.concatenate(sequences[first:last]))
        positions = torch.arange(len(tokens)).unsqueeze(0)
        logits = engine.gpt(tokens.unsqueeze(0), positions, None)[0]
        at = 0
        for number, part in enumerate(sequences[first:last]):
            for _ in part:
                if number % 2:
                    logarithms.append(torch.log_softmax(logits[at - 1], 0)[tokens[at]])
                at += 1
    expected = -torch.stack(logarithms).mean()
    for chunk in engine.model:
        chunk.zero_grad_buffer()
    expected.backward()
    gradients = {name: p.main_grad.clone() for name, p in engine.gpt.named_parameters()}
    return float(loss), float(expected.detach()), found, gradients


def test_the_step_is_that_of_a_loop_over_answers(forks, corpus):
    loss, expected, found, gradients = only(forks.run(1, gradients_and_reference, corpus))
    assert loss == pytest.approx(expected, rel=1e-6)
    for name, gradient in gradients.items():
        assert gradient.abs().sum() > 0, name
        assert_close(found[name], gradient, 1e-5, name)


SPLITS = {"DP2": {"data": 2}, "EP2": {"expert": 2}, "CP2": {"context": 2}, "PP2": {"pipeline": 2}}


@pytest.mark.by_default("DP2")
@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_train_what_one_does(forks, corpus, split):
    """In two micro batches a rank or more, whose numbers of answer tokens differ."""
    recipe = replace(CHAT, train=replace(CHAT.train, steps=3, micro_batch=1))
    make = partial(samples_of, corpus)
    expected = only(forks.run(1, figures, recipe, True, make))
    recipe = replace(recipe, parallel=ParallelConfig(**SPLITS[split]))
    ranks = values(forks.run(2, figures, recipe, split == "DP2", make))
    if split == "DP2":
        assert_figures(ranks, expected)
    for rank in ranks:
        for name in (*(f"loss {step}" for step in range(3)), "validation"):
            assert rank[name] == pytest.approx(expected[name], rel=1e-5), name
    assert expected["validation"] < expected["validation before"]


@pytest.fixture
def chat_recipe(recipe_file, tiny_corpus, tmp_path):
    """A recipe for lines of the tiny corpus, each of which is to be followed by the next line."""
    prefixes = {}
    for name in ("train", "validation"):
        texts = [json.loads(row)["text"] for row in getattr(tiny_corpus, name).with_suffix(".jsonl").open()]
        lines = [line for text in texts for line in text.splitlines() if line.strip()][:200]
        rows = [{"prompt": a, "completion": b} for a, b in zip(lines[::2], lines[1::2], strict=False)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        prepare([tmp_path / f"{name}.jsonl"], tiny_corpus.tokenizer, tmp_path / name, num_workers=1, chat=True)
        prefixes[name] = (str(tmp_path / name),)

    def write(**sections):
        data = {"chat": True, **prefixes, **sections.pop("data", {})}
        return recipe_file(data=data, model={"sequence_length": 48}, optimizer={"decay_steps": 6}, **sections)

    return write


def test_a_run_goes_on_bit_for_bit(forks, chat_recipe, tmp_path):
    """Killed after the first epoch."""
    recipe = chat_recipe(train={"steps": 6, "global_batch": 32}, checkpoint={"every": 2})
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    train(forks, recipe, "--run.folder", whole)
    assert steps(whole)[4]["epochs"] > 1
    forks.command("pretrain", recipe, "--run.folder", killed, before=KillAtStep(5))
    train(forks, recipe, "--run.folder", killed, "--resume")
    assert steps(killed) == steps(whole)
    assert tensor_hash(killed) == tensor_hash(whole)
    assert steps(whole)[6]["val/loss"] < steps(whole)[0]["val/loss"]
    (said,) = [event["text"] for event in read_events(whole / "events.jsonl") if event["kind"] == "warning"][:1]
    assert said.startswith("data.train: of 100 conversations,") and "model.sequence_length=48" in said


def test_data_that_do_not_serve(chat_recipe, tiny_corpus, tmp_path):
    text = (str(tiny_corpus.train),)
    chat = (str(tmp_path / "train"),)
    cases = (
        ({"train": text}, r"^data\.train: .* holds text, but data\.chat=true"),
        ({"validation": text}, r"^data\.validation: .* holds text, but data\.chat=true"),
        ({"train": chat, "chat": False}, r"^data\.train: .* holds conversations, .* data\.chat=true"),
    )
    for data, message in cases:
        with pytest.raises(UserError, match=message):
            open_inputs(load_recipe(str(chat_recipe(data=data)), []))
    before = open_inputs(load_recipe(str(chat_recipe(data={"train": chat * 2, "weights": (3, 1)})), []))
    share = 2 / before.train.samples_per_epoch  # of a corpus's epoch
    assert before.epochs_per_sample == pytest.approx([0.75 * share, 0.25 * share])
    corpus = IndexedCorpus(chat[0])
    with IndexedWriter(chat[0], corpus.dtype) as writer:  # the same tokens, other answers
        for i in range(corpus.num_documents):
            writer.append(corpus.document(i)[:1])
            writer.end_sequence()
            writer.append(corpus.document(i)[1:])
            writer.end_document()
        writer.describe(tokenizer=corpus.description["tokenizer"], chat={"answer_tokens": 0})
    after = open_inputs(load_recipe(str(chat_recipe()), []))
    assert IndexedCorpus(chat[0]).description["sha256"]["bin"] == corpus.description["sha256"]["bin"]
    assert after.fingerprints[0] != before.fingerprints[0]
