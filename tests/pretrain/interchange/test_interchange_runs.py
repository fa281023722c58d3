"""The commands, on runs: trained, exported, tried with transformers, imported again, trained on."""

import json

import pytest
import torch
from compare import assert_close
from forks import only
from huggingface_folders import logits, our_logits, save_random

from fmoe.errors import UserError
from pretrain.checkpoint import open_checkpoint
from pretrain.config import load_recipe
from pretrain.data.tokenizers import load_tokenizer
from pretrain.interchange.cli import export_main, import_main
from pretrain.start.resume import check_resumable
from pretrain.tracking import read_metrics

MODERN = {
    "norm": "rms",
    "attention.num_query_groups": 1,
    "attention.head_dim": 12,
    "position.rope_theta": 1e4,
    "activation": "silu",
    "gated": True,
    "moe.gate": "naive",
    "moe.top_k": 2,
    "moe.capacity_factor": None,
    "moe.eval_capacity_factor": None,
}
RUNS = {
    "mixtral, EP2": (MODERN, {"expert": 2}),
    "qwen3_moe, TP2": (
        MODERN
        | {
            "attention.qk_norm": True,
            "attention.num_query_groups": 2,
            "moe.gate": "switch",
            "moe.jitter": 0.0,
            "moe.layers": (2,),
            "dense_ffn_hidden_size": 40,
            "tie_embeddings": False,
        },
        {"tensor": 2},
    ),
    "qwen3_moe, PP2": (MODERN | {"attention.qk_norm": True}, {"pipeline": 2}),
}


def train(forks, *argv, size=1):
    for end in forks.command("pretrain", *argv, size=size):
        assert end.code == 0, end.err


@pytest.mark.by_default("mixtral, EP2")
@pytest.mark.parametrize("case", RUNS)
def test_a_run_goes_out_and_comes_back(forks, recipe_file, tiny_corpus, tmp_path, capsys, case):
    model, parallel = RUNS[case]
    family = case.split(",")[0]
    first, out, second = tmp_path / "first", tmp_path / "out", tmp_path / "second"
    recipe = recipe_file(model=model, parallel=parallel, checkpoint={"every": 4}, run={"folder": str(first)})
    train(forks, recipe, size=2)
    assert export_main([str(first), str(out), "--license", "mit"]) == 0
    said = capsys.readouterr().out
    trained = load_recipe(str(first / "config.toml"))
    assert f"{trained.num_params():,} parameters" in said and "without" not in said and "license" not in said
    card = (out / "README.md").read_text()
    corpus = json.loads(tiny_corpus.train.with_suffix(".json").read_text())
    assert card.startswith("---\nlibrary_name: transformers\nlicense: mit\n")
    assert f"{corpus['tokens']:,}" in card and "4 of 4" in card and str(tiny_corpus.folder) not in card

    import transformers

    tokenizer, ours = transformers.AutoTokenizer.from_pretrained(out), load_tokenizer(tiny_corpus.tokenizer)
    text = tiny_corpus.validation.with_suffix(".jsonl").read_text()[:4000]
    ids = ours.encode(text)
    assert tokenizer(text)["input_ids"] == ids
    tokens = torch.tensor(ids[: 16 * 20]).view(20, 16)
    expected = only(forks.run(1, our_logits, first, tokens))
    assert_close(logits(out, tokens), expected, 1e-5, "logits of the export")
    generated = transformers.AutoModelForCausalLM.from_pretrained(out).generate(
        **tokenizer("import json\n", return_tensors="pt"), max_new_tokens=8
    )
    assert tokenizer.decode(generated[0], skip_special_tokens=True).startswith("import json\n")

    assert import_main([str(out), str(second)]) == 0
    said = capsys.readouterr().out
    assert f"{second}: family {family}" in said and "--run.folder" in said and str(second / "tokenizer") in said
    imported = open_checkpoint(second)
    for name in imported.names():
        assert torch.equal(imported.read(name), open_checkpoint(first).read(name)), name
    # As the printed command says: a new run that begins with these weights, on a corpus of this tokenizer.
    third = tmp_path / "third"
    data = ["--data.tokenizer", tiny_corpus.tokenizer, "--data.train", tiny_corpus.train]
    data += ["--data.validation", tiny_corpus.validation, "--train.steps", 4, "--optimizer.warmup-steps", 1]
    data += ["--train.global-batch", 4, "--train.micro-batch", 4, "--train.validation-sequences", 4]
    train(forks, second / "config.toml", "--run.folder", third, "--tracking.no-wandb", *data)
    rows = {of: [row for row in read_metrics(of / "metrics.jsonl") if "val/loss" in row] for of in (first, third)}
    assert rows[third][0]["val/loss"] == pytest.approx(rows[first][-1]["val/loss"], rel=1e-4)
    assert rows[third][-1]["val/loss"] != rows[third][0]["val/loss"]


def test_weights_alone_are_no_run_to_resume(tmp_path):
    save_random(tmp_path / "theirs", "mixtral")
    import_main([str(tmp_path / "theirs"), str(tmp_path / "run")])
    recipe = load_recipe(str(tmp_path / "run" / "config.toml"))
    with pytest.raises(UserError, match=r"has only weights: start a run from them with --train\.init-from"):
        check_resumable(recipe, open_checkpoint(tmp_path / "run"))


def test_a_shard_has_a_size():
    for size in ("0", "-0", "-1", "nan", "inf", "-inf", "1e308"):
        with pytest.raises(UserError, match=rf"--shard-gib {float(size)}".replace("+", r"\+")):
            export_main(["a", "b", f"--shard-gib={size}"])
