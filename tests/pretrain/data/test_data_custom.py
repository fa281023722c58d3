"""Samples of registered sources: their order, errors, and runs on the source of docs/plugins.md and on pairs."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import only
from runs import steps, tensor_hash

from fmoe.errors import UserError
from pretrain.config import DataConfig, Recipe
from pretrain.config.load import load_recipe
from pretrain.data.custom import SOURCES, SourceSamples, open_source
from pretrain.data.inputs import open_inputs

PAGE = Path(__file__).parents[3] / "docs" / "plugins.md"
COPIES = '''
"""Pairs whose target is the source, both followed by the end of document."""
import numpy as np
from pretrain.data.custom import register_samples
from pretrain.data.opening import open_tokenizer


class Copies:
    def __init__(self, recipe, names, size=12):
        self.tokenizer = open_tokenizer(recipe)
        self.size = size
        self.seed = names == ("held out",)

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        text = self.text(i)
        full = np.zeros(16, np.int64)
        full[: len(text)] = text
        numbers = (np.arange(16) >= len(text)).astype(np.int64)
        labels = full.copy()
        return {
            "tokens": full,
            "documents": numbers,
            "decoder_tokens": np.concatenate([[self.tokenizer.role("pad")], full[:-1]]),
            "decoder_documents": np.zeros(16, np.int64),
            "labels": full,
            "loss_mask": 1 - numbers,
        }

    def text(self, i):
        words = np.random.default_rng([i, self.seed]).integers(300, 308, 2 + i % 5)
        return [*words.tolist(), self.tokenizer.end_of_document]

    def score(self, numbers, predict):
        texts = [self.text(i) for i in numbers]
        predicted = predict({"tokens": np.array(text)} for text in texts)
        assert len(predicted) == len(texts)
        exact = [text[:-1] == tokens for text, tokens in zip(texts, predicted)]
        return {"exact": sum(exact) / len(exact), "tokens": sum(map(len, predicted))}


register_samples("copies", Copies)
'''


class Numbers:
    """Source of numbers, which counts how often it is built."""

    def __init__(self, recipe, names, size=5):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return {"x": np.array([i])}


@pytest.fixture
def numbers(monkeypatch):
    monkeypatch.setitem(SOURCES, "numbers", Numbers)


def test_each_epoch_has_all_samples_in_another_order():
    samples = SourceSamples(Numbers(None, ()), seed=3)
    order = [int(samples[n]["x"][0]) for n in range(15)]
    epochs = [order[start : start + 5] for start in (0, 5, 10)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    again = SourceSamples(Numbers(None, ()), seed=3)
    assert [int(again[n]["x"][0]) for n in reversed(range(15))] == order[::-1]  # sample n depends only on n
    other = SourceSamples(Numbers(None, ()), seed=4)
    assert [int(other[n]["x"][0]) for n in range(15)] != order


def recipe_with(**data):
    return replace(Recipe(), data=replace(DataConfig(), **data))


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ({"samples": "number"}, ["data.samples=number", "did you mean 'numbers'"]),
        ({"samples_options": {"sizes": 3}}, ["data.samples_options.sizes=3", "did you mean 'size'"]),
        ({"samples_options": {"size": 0}}, ["data.samples=numbers", "no samples"]),
        ({"samples_options": {"names": 1}}, ["data.samples=numbers", "names"]),
    ],
    ids=["unknown name", "unknown option", "empty", "fails"],
)
def test_a_wrong_source_is_one_line(numbers, data, parts):
    with pytest.raises(UserError) as caught:
        open_source(recipe_with(**{"samples": "numbers", **data}), ("a",), 1)
    assert all(part in str(caught.value) for part in parts) and "\n" not in str(caught.value)


SAMPLE = {"tokens": np.ones(16, int), "labels": np.ones(16, int)}
PAIR = SAMPLE | {"decoder_tokens": np.ones(16, int)}


@pytest.mark.parametrize(
    ("kind", "sample", "parts"),
    [
        ("gpt", {"tokens": np.ones(16, int)}, ["lacks labels"]),
        ("gpt", SAMPLE | {"loss_msk": np.ones(16, int)}, ["loss_msk", "did you mean 'loss_mask'"]),
        ("bert", SAMPLE | {"tokens": np.ones(17, int)}, ["tokens of int64 [17]", "model.sequence_length=16"]),
        ("bert", SAMPLE | {"loss_mask": np.full(16, 0.5)}, ["loss_mask of float64"]),
        ("gpt", SAMPLE | {"tokens": [1] * 16}, ["tokens of list"]),
        ("gpt", SAMPLE | {"tokens": np.ones(16, object)}, ["tokens of object"]),
        ("gpt", np.ones(17, int), ["not ndarray"]),
        ("t5", PAIR | {"documents": np.ones(16, int)}, ["decoder_documents"]),
        ("t5", PAIR | {"decoder_documents": np.ones(16, int)}, ["decoder_documents"]),
        ("t5", PAIR | {"documents": np.ones(16, int), "decoder_documents": np.arange(16)}, ["decoder_documents"]),
        ("classifier", {"pixel_values": np.ones(4), "labels": np.array(3)}, ["labels of int64 []", "[1]"]),
    ],
)
def test_samples_that_a_kind_does_not_take(monkeypatch, kind, sample, parts):
    monkeypatch.setitem(SOURCES, "one", lambda recipe, names: [sample])
    recipe = recipe_with(samples="one")
    recipe = replace(recipe, model=replace(recipe.model, kind=kind, sequence_length=16))
    with pytest.raises(UserError, match=r"^data\.samples=one: sample 0 ") as caught:
        open_source(recipe, ("a",), 1)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    "other", [SAMPLE | {"tokens": np.ones(15, int)}, {"labels": SAMPLE["labels"]}, SAMPLE | {"tokens": np.ones(16)}]
)
def test_samples_have_the_arrays_of_the_first(other):
    samples = SourceSamples([SAMPLE, other], seed=1, name="two")
    with pytest.raises(UserError, match=r"^data\.samples=two: sample 1 "):
        [samples[n] for n in range(2)]


def test_integers_and_booleans_of_any_width_are_int64():
    sample = {"tokens": np.ones(16, np.uint16), "labels": np.ones(16, np.int32), "loss_mask": np.ones(16, bool)}
    assert {array.dtype for array in SourceSamples([sample], seed=1)[0].values()} == {np.dtype(np.int64)}


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        ({"samples_options": {"a": 1}}, ["data.samples_options", "data.samples"]),
        ({"samples": "numbers", "weights": (1.0,)}, ["data.samples=numbers", "data.weights"]),
        ({"samples": "numbers", "chat": True}, ["data.samples=numbers", "data.chat=true"]),
        ({"samples": "numbers", "mean_span": 4.0}, ["data.mean_span=4.0", "data.samples=numbers"]),
    ],
    ids=["options alone", "weights", "chat", "spans"],
)
def test_keys_that_do_not_go_together(data, keys):
    with pytest.raises(UserError) as caught:
        recipe_with(**data).check()
    assert all(key in str(caught.value) for key in keys)


def test_the_harness_needs_a_tokenizer():
    recipe = recipe_with(samples="numbers", tokenizer="")
    with pytest.raises(UserError, match=r"evaluation\.tasks=.*data\.tokenizer="):
        replace(recipe, evaluation=replace(recipe.evaluation, tasks=("arc_easy",))).check()


def test_a_validation_that_repeats_samples_is_reported(monkeypatch):
    monkeypatch.setitem(SOURCES, "one", lambda recipe, names: [SAMPLE])
    recipe = recipe_with(samples="one", tokenizer="")
    recipe = replace(
        recipe, model=replace(recipe.model, sequence_length=16), tracking=replace(recipe.tracking, wandb=False)
    )
    (warning,) = open_inputs(recipe).warnings
    assert "train.validation_sequences=64" in warning


def test_corpora_need_a_tokenizer():
    with pytest.raises(UserError, match=r"^data\.tokenizer"):
        open_inputs(recipe_with(tokenizer=""))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with both plugins, and labelled lines whose label is whether the text has a word."""
    folder = tmp_path_factory.mktemp("samples")
    (code,) = re.findall(r'```python\n("""my_samples.py: .*?)```', PAGE.read_text(), re.DOTALL)
    (folder / "my_samples.py").write_text(code)
    (folder / "copies.py").write_text(COPIES)
    for split, seed in (("train", 0), ("validation", 1)):
        draw = np.random.default_rng(seed)
        words = draw.choice(["def", "return", "self", "json"], (16, 3))
        rows = [f"{'yes' if 'def' in row else 'no'}\t{' '.join(row)}\n" for row in words]
        (folder / f"{split}.tsv").write_text("".join(rows))
    return folder


@pytest.fixture(scope="module")
def run(forks, folder, write_tiny_recipe):
    """``run(kind, name, *options)`` trains a kind in ``folder/name``; returns its rows and the process's end."""
    data = {
        "bert": {"samples": "labelled_lines", "train": ("train.tsv",), "validation": ("validation.tsv",)},
        "t5": {"samples": "copies", "train": ("train",), "validation": ("held out",)},
    }
    plugins = {"bert": "my_samples.py", "t5": "copies.py"}

    def start(kind, name, *options, size=1, code=0):
        recipe = write_tiny_recipe(
            folder / f"{kind}.toml",
            checkpoint={"every": 2, "keep": 0},
            model={"kind": kind, "moe.capacity_factor": None, "moe.eval_capacity_factor": None},
            data=data[kind],
            run={"imports": (plugins[kind],)},
        )
        ends = forks.command("pretrain", recipe, "--run.folder", folder / name, *options, size=size, folder=folder)
        assert [end.code for end in ends] == [code] * size, ends
        return steps(folder / name) if code == 0 else ends[0]

    return start


@pytest.fixture(scope="module", params=["bert", "t5"])
def whole(request, run):
    return request.param, run(request.param, f"{request.param}-whole")


def test_a_run_resumes_bit_for_bit(whole, run, folder):
    kind, rows = whole
    run(kind, f"{kind}-half", "--train.steps", "2", "--optimizer.decay-steps", "4")
    found = run(kind, f"{kind}-half", "--resume", "--optimizer.decay-steps", "4")
    assert found[4] == rows[4]
    assert tensor_hash(folder / f"{kind}-half") == tensor_hash(folder / f"{kind}-whole")


@pytest.mark.parametrize("axis", ["data", "expert"])
def test_two_ranks_equal_one(whole, run, axis):
    kind, rows = whole
    found = run(kind, f"{kind}-{axis}", f"--parallel.{axis}", "2", size=2)
    for step, row in rows.items():
        for name in {"loss", "val/loss", "grad_norm", "moe/entropy"} & row.keys():
            assert found[step][name] == pytest.approx(row[name], rel=1e-5), (step, name)


@pytest.mark.parametrize("whole", ["t5"], indirect=True)
def test_documents_over_pipeline_stages_equal_one_process(whole, run):
    kind, rows = whole
    found = run(kind, f"{kind}-pipeline", "--parallel.pipeline", "2", size=2)
    for step, row in rows.items():
        for name in {"loss", "val/loss", "grad_norm"} & row.keys():
            assert found[step][name] == pytest.approx(row[name], rel=1e-5), (step, name)


FAULTS = """
import numpy as np
from pretrain.data.custom import register_samples


class Faulty:
    def __init__(self, recipe, names):
        pass

    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i == 5:
            raise ValueError("broken file")
        return {"tokens": np.full(16, 7), "labels": np.full(16, 7)}


register_samples("faulty", Faulty)
"""


def test_a_source_that_raises_on_one_rank_ends_the_run_with_the_samples_number(forks, folder, write_tiny_recipe):
    (folder / "faulty.py").write_text(FAULTS)
    data = {"samples": "faulty", "train": ("a",), "validation": ()}
    recipe = write_tiny_recipe(folder / "faulty.toml", data=data, run={"imports": ("faulty.py",)})
    argv = [recipe, "--run.folder", folder / "faulty", "--parallel.data", "2"]
    ends = forks.command("pretrain", *argv, size=2, folder=folder)
    assert all(end.code for end in ends)
    text = "".join(end.err for end in ends)
    assert "data.samples=faulty: sample 5 fails: ValueError: broken file" in text, ends


def test_a_resume_refuses_other_samples(run, folder):
    run("bert", "other", "--train.steps", "2", "--optimizer.decay-steps", "4")
    text = (folder / "train.tsv").read_text()
    (folder / "train.tsv").write_text(text.replace("yes\t", "no\t", 1))
    end = run("bert", "other", "--resume", "--optimizer.decay-steps", "4", code=2)
    (folder / "train.tsv").write_text(text)
    assert "data.train has changed" in end.err and end.err.count("\n") == 1, end.err


def test_an_evaluation_scores_the_samples(forks, whole, folder):
    kind, rows = whole
    (end,) = forks.command("fmoe", "evaluate", folder / f"{kind}-whole", "--json", folder=folder)
    assert end.code == 0, end.err
    (told,) = json.loads(end.out)["runs"]
    assert told["loss"] == pytest.approx(rows[4]["val/loss"], rel=1e-6)
    if kind == "bert":
        assert told["scores"]["top1"] == told["accuracy"]  # the label is the only predicted token
        assert all(sum(load) == pytest.approx(1) for load in told["loads_by_class"]["0"].values())
    else:
        assert told["scores"].keys() == {"exact", "tokens"} and told["loads_by_class"] == {}
    (end,) = forks.command("fmoe", "evaluate", folder / f"{kind}-whole", folder=folder)
    assert ("top1" if kind == "bert" else "exact") in end.out, end
    (end,) = forks.command("fmoe", "evaluate", folder / f"{kind}-whole", "--data", "x", folder=folder)
    assert end.code == 2 and "data.samples=" in end.err and "--data" in end.err, end
    (end,) = forks.command("fmoe", "evaluate", folder / f"{kind}-whole", "--parallel.pipeline", "2", folder=folder)
    assert end.code == 2 and "data.samples=" in end.err and "--parallel.pipeline 2" in end.err, end


TOKENS = """
import numpy as np
from pretrain.data.custom import register_samples


class Tokens:
    def __init__(self, recipe, names):
        self.arrays = ["tokens", "labels"] + ["decoder_tokens"] * (recipe.model.kind == "t5")

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return {name: np.full(16, 7 + i) for name in self.arrays}

    def score(self, numbers, predict):
        return {"predicted": sum(map(len, predict(self[i] for i in numbers)))}


register_samples("tokens", Tokens)
"""


@pytest.mark.parametrize("kind", ["gpt", "t5"])
def test_a_run_without_a_tokenizer_is_evaluated_and_generates_no_text(forks, folder, write_tiny_recipe, kind):
    (folder / "tokens.py").write_text(TOKENS)
    data = {"samples": "tokens", "train": ("a",), "validation": ("b",), "tokenizer": ""}
    recipe = write_tiny_recipe(
        folder / f"tokens-{kind}.toml",
        data=data,
        model={"kind": kind},
        run={"imports": ("tokens.py",)},
        checkpoint={"every": 4},
    )
    run = folder / f"tokens-{kind}"
    (end,) = forks.command("pretrain", recipe, "--run.folder", run, folder=folder)
    assert end.code == 0, end
    (end,) = forks.command("fmoe", "generate", run, "--prompt", "x", folder=folder)
    assert end.code == 2 and end.err.count("\n") == 1 and "data.tokenizer=" in end.err, end
    (end,) = forks.command("fmoe", "evaluate", run, "--json", folder=folder)
    if kind == "t5":  # which its source would decode
        assert end.code == 2 and end.err.count("\n") == 1 and "data.tokenizer=" in end.err, end
        return
    (told,) = json.loads(end.out)["runs"]
    assert told["loss"] == pytest.approx(steps(run)[4]["val/loss"], rel=1e-6)
    assert told["bits_per_byte"] is None and told["scores"]["predicted"] == 16 * told["sequences"]


def decoded(path):
    """Greedy tokens of a T5 from a plain loop over its padded samples, and those of `predict`."""
    from megatron_patch import cpu
    from pretrain.data.inputs import open_validation
    from pretrain.engine import init_parallel
    from pretrain.inference.evaluation import predict
    from pretrain.inference.load import load_model, open_run
    from pretrain.models.t5 import forward
    from pretrain.start.process import Processes

    cpu.install()
    trained = open_run(path)
    init_parallel(trained.recipe)
    device = torch.device("cpu")
    model = load_model(trained, Processes(0, 1, device), drops=False)
    samples, _ = open_validation(trained.recipe, trained.tokenizer)
    texts = [samples.source.text(i) for i in range(6)]
    found = predict(model, trained.recipe, trained.tokenizer, ({"tokens": np.array(t)} for t in texts), device)
    expected = []
    for i in range(6):
        batch = {name: torch.from_numpy(array)[None] for name, array in samples.source[i].items()}
        del batch["labels"], batch["loss_mask"]
        tokens = []
        for at in range(16):  # the decoder sees padding behind its tokens, which causal attention hides
            batch["decoder_tokens"][0, 1 : 1 + at] = torch.tensor(tokens)
            with torch.no_grad():
                tokens.append(int(forward(model, batch)[0, at, : trained.tokenizer.vocab_size].argmax()))
            if tokens[-1] == trained.tokenizer.end_of_document:
                tokens.pop()
                break
        expected.append(tokens)
    return found, expected


def test_greedy_decoding_is_that_of_padded_samples(forks, run, folder):
    run("t5", "decoded", "--train.steps", "30", "--optimizer.lr", "3e-3", "--checkpoint.every", "30")
    found, expected = only(forks.run(1, decoded, folder / "decoded"))
    assert found == expected and len(set(map(tuple, found))) > 1


def test_the_pages_recipe(folder, tmp_path):
    (text,) = re.findall(r"```toml\n(\[run\]\nimports = \[\"my_samples.py.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "page.toml").write_text(text)
    recipe = load_recipe(str(tmp_path / "page.toml"))
    recipe.check()
    assert recipe.data.samples == "labelled_lines" and recipe.data.samples_options == {"labels": ["no", "yes"]}
