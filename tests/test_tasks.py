"""The recipes of examples/tasks train, improve their figures and are evaluated, on small data in their formats."""

import functools
import json
import os
import re
import runpy
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import only
from runs import steps as metrics
from runs import tensor_hash

from fmoe.errors import UserError
from pretrain.config import counts
from pretrain.config.load import load_recipe
from pretrain.data.tokenizers import train_tokenizer

TASKS = Path(__file__).parent.parent / "examples" / "tasks"
SMALL = [
    *("--model.hidden-size", "32", "--attention.num-heads", "2", "--model.ffn-hidden-size", "64"),
    *("--checkpoint.every", "0", "--tracking.wandb", "false", "--parallel.expert", "1"),
]


def plugin(name):
    return runpy.run_path(str(TASKS / f"{name}.py"))


def train(forks, folder, task, *options, size=1):
    """Train a task's recipe in ``folder``; return its rows of metrics."""
    options = ["--run.folder", "run", *options]
    argv = [TASKS / f"{task}.toml", *SMALL, *options]
    ends = forks.command("pretrain", *argv, size=size, folder=folder)
    assert [end.code for end in ends] == [0] * size, ends
    name = options[len(options) - options[::-1].index("--run.folder")]
    return metrics(folder / name)


def absent(package):
    sys.modules[package] = None  # an import fails as if it were not installed


@pytest.mark.parametrize(
    ("package", "program", "argv"),
    [
        ("django", TASKS / "translation.py", ["out"]),
        ("sklearn", "pretrain.start.launch", [TASKS / "vit.toml", "--parallel.expert", "1", "--run.folder", "run"]),
        ("transformers", "pretrain.start.launch", [TASKS / "vit.toml", "--parallel.expert", "1", "--dry-run"]),
    ],
)
def test_a_missing_package_is_one_line(forks, tmp_path, package, program, argv):
    (end,) = forks.command(str(program), *argv, folder=tmp_path, before=functools.partial(absent, package))
    lines = [line for line in end.err.splitlines() if "error:" in line]
    assert end.code == 2 and len(lines) == 1 and "Traceback" not in end.err, end
    assert f"package {package}" in lines[0] and "pip install 'fmoe[pretrain,tasks]'" in lines[0], end


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--package", "nowhere"], ["package nowhere", "pip install nowhere"]),
        (["--package", "json", "--languages", "de", "fr"], ["--package json", "--languages de fr"]),
    ],
)
def test_a_package_without_catalogs_is_one_line(forks, tmp_path, argv, parts):
    (end,) = forks.command(str(TASKS / "translation.py"), "out", *argv, folder=tmp_path)
    assert end.code == 2 and end.err.count("\n") == 1 and all(part in end.err for part in parts), end
    assert not (tmp_path / "out").exists()


def catalog(messages):
    """Return a compiled message catalog, as ``msgfmt`` makes it."""
    texts = [text.encode() for pair in sorted(messages.items()) for text in pair]
    start = 28 + 8 * len(texts)
    places = []
    for text in texts:
        places.append((len(text), start))
        start += len(text) + 1
    header = struct.pack("<7I", 0x950412DE, 0, len(messages), 28, 28 + 4 * len(texts), 0, 0)
    tables = [struct.pack("<2I", *place) for half in (places[::2], places[1::2]) for place in half]
    return header + b"".join(tables) + b"".join(text + b"\0" for text in texts)


@pytest.fixture(scope="module")
def translations(tmp_path_factory):
    """A folder with the pairs and the tokenizer that `translation.prepare` makes of a package's catalogs."""
    folder = tmp_path_factory.mktemp("translation")
    words = {"red": "rot", "green": "grün", "blue": "blau", "old": "alt", "small": "klein", "fast": "schnell"}
    things = {"car": "Auto", "book": "Buch", "ship": "Schiff", "house": "Haus", "horse": "Pferd", "word": "Wort"}
    german = {
        f"a {a} and {b} {c}": f"ein {words[a]}es und {words[b]}es {things[c]}"
        for a in words
        for b in words
        for c in things
    }
    plural = {
        "%d week\0%d weeks": "%d Woche\0%d Wochen",
        "month\x04May": "Mai",
        "": "Content-Type: text/plain; charset=UTF-8\n",
    }
    for language, messages in {"de": german | plural, "xx": {"a car": "x"}}.items():
        path = folder / "catalogs" / "locale" / language / "LC_MESSAGES"
        path.mkdir(parents=True)
        (path / "django.mo").write_bytes(catalog(messages))
    (folder / "catalogs" / "__init__.py").write_text("")
    sys.path.insert(0, str(folder))
    try:
        translation = plugin("translation")
        translation["prepare"].__globals__["VOCAB"] = 384
        translation["prepare"](folder, "catalogs", ("de",))
    finally:
        sys.path.remove(str(folder))
    return folder


def test_pairs_of_catalogs(translations):
    rows = {}
    for split in ("train", "validation"):
        rows[split] = list(map(json.loads, (translations / f"{split}.jsonl").read_text().splitlines()))
    assert len(rows["train"]) + len(rows["validation"]) == 6 * 6 * 6 + 1  # neither header, context nor other languages
    assert {"source": "%d Woche", "target": "%d week"} in rows["train"] + rows["validation"]
    assert not {row["target"] for row in rows["train"]} & {row["target"] for row in rows["validation"]}
    assert 4 < len(rows["validation"]) < 40


TRANSLATION = [
    *("--data.tokenizer", "tokenizer.model", "--data.train", "train.jsonl", "--data.validation", "validation.jsonl"),
    *(
        "--model.vocab-size",
        "384",
        "--model.num-layers",
        "1",
        "--model.num-decoder-layers",
        "1",
        "--model.dropout",
        "0",
    ),
    *("--train.steps", "60", "--train.validation-every", "60", "--train.validation-sequences", "8"),
    *(
        "--train.global-batch",
        "8",
        "--optimizer.lr",
        "1e-2",
        "--optimizer.warmup-steps",
        "5",
        "--checkpoint.every",
        "60",
    ),
]


@pytest.fixture(scope="module")
def translated(forks, translations):
    return train(forks, translations, "translation", *TRANSLATION)


def test_translation_learns_and_is_scored(forks, translations, translated):
    assert translated[60]["val/loss"] < 0.6 * translated[0]["val/loss"]
    pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
    (end,) = forks.command("fmoe", "evaluate", translations / "run", "--json", folder=translations)
    assert end.code == 0, end.err
    (told,) = json.loads(end.out)["runs"]
    assert told["loss"] == pytest.approx(translated[60]["val/loss"], rel=1e-5)
    # Without training, both are nearly 0. Rounding, which depends on the processor, moves BLEU by units.
    assert told["scores"]["bleu"] > 1 and told["scores"]["chrf"] > 10
    before = functools.partial(absent, "sacrebleu")
    (end,) = forks.command("fmoe", "evaluate", translations / "run", folder=translations, before=before)
    assert end.code == 2 and end.err.count("\n") == 1, end
    assert "package sacrebleu" in end.err and "pip install 'fmoe[pretrain,tasks]'" in end.err, end


def test_a_translation_is_generated_as_it_is_scored(forks, translations, translated):
    rows = [json.loads(line) for line in (translations / "validation.jsonl").read_text().splitlines()]
    found = []
    for row in rows[:3]:
        argv = [translations / "run", "--prompt", row["source"], "--temperature", "0"]
        (end,) = forks.command("fmoe", "generate", *argv, folder=translations)
        assert end.code == 0 and not end.err, end
        (end_json,) = forks.command("fmoe", "generate", *argv, "--json", folder=translations)
        (sample,) = json.loads(end_json.out)["samples"]
        assert sample["text"] + "\n" == end.out and sample["spans"] == {}, end_json
        found.append(sample["text"])
    assert found == only(forks.run(1, translation_of, translations, [row["source"] for row in rows[:3]]))
    assert all(found), found


def translation_of(folder, texts):
    """The text of the tokens that `predict`, which an evaluation scores, decodes from sources."""
    from megatron_patch import cpu
    from pretrain.engine import init_parallel
    from pretrain.inference.evaluation import predict
    from pretrain.inference.load import load_model, open_run
    from pretrain.start.process import Processes

    cpu.install()
    os.chdir(folder)
    trained = open_run(folder / "run")
    init_parallel(trained.recipe)
    device = torch.device("cpu")
    model = load_model(trained, Processes(0, 1, device), drops=False)
    tokenizer = trained.tokenizer
    sources = [np.array([*tokenizer.encode(text), tokenizer.end_of_document]) for text in texts]
    predicted = predict(model, trained.recipe, tokenizer, ({"tokens": source} for source in sources), device)
    return [tokenizer.decode(tokens) for tokens in predicted]


def test_a_pack_equals_its_pairs(forks, translations, translated, monkeypatch):
    """The mean loss of packs is that of their pairs alone, each in a pack of its own."""
    monkeypatch.chdir(translations)
    text = (TASKS / "translation.py").read_text()
    lone = text.replace("pack_of = pack(lengths, self._length)", "pack_of = np.arange(len(lengths))")
    (translations / "lone.py").write_text(lone.replace('register_samples("pairs"', 'register_samples("lone_pairs"'))
    pairs = len((translations / "validation.jsonl").read_text().splitlines())
    packs = len(plugin("translation")["Pairs"](load_recipe("run/config.toml"), ("validation.jsonl",)))
    assert packs < pairs / 2
    options = ["--train.micro-batch", "1", "--train.init-from", "run", "--train.steps", "1"]
    options += ["--optimizer.warmup-steps", "0", "--train.validation-every", "1", "--train.validation-sequences"]
    losses = []
    for name, more in (
        ("packed", [packs]),
        ("lone", [pairs, "--run.imports", "lone.py", "--data.samples", "lone_pairs"]),
    ):
        rows = train(forks, translations, "translation", *TRANSLATION, *options, *more, "--run.folder", name)
        losses.append(rows[0]["val/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


IMAGES = [
    *("--data.samples-options.drawn", "true", "--train.global-batch", "16", "--train.micro-batch", "8"),
    *("--train.validation-sequences", "64", "--parallel.expert", "1"),
]
SMALL_MODELS = {
    "vit": {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2},
    "swin": {"embed_dim": 16, "mlp_ratio": 2.0},
}


def images(forks, folder, task, steps, *options, size=1):
    """Train a recipe of images for some steps; return its rows of metrics."""
    model = [f"--model.config.{key.replace('_', '-')}={value}" for key, value in SMALL_MODELS[task].items()]
    end = ["--train.steps", str(steps), "--train.validation-every", str(steps), "--checkpoint.every", str(steps)]
    argv = [TASKS / f"{task}.toml", *IMAGES, *model, "--optimizer.decay-steps", "200", *end, *options]
    ends = forks.command("pretrain", *argv, size=size, folder=folder)
    assert [end.code for end in ends] == [0] * size, ends
    return metrics(folder / options[options.index("--run.folder") + 1])


@pytest.fixture(scope="module", params=["vit", pytest.param("swin", marks=pytest.mark.slow)])
def classified(request, forks, tmp_path_factory):
    pytest.importorskip("transformers", reason="transformers is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, images(forks, folder, request.param, 8, "--run.folder", "whole")


SPLITS = {
    "expert": ["--parallel.expert", "2"],
    "data": ["--parallel.data", "2"],
    "optimizer": ["--parallel.data", "2", "--parallel.shard", "optimizer"],
}


@pytest.mark.parametrize("split", ["expert", "optimizer", pytest.param("data", marks=pytest.mark.slow)])
def test_images_on_two_ranks_equal_one(forks, classified, split):
    task, folder, rows = classified
    found = images(forks, folder, task, 8, *SPLITS[split], "--run.folder", split, size=2)
    for step, row in rows.items():
        for name in {"loss", "val/loss", "grad_norm", "moe/entropy"} & row.keys():
            assert found[step][name] == pytest.approx(row[name], rel=2e-5), (step, name)


def test_images_are_compared_and_not_exported(forks, classified):
    _, folder, rows = classified
    (end,) = forks.command("fmoe", "compare", "whole", "--json", folder=folder)
    assert end.code == 0 and str(rows[8]["val/loss"]) in end.out, end
    (end,) = forks.command("fmoe", "report", "whole", folder=folder)
    assert end.code == 0 and "report.html" in end.out, end
    (end,) = forks.command("fmoe", "export", "whole", "out", folder=folder)
    (line,) = [line for line in end.err.splitlines() if "error:" in line]
    assert end.code == 2 and "model.kind=classifier" in line and not (folder / "out").exists(), end


def test_images_train_in_bf16(forks, classified):
    """Weights and activations are bf16, and the loss is that of fp32 up to bf16's rounding."""
    task, folder, rows = classified
    found = images(forks, folder, task, 8, "--train.precision", "bf16", "--run.folder", "bf16")
    differences = []
    for step, row in rows.items():
        for name in {"loss", "val/loss"} & row.keys():
            differences.append(abs(found[step][name] - row[name]))
            assert differences[-1] < 0.02 * row[name], (step, name)
    assert sum(difference > 0 for difference in differences) > len(differences) / 2  # one may be equal by chance
    (end,) = forks.command("fmoe", "evaluate", "bf16", "--json", folder=folder)
    (told,) = json.loads(end.out)["runs"]
    assert told["loss"] == pytest.approx(found[8]["val/loss"], rel=1e-5)


@pytest.mark.slow
def test_images_resume_bit_for_bit_and_at_another_split(forks, classified):
    task, folder, rows = classified
    images(forks, folder, task, 4, "--run.folder", "half")
    split = ["--parallel.expert", "2", "--run.folder", "split", "--resume", "half/checkpoints/step-00000004"]
    found = images(forks, folder, task, 8, *split, size=2)
    assert found[8]["loss"] == pytest.approx(rows[8]["loss"], rel=1e-5)
    found = images(forks, folder, task, 8, "--run.folder", "half", "--resume")
    assert found[8] == rows[8] and tensor_hash(folder / "half") == tensor_hash(folder / "whole")


def test_images_are_classified(forks, tmp_path):
    """A ViT learns; its figures are those of a plain loop over the model, and loads are by class."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    rows = images(forks, tmp_path, "vit", 80, "--optimizer.lr", "4e-3", "--run.folder", "run")
    (end,) = forks.command("fmoe", "evaluate", tmp_path / "run", "--json", folder=tmp_path)
    assert end.code == 0, end.err
    (told,) = json.loads(end.out)["runs"]
    hits, loss, loads, built = only(forks.run(1, plain_figures, tmp_path / "run"))
    assert told["accuracy"] == hits > 0.3
    assert told["loss"] == pytest.approx(loss, rel=1e-5)
    assert told["loss"] == pytest.approx(rows[80]["val/loss"], rel=1e-5)
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["params"] == built
    argv = [tmp_path / "run" / "config.toml", "--parallel.expert", "2", "--dry-run", "--json"]
    (end,) = forks.command("pretrain.start.launch", *argv, folder=tmp_path)
    assert end.code == 0 and json.loads(end.out)["parameters"] == built, end
    assert info["params"] - info["active_params"] == 2 * 7 * (2 * 32 * 32 + 2 * 32)
    found = told["loads_by_class"]
    assert set(found) == {str(number) for number in range(10)}
    for number, load in loads.items():
        assert found[str(number)]["2"] == pytest.approx(load, abs=1e-6)
    (end,) = forks.command("fmoe", "evaluate", tmp_path / "run", folder=tmp_path)
    assert "layer 2, class" in end.out, end
    (end,) = forks.command("fmoe", "generate", tmp_path / "run", "--prompt", "x", folder=tmp_path)
    assert end.code == 2 and "model.kind=classifier" in end.err, end


def plain_figures(path):
    """Top-1, loss, loads of layer 2 by class and number of parameters, image by image and by hand."""
    from torch.nn import functional as F

    from megatron_patch import cpu
    from pretrain.data.inputs import open_validation
    from pretrain.engine import init_parallel
    from pretrain.inference.load import load_model, open_run
    from pretrain.start.process import Processes

    cpu.install()
    trained = open_run(path)
    init_parallel(trained.recipe)
    model = load_model(trained, Processes(0, 1, torch.device("cpu")), drops=True)
    samples, _ = open_validation(trained.recipe, None)
    (layer,) = [module for module in model.modules() if getattr(module, "layer_number", None) == 2]
    chosen = []
    layer.gate.register_forward_hook(lambda gate, inputs, routing: chosen.append(routing.expert_TK.flatten()))
    hits, losses, loads = 0, 0.0, {}
    for n in range(64):
        sample = samples[n]
        number = int(sample["labels"][0])
        with torch.no_grad():
            (logits,) = model.model(pixel_values=torch.from_numpy(sample["pixel_values"])[None]).logits
        hits += int(logits.argmax()) == number
        losses += float(F.cross_entropy(logits, torch.tensor(number)))
        loads[number] = loads.get(number, 0) + torch.bincount(chosen[-1], minlength=8)
    shares = {number: (load / load.sum()).tolist() for number, load in loads.items()}
    return hits / 64, losses / 64, shares, sum(p.numel() for p in model.parameters())


@pytest.mark.by_default(1, 3)
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--model.config.model-type", "vitt"], ["model.config.model_type=vitt"]),
        (["--model.config.hidden-sise", "32"], ["model.config.hidden_sise=32", "did you mean 'hidden_size'"]),
        (["--model.config.model-type", "clip"], ["model.config.model_type=clip", "image_size"]),
        (["--model.config.hidden-size", "wide"], ["model.config=", "wide", "hidden_size"]),
        (["--model.config.return-dict", "false"], ["model.config.return_dict"]),
        (["--model.num-layers", "3", "--moe.layers", "2"], ["model.num_layers=3", "must be 4"]),
        (["--model.norm", "rms"], ["model.kind=classifier", "model.norm=rms"]),
        (["--parallel.tensor", "2"], ["model.kind=classifier", "parallel.tensor=2"]),
        (
            ["--parallel.data", "2", "--parallel.shard", "gradients"],
            ["model.kind=classifier", "parallel.shard=gradients"],
        ),
        (
            ["--parallel.data", "2", "--parallel.shard", "parameters"],
            ["model.kind=classifier", "parallel.shard=parameters"],
        ),
        (["--data.train", "training"], ["data.train", "training is not a split"]),
    ],
    ids=[
        "model type",
        "key",
        "without image size",
        "value",
        "of the engine",
        "layers",
        "other section",
        "split",
        "shard gradients",
        "shard parameters",
        "data",
    ],
)
def test_a_wrong_classifier_is_one_line(forks, tmp_path, options, parts):
    pytest.importorskip("transformers", reason="transformers is not installed")
    argv = [TASKS / "vit.toml", *IMAGES, "--run.folder", "run", *options]
    (end,) = forks.command("pretrain.start.launch", *argv, folder=tmp_path)
    lines = [line for line in end.err.splitlines() if "error:" in line]
    assert end.code == 2 and len(lines) == 1 and all(part in lines[0] for part in parts), end


def test_flops_of_a_vit_are_those_of_its_matrices():
    pytest.importorskip("transformers", reason="transformers is not installed")
    recipe = load_recipe(str(TASKS / "vit.toml"))
    width, hidden, tokens = 64, 256, 17
    layers = 4 * (2 * tokens * (4 * width**2 + 2 * width * hidden) + 4 * tokens**2 * width)
    patches_and_classes = 2 * 16 * 4 * width + 2 * width * 10
    assert recipe.flops_per_token() * tokens == pytest.approx(3 * (layers + patches_and_classes))
    two = recipe.model.with_values({"moe.top_k": 2})
    more = counts.flops_per_token(two) - counts.flops_per_token(recipe.model)
    assert more == pytest.approx(6 * 2 * (2 * width * hidden + width + hidden))


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """A folder with a tokenizer of the generated sentences."""
    folder = tmp_path_factory.mktemp("sentences")
    tasks = plugin("sentences")
    draw = np.random.default_rng(0)
    rows = [" ".join(tasks[task](draw)[0]) for task in ("entailment", "acceptability") for _ in range(100)]
    text = "".join(json.dumps({"text": f"{row} yes no"}) + "\n" for row in rows)
    (folder / "text.jsonl").write_text(text)
    train_tokenizer([folder / "text.jsonl"], folder / "tokenizer.model", 384)
    return folder


SENTENCES = [
    *("--data.tokenizer", "tokenizer.model", "--model.vocab-size", "384", "--model.num-layers", "2"),
    *("--data.samples-options.size", "64", "--data.samples-options.task", "acceptability", "--model.init-std", "0.1"),
    *("--train.steps", "60", "--train.validation-every", "60", "--train.validation-sequences", "64"),
    *(
        "--train.micro-batch",
        "32",
        "--optimizer.lr",
        "3e-3",
        "--optimizer.warmup-steps",
        "5",
        "--checkpoint.every",
        "60",
    ),
]


def test_sentences_have_right_labels_and_splits_share_none(sentences, monkeypatch):
    monkeypatch.chdir(sentences)
    tasks = plugin("sentences")
    draw = np.random.default_rng(5)
    for _ in range(50):
        (premise, hypothesis), label = tasks["entailment"](draw)
        pairs = [re.fullmatch(r"(\w+) is (\w+) than (\w+)", part).groups() for part in premise.rstrip(".").split(". ")]
        more = pairs[0][1]
        order = [next(a for a, _, b in pairs if a not in [b for _, _, b in pairs])]
        while len(order) < 3:
            order.append(next(b for a, _, b in pairs if a == order[-1]))
        one, relation, two = re.fullmatch(r"(\w+) is (\w+) than (\w+)\.", hypothesis).groups()
        assert label == ((order.index(one) < order.index(two)) == (relation == more))
        (sentence,), label = tasks["acceptability"](draw)
        _, subject, _, _, _, verb = sentence.rstrip(".").split()
        assert label == (subject.endswith("s") != verb.endswith("s"))
    recipe = load_recipe(str(TASKS / "sentences.toml"))
    model = replace(recipe.model, vocab_size=384)
    recipe = replace(recipe, model=model, data=replace(recipe.data, tokenizer="tokenizer.model"))
    splits = [tasks["Sentences"](recipe, (name,), size=200) for name in ("train", "validation")]
    texts = [{tuple(split[i]["tokens"]) for i in range(200)} for split in splits]
    assert not texts[0] & texts[1]
    with pytest.raises(UserError, match=r"task=rte"):
        tasks["Sentences"](recipe, ("train",), task="rte")


def test_sentences_are_learned_from_a_bert_and_scored(forks, sentences):
    rows = train(forks, sentences, "sentences", *SENTENCES)
    assert rows[60]["val/loss"] < 0.4 * rows[0]["val/loss"], (rows[0], rows[60])
    (end,) = forks.command("fmoe", "evaluate", sentences / "run", "--json", folder=sentences)
    (told,) = json.loads(end.out)["runs"]
    assert told["loss"] == pytest.approx(rows[60]["val/loss"], rel=1e-5)
    assert told["scores"]["accuracy"] == pytest.approx(told["accuracy"])
    assert 0 < told["scores"]["f1"] <= 1 and set(told["loads_by_class"]) == {"0", "1"}
    warm = [*SENTENCES, "--train.init-from", "run", "--run.folder", "warm", "--train.steps", "6"]
    found = train(forks, sentences, "sentences", *warm, "--train.validation-every", "6")
    assert found[0]["val/loss"] == pytest.approx(rows[60]["val/loss"], rel=1e-5)
