"""``fmoe generate`` and ``fmoe evaluate`` on runs of the trainer: splits, kinds, its own loss, wrong inputs."""

import io
import json
import math
import shutil
import sys

import pytest
import torch.distributed as dist
from runs import steps, train

from fmoe import UserError
from fmoe.cli import run as cli_run
from fmoe.metrics import LayerReport
from pretrain.data.indexed import IndexedCorpus
from pretrain.data.tokenizers import load_tokenizer, train_tokenizer
from pretrain.inference import cli, generate, report
from pretrain.inference.evaluation import Evaluation
from pretrain.inference.load import open_run
from pretrain.inference.report import open_data

PROMPT = "def decode(self"


@pytest.fixture
def command(forks):
    """``command("generate", RUN, ...)`` -> how it ended; with ``size=2`` on rank 0, because rank 1 prints nothing."""

    def run(name, *argv, **options):
        first, *others = forks.command("pretrain.inference", name, *argv, **options)
        assert not any(end.code or end.out or end.err for end in others), others
        return first

    return run


@pytest.fixture
def values(command):
    """The same of a command that is to succeed, with ``--json``: what it printed."""

    def run(name, *argv, **options):
        end = command(name, *argv, "--json", **options)
        assert end.code == 0 and not end.err, end
        return json.loads(end.out)

    return run


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


# Splits of one recipe; the first is one process.
SPLITS = {
    "one": (1, []),
    "EP2": (2, ["--parallel.expert", "2"]),
    "TP2": (2, ["--parallel.tensor", "2"]),
    "PP2": (2, ["--parallel.pipeline", "2"]),
    "DP2 ZeRO1": (2, ["--parallel.data", "2", "--parallel.shard", "optimizer"]),
}
RECIPE = {
    "model": {"moe.eval_capacity_factor": 0.7},
    "train": {"validation_every": 2},
    "checkpoint": {"every": 2, "keep": 0},
}


@pytest.fixture(scope="module")
def runs(forks, write_tiny_recipe, tmp_path_factory):
    """``runs(split)``: the folder of a run at that split, made once."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = write_tiny_recipe(folder / "recipe.toml", **RECIPE)

    def make(split):
        size, options = SPLITS[split]
        if not (folder / split).exists():
            train(forks, recipe, "--run.folder", folder / split, *options, size=size)
        return folder / split

    return make


@pytest.mark.by_default("EP2")
@pytest.mark.parametrize("split", list(SPLITS)[1:])
def test_a_checkpoint_of_any_split_is_the_model_of_one_process(runs, values, split):
    argv = ["--prompt", PROMPT, "--max-tokens", "30", "--num-samples", "2", "--top-p", "0.5"]
    drawn, expected = (values("generate", runs(name), *argv)["samples"] for name in (split, "one"))
    assert drawn == expected and len(drawn[0]["tokens"]) > 5
    one_process = values("evaluate", runs(split))["runs"][0]
    assert one_process["loss"] == pytest.approx(steps(runs(split))[4]["val/loss"], rel=1e-6)
    assert 0.05 < one_process["layers"][0]["drop_rate"] < 1, "the trainer's capacity is not that of the evaluation"
    # And at that split again.
    option, size = SPLITS[split][1][:2]
    on_ranks = values("evaluate", runs(split), option, size, size=2)["runs"][0]
    for key in ("loss", "sequences", "tokens", "bytes", "accuracy"):
        assert on_ranks[key] == pytest.approx(one_process[key], rel=1e-6)
    if option != "--parallel.data":
        assert values("generate", runs(split), *argv, option, size, size=2)["samples"] == drawn


@pytest.mark.by_default("--parallel.expert")
@pytest.mark.parametrize("size", ["--parallel.expert", "--parallel.data", "--parallel.pipeline"])
def test_ranks_that_share_the_parameters_give_the_figures_of_one_process(runs, values, size):
    split = [size, "2", "--parallel.shard", "parameters"]
    if size == "--parallel.pipeline":
        split += ["--parallel.data", "2"]
    expected, found = (values("evaluate", runs("one"), *options) for options in ([], split))
    for key in ("loss", "sequences", "tokens", "bytes", "accuracy"):
        assert found["runs"][0][key] == pytest.approx(expected["runs"][0][key], rel=1e-6)
    argv = ["--prompt", PROMPT, "--max-tokens", "12", "--temperature", "0"]
    expected, found = (values("generate", runs("one"), *argv, *options) for options in ([], split))
    assert found["samples"] == expected["samples"]


def test_the_loss_is_the_one_that_the_trainer_logged(runs, values):
    """At each of its steps, and from the folder of one checkpoint."""
    folder = runs("one")
    before = files(folder)
    middle, last = folder / "checkpoints" / "step-00000002", folder / "checkpoints"
    direct, named = values("evaluate", middle, last)["runs"]
    assert values("evaluate", folder, "--step", 2)["runs"] == [direct | {"run": str(folder)}]
    assert (direct["step"], named["step"]) == (2, 4)
    assert named["sequences"] == 4 and named["tokens"] == 64
    for found in (direct, named):
        assert found["loss"] == pytest.approx(steps(folder)[found["step"]]["val/loss"], rel=1e-6)
    assert named["perplexity"] == pytest.approx(math.exp(named["loss"]))
    trained = open_run(folder)
    epoch = (IndexedCorpus(trained.recipe.data.validation[0]).num_tokens - 1) // 16
    counts = {most: open_data(trained, None, "text", None, most).count for most in (None, 2, 10**6)}
    assert counts == {None: 4, 2: 2, 10**6: epoch}
    assert files(folder) == before, "the run's folder was written in"


MODELS = {
    "t5": ({"kind": "t5", "sequence_length": 32, "num_decoder_layers": 1, "moe.every": 2, "dropout": 0.1}, {}, {}),
    "bert": ({"kind": "bert", "sequence_length": 32, "dropout": 0.1}, {}, {}),
    "documents": ({"position.encoding": "learned_absolute"}, {"document_mask": True}, {}),
    "bf16": ({"moe.gate": "gshard", "moe.top_k": 2}, {}, {"precision": "bf16"}),
    "dense": ({"moe.num_experts": 0, "moe.top_k": 1}, {}, {}),
}


@pytest.mark.by_default("bert")
@pytest.mark.parametrize("kind", MODELS)
def test_models_of_all_kinds(forks, recipe_file, values, command, tiny_corpus, tmp_path, kind):
    model, data, training = MODELS[kind]
    folder = tmp_path / "run"
    recipe = recipe_file(model=model, data=data, train=training, checkpoint={"every": 4})
    train(forks, recipe, "--run.folder", folder)
    own = values("evaluate", folder)["runs"][0]
    assert own["loss"] == pytest.approx(steps(folder)[4]["val/loss"], rel=1e-6 if not training else 1e-5)
    assert (own["bits_per_byte"] is None) == (kind in ("t5", "bert"))
    (tmp_path / "text.txt").write_text(tiny_corpus.validation.with_suffix(".jsonl").read_text()[:300])
    whole = values("evaluate", folder, "--data", tmp_path / "text.txt")["runs"][0]
    assert math.isfinite(whole["loss"]) and whole["sequences"] > 3
    if kind == "bert":
        with pytest.raises(UserError, match=r"model\.kind=bert"):
            cli.generate([str(folder), "--prompt", PROMPT])
    elif kind == "t5":
        prompt = "def <extra_id_0>(self):\n    return <extra_id_1>"
        found = values("generate", folder, "--prompt", prompt, "--temperature", "0", "--max-tokens", "8")
        (sample,) = found["samples"]
        assert len(sample["tokens"]) <= 8 and sample["text"].startswith("def ")
        end = command("generate", folder, "--prompt", prompt, "--temperature", "0", "--max-tokens", "8")
        assert end.out == sample["text"] + "\n" and not end.err
        with pytest.raises(UserError, match="has no <extra_id_0>"):
            cli.generate([str(folder), "--prompt", PROMPT])
        with pytest.raises(UserError, match=r"parallel\.pipeline=3"):
            cli.generate([str(folder), "--prompt", prompt, "--parallel.pipeline", "3"])
    else:
        ways = [values("generate", folder, "--prompt", PROMPT, "--temperature", "0", *o) for o in ([], ["--no-cache"])]
        if kind != "bf16":  # whose logits are rounded, the same ones otherwise
            assert ways[0]["samples"] == ways[1]["samples"]


def test_bits_a_byte_of_a_text(runs, values, tiny_corpus, tmp_path):
    """Every byte and token counts once, short of a sequence or long, in whatever windows."""
    tokenizer, folder = load_tokenizer(tiny_corpus.tokenizer), runs("one")
    texts = {"short.txt": "x é", "long.txt": tiny_corpus.validation.with_suffix(".jsonl").read_text()[:500]}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        found = {}
        for stride in (None, 4):
            options = [] if stride is None else ["--stride", stride]
            found[stride] = values("evaluate", folder, "--data", tmp_path / name, *options)["runs"][0]
            assert found[stride]["tokens"] == len(tokenizer.encode(text)) + 1  # and its end
            assert found[stride]["bytes"] == len(text.encode())
            nats = found[stride]["loss"] * found[stride]["tokens"]
            assert found[stride]["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(text.encode()))
        assert (found[4] == found[None]) == (name == "short.txt")
    first = values("evaluate", folder, "--data", tmp_path / "long.txt", "--max-sequences", 3)["runs"][0]
    assert (first["sequences"], first["tokens"]) == (3, 48)
    assert first["bytes"] == len(tokenizer.decode(tokenizer.encode(texts["long.txt"])[:48]).encode())


@pytest.mark.slow
def test_runs_side_by_side(runs, command, tiny_corpus):
    end = command("evaluate", runs("one"), runs("EP2"), "--data", tiny_corpus.validation)
    assert end.code == 0 and not end.err
    rows = [line.split("|")[1:-1] for line in end.out.splitlines() if line.startswith("| ")]
    assert [cell.strip() for cell in rows[0]][:4] == ["run", "step", "sequences", "tokens"]
    assert [row[0].strip() for row in rows[1:3]] == [str(runs("one")), str(runs("EP2"))]
    assert len(rows) == 3 + 2 * 3, "a table of the two layers of each"
    assert "note" not in end.out


def test_text_comes_as_it_is_drawn(runs, command, values):
    options = ["--max-tokens", "30", "--num-samples", "3", "--seed", "7", "--temperature", "1.2"]
    end = command("generate", runs("one"), "--prompt", PROMPT, *options)
    found = values("generate", runs("one"), "--prompt", PROMPT, *options)
    assert end.code == 0 and not end.err
    expected = [f"==> sample {n + 1} of 3 <==\n{PROMPT}{s['text']}\n" for n, s in enumerate(found["samples"])]
    assert end.out == "".join(expected)
    assert all(len(s["tokens"]) == 30 or s["finish"] == "end" for s in found["samples"])
    (alone,) = values("generate", runs("one"), "--prompt", PROMPT, *options[:2], *options[4:])["samples"]
    assert alone == found["samples"][0]
    other = values("generate", runs("one"), "--prompt", PROMPT, *options, "--seed", "8")
    assert other["samples"] != found["samples"]
    assert max(len(sample["tokens"]) for sample in found["samples"]) > 16, "longer than a sequence"


WRONG = {
    "no folder": (["generate", "nowhere", "--prompt", "x"], "nowhere does not exist"),
    "no run": (["evaluate", "."], "is not a checkpoint"),
    "no step": (
        ["generate", "RUN", "--prompt", "x", "--step", "3"],
        "--step 3 has no complete checkpoint in RUN/checkpoints: the complete steps are 2, 4",
    ),
    "other step": (["evaluate", "RUN/checkpoints/step-00000002", "--step", "4"], "is the checkpoint of step 2"),
    "empty prompt": (["generate", "RUN", "--prompt", ""], "the prompt is empty"),
    "long prompt": (["generate", "RUN", "--prompt", "ab" * 99], "tokens, which exceeds model.sequence_length=16"),
    "temperature": (
        ["generate", "RUN", "--prompt", "x", "--temperature", "-1"],
        "--temperature -1.0 must be a finite number",
    ),
    "top-p": (["generate", "RUN", "--prompt", "x", "--top-p", "1.5"], "--top-p 1.5 must be more than 0 and at most 1"),
    "max-tokens": (["generate", "RUN", "--prompt", "x", "--max-tokens", "0"], "--max-tokens 0 must be at least 1"),
    "tokenizer": (["evaluate", "RUN", "--tokenizer", "OTHER"], "RUN: the model was trained with another tokenizer"),
    "no tokenizer": (["evaluate", "RUN", "--tokenizer", "nowhere.model"], "cannot read the tokenizer nowhere.model"),
    "no data": (["evaluate", "RUN", "--data", "nowhere"], "--data: nowhere is neither a file or folder of text"),
    "a device": (["evaluate", "RUN", "--data", "/dev/null"], "--data: /dev/null is a device, not a file"),
    "twice": (["evaluate", "RUN", "RUN/checkpoints"], "is given twice"),
    "stride": (
        ["evaluate", "RUN", "--data", "OTHER", "--stride", "17"],
        "--stride 17 exceeds model.sequence_length",
    ),
    "own stride": (["evaluate", "RUN", "--stride", "4"], "--stride 4 needs --data"),
    "unknown suffix": (["evaluate", "RUN", "--data", "OTHER"], "--data: OTHER has the suffix '.model'"),
    "heads": (
        ["evaluate", "RUN", "--parallel.tensor", "3"],
        "RUN: parallel.tensor=3 does not divide attention.num_heads",
    ),
    "experts": (
        ["generate", "RUN", "--prompt", "x", "--parallel.expert", "3"],
        "RUN: parallel.expert=3 does not divide moe.num_experts",
    ),
    "layers": (["evaluate", "RUN", "--parallel.pipeline", "3"], "parallel.pipeline=3 does not divide model.num_layers"),
    "no ranks": (["evaluate", "RUN", "--parallel.data", "0"], "parallel.data=0 must be at least 1"),
    "copies": (
        ["generate", "RUN", "--prompt", "x", "--parallel.data", "2"],
        "--parallel.data 2 needs --parallel.shard parameters",
    ),
    "no text": (["evaluate", "RUN", "--data", "OTHER", "--format", "text"], "is not UTF-8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(runs, capsys, tmp_path, tiny_corpus, case):
    """All of it in this process, where no process group may be made."""
    argv, says = WRONG[case]
    run, other = runs("one"), tmp_path / "other.model"
    if "OTHER" in argv:
        train_tokenizer([tiny_corpus.validation.with_suffix(".jsonl")], other, 400, sentinels=2)
    before = files(run)
    argv = [part.replace("RUN", str(run)).replace("OTHER", str(other)) for part in argv]
    assert cli_run(f"fmoe {argv[0]}", lambda: getattr(cli, argv[0])(argv[1:])) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"fmoe {argv[0]}: error: ") and err.count("\n") == 1, err
    assert says.replace("RUN", str(run)).replace("OTHER", str(other)) in err
    assert not dist.is_initialized()
    assert files(run) == before


def test_a_run_that_has_changed_or_has_nothing(runs, forks, command, values, recipe_file, tmp_path, tiny_corpus):
    run, other = tmp_path / "run", tmp_path / "other.model"
    shutil.copytree(runs("one"), run)
    train_tokenizer([tiny_corpus.validation.with_suffix(".jsonl")], other, 400, sentinels=2)
    # Without the folder of the run, the checkpoint itself knows its tokenizer.
    alone = tmp_path / "step-00000004"
    shutil.copytree(run / "checkpoints" / alone.name, alone)
    with pytest.raises(UserError, match="another tokenizer"):
        cli.evaluate([str(alone), "--tokenizer", str(other)])
    assert values("evaluate", alone)["runs"] == [
        row | {"run": str(alone), "checkpoint": str(alone)} for row in values("evaluate", run)["runs"]
    ]
    told = json.loads((run / "run.json").read_text())
    told["data"]["validation"] = ["0" * 64]
    (run / "run.json").write_text(json.dumps(told))
    with pytest.raises(UserError, match="has changed since the run"):
        cli.evaluate([str(run)])
    # The newest checkpoint lost its manifest: it is not complete. A flipped byte is no checkpoint either.
    (run / "checkpoints" / "step-00000004" / "manifest.json").unlink()
    assert values("generate", run, "--prompt", PROMPT, "--max-tokens", "2")["step"] == 2
    shard = next((run / "checkpoints" / "step-00000002").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    end = command("generate", run, "--prompt", PROMPT)
    assert end.code == 2 and "SHA-256" in end.err and end.err.count("\n") == 1
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match=f"the run {run} has no checkpoint yet"):
        cli.generate([str(run), "--prompt", PROMPT])
    bare = tmp_path / "bare"
    train(forks, recipe_file(data={"validation": ()}, checkpoint={"every": 4}), "--run.folder", bare)
    with pytest.raises(UserError, match=r"has no data\.validation: pass text with --data"):
        cli.evaluate([str(bare)])


def test_a_launcher_with_another_number_of_ranks(runs, forks):
    first, second = forks.command("pretrain.inference", "evaluate", runs("one"), size=2)
    assert (first.code, second.code) == (2, 2) and not (first.out or second.out or second.err)
    assert "world size 2" in first.err and first.err.count("\n") == 1


def test_the_command_starts_its_ranks(runs, values):
    """They get the prompt, which only the command reads."""
    argv = [runs("one"), "--max-tokens", "5"]
    found = values("generate", *argv, "--parallel.expert", "2", before=Input(PROMPT.encode()))
    assert found == values("generate", *argv, "--prompt", PROMPT)


class Input:
    """Set the standard input of a process."""

    def __init__(self, text):
        self.text = text

    def __call__(self):
        sys.stdin = io.TextIOWrapper(io.BytesIO(self.text))


def test_values_of_a_router_that_are_not_finite(runs):
    layer = LayerReport(load=[math.nan, 0.5], drop_rate=0.0, entropy=math.inf, losses={}, tokens=1)
    source = report.EvaluationData((), None, iter(()))
    found = report.values([report.RunEvaluation(open_run(runs("one")), source, Evaluation(layers={2: layer}))])
    json.dumps(found, allow_nan=False)
    (values,) = found["runs"][0]["layers"]
    assert (values["load"], values["entropy"], values["drop_rate"]) == ([None, 0.5], None, 0.0)


def test_a_prompt_without_tokens(runs, monkeypatch):
    trained = open_run(runs("one"))
    monkeypatch.setattr(trained.tokenizer, "encode", lambda text: [])  # as a model that drops white space does
    with pytest.raises(UserError, match=r"the prompt has no tokens with the tokenizer .*\.model"):
        generate._prompt_ids(" ", trained)


def test_a_prompt_on_standard_input(runs, values, monkeypatch):
    expected = values("generate", runs("one"), "--prompt", PROMPT, "--max-tokens", "5")
    found = values("generate", runs("one"), "--max-tokens", "5", before=Input(f"{PROMPT}\n".encode()))
    assert found == expected
    assert values("generate", runs("one"), "--max-tokens", "5", before=Input(PROMPT.encode("utf-8-sig"))) == expected
    utf16 = ("a".encode("utf-16"), "the prompt on standard input is UTF-16, by its first bytes")
    for text, says in (
        utf16,
        (b"a\xff", "not UTF-8 at byte 1"),
        (b"\xef\xbb\xbfa\xff", "not UTF-8 at byte 4"),
        (b"\n", "the prompt is empty"),
        (b"", "the prompt is empty"),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        with pytest.raises(UserError, match=says):
            cli.generate([str(runs("one"))])
