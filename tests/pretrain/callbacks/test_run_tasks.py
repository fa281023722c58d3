"""Tasks of lm-evaluation-harness during training: the figures of the export, and a training that does not notice."""

import importlib.util
import json
import sys
from dataclasses import replace

import pytest
from runs import steps, tensor_hash, train, with_sections

from fmoe.errors import MissingPackageError, UserError
from pretrain.callbacks import TaskEvaluation
from pretrain.config import EvaluationConfig, Recipe
from pretrain.interchange import export_checkpoint

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval (the extra lm-eval)"
)

TASK = """
task: local_{name}
dataset_path: json
dataset_kwargs:
  data_files:
    train: {folder}/train.jsonl
    test: {folder}/test.jsonl
test_split: test
fewshot_split: train
output_type: {name}
doc_to_text: "{text}"
doc_to_target: "{target}"
{more}
metric_list:
"""
TASKS = {
    "loglikelihood": ("{{{{context}}}}", "{{{{target}}}}", "num_fewshot: 2", ("perplexity", "acc")),
    "loglikelihood_rolling": ("", "{{{{context}}}}", "", ("bits_per_byte",)),
    "multiple_choice": ("{{{{context}}}}", "{{{{gold}}}}", 'doc_to_choice: "{{{{choices}}}}"', ("acc", "acc_norm")),
    "generate_until": (
        "{{{{context}}}}",
        "{{{{target}}}}",
        'process_results: !function own.digest\ngeneration_kwargs: {{until: ["\\n"], max_gen_toks: 8}}',
        ("digest",),
    ),
}
# A figure that differs between texts.
OWN = """
import zlib

def digest(doc, results):
    return {"digest": zlib.crc32(results[0].encode()) % 1000}
"""


@pytest.fixture
def tasks(tiny_corpus, tmp_path):
    """The key ``evaluation`` of a recipe with a task of each kind."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    text = json.loads(tiny_corpus.train.with_suffix(".jsonl").read_text().splitlines()[0])["text"]
    docs = []
    for start in range(0, 2000, 100):
        context, target, other = text[start : start + 40], text[start + 40 : start + 50], text[start + 60 : start + 70]
        docs.append({"context": context, "target": target, "choices": [target, other, other[::-1]], "gold": 0})
    for name, part in (("train", docs[:6]), ("test", docs[6:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in part))
    (folder / "own.py").write_text(OWN)
    for name, (text, target, more, metrics) in TASKS.items():
        head = TASK.format(name=name, folder=folder, text=text, target=target, more=more).format()
        lines = [f"  - metric: {metric}\n" for metric in metrics]
        if name == "generate_until":
            lines.append("    aggregation: mean\n    higher_is_better: true\n")
        (folder / f"{name}.yaml").write_text(head + "".join(lines))
    names = tuple(f"local_{name}" for name in TASKS)
    return {"tasks": names, "every": 2, "limit": 8, "task_path": str(folder)}


@needs_harness
def test_the_figures_are_those_of_the_export_and_training_does_not_notice(forks, write_tiny_recipe, tasks, tmp_path):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    sections = {
        # A gate that adapts to its loads, experts that drop tokens, and dropout.
        "model": {"moe.gate": "sigmoid", "moe.top_k": 2, "moe.capacity_factor": 1.0, "dropout": 0.1},
        "parallel": {"expert": 2},
        "checkpoint": {"every": 4},
    }
    rows = {}
    for name, evaluation in (("with", tasks), ("without", {})):
        run = {"folder": str(tmp_path / name)}
        recipe = write_tiny_recipe(tmp_path / f"{name}.toml", **sections, run=run, evaluation=evaluation)
        train(forks, recipe, size=2)
        rows[name] = steps(tmp_path / name)
    assert tensor_hash(tmp_path / "with") == tensor_hash(tmp_path / "without")
    figures = {
        step: {key: row.pop(key) for key in list(row) if key.startswith("eval/")} for step, row in rows["with"].items()
    }
    assert rows["with"] == rows["without"]
    assert [step for step, found in figures.items() if found] == [2, 4]
    assert figures[2] != figures[4]

    export_checkpoint(tmp_path / "with", tmp_path / "out")
    settings = {"pretrained": str(tmp_path / "out"), "dtype": "float32", "trust_remote_code": True}
    expected = simple_evaluate(
        "hf",
        settings,
        list(tasks["tasks"]),
        batch_size=1,
        device="cpu",
        limit=tasks["limit"],
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=tasks["task_path"], include_defaults=False),
    )["results"]
    for name, (*_, metrics) in TASKS.items():
        for metric in metrics:
            found = figures[4][f"eval/local_{name}/{metric}"]
            assert found == pytest.approx(expected[f"local_{name}"][f"{metric},none"], rel=1e-4), (name, metric)
    assert len(figures[4]) == sum(len(metrics) for *_, metrics in TASKS.values())


@needs_harness
@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"pipeline": 2}, {"tensor": 2, "sequence": False}], ids=["PP2", "TP2"])
def test_a_model_in_parts_has_the_figures_of_a_whole_one(forks, write_tiny_recipe, tasks, tmp_path, parallel):
    model = {"moe.gate": "naive", "moe.top_k": 2, "moe.jitter": 0.0}
    found = []
    for name, split in (("whole", {}), ("parts", parallel)):
        run = {"folder": str(tmp_path / name)}
        path = tmp_path / f"{name}.toml"
        recipe = write_tiny_recipe(path, model=model, parallel=split, run=run, evaluation=tasks)
        train(forks, recipe, size=2 if split else 1)
        found.append({key: value for key, value in steps(tmp_path / name)[4].items() if key.startswith("eval/")})
    assert found[1] == pytest.approx(found[0], rel=1e-4) and found[0]


@needs_harness
@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"tasks": ("local_choice",)}, ["evaluation.tasks=local_choice", "local_multiple_choice"]),
        ({"task_path": "/nowhere"}, ["evaluation.task_path=/nowhere"]),
        (
            {"tasks": ("local_generate_until",), "sequence_length": 8},
            ["local_generate_until", "model.sequence_length=8"],
        ),
        ({"tasks": ("local_generate_until",), "moe.gate": "expert_choice"}, ["moe.gate=expert_choice"]),
        ({"tasks": ("local_multiple_choice",), "unsafe": True}, ["local_multiple_choice", "code"]),
    ],
)
def test_wrong_tasks_are_one_line_before_training(tasks, values, parts, monkeypatch):
    from lm_eval.api.task import ConfigurableTask

    monkeypatch.setattr(ConfigurableTask, "UNSAFE_CODE", values.pop("unsafe", False), raising=False)
    model = {key: values.pop(key) for key in list(values) if key in ("sequence_length", "moe.gate")}
    recipe = with_sections(Recipe(evaluation=EvaluationConfig(**tasks | values)), model=model)
    with pytest.raises(UserError) as refused:
        TaskEvaluation(recipe)
    assert all(part in str(refused.value) for part in parts) and "\n" not in str(refused.value)


def test_the_package_must_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    recipe = replace(Recipe(), evaluation=EvaluationConfig(tasks=("hellaswag",)))
    with pytest.raises(MissingPackageError, match=r"evaluation\.tasks=\['hellaswag'\].*fmoe\[lm-eval\]"):
        TaskEvaluation(recipe)
