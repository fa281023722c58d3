"""lm-evaluation-harness on an export: the loss of a text is that of ``fmoe evaluate``."""

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest

from pretrain.data.tokenizers import load_tokenizer
from pretrain.interchange import export_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval (the extra lm-eval)"),
]

MIXTRAL = {
    "norm": "rms",
    "activation": "silu",
    "gated": True,
    "moe.gate": "naive",
    "moe.top_k": 2,
    "moe.capacity_factor": None,
    "moe.eval_capacity_factor": None,
}
MODELS = {
    "mixtral": (MIXTRAL, "mixtral"),
    "qwen3_moe": (MIXTRAL | {"attention.qk_norm": True, "moe.normalize": False}, "qwen3_moe"),
    "mixtral's model as fmoe": (MIXTRAL, "fmoe"),
    "experts that drop tokens": ({"moe.eval_capacity_factor": 0.75, "position.encoding": "learned_absolute"}, "fmoe"),
}
TASK = """
task: local_text
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
"""


def whole_windows(tokenizer, text, length):
    """A beginning of a text that fills windows exactly, and their number."""
    ids = tokenizer.encode(text)
    for windows in range(12, 1, -1):
        part = tokenizer.decode(ids[: windows * length])
        if tokenizer.encode(part) == ids[: windows * length] and part == part.strip():
            return part, windows
    raise AssertionError("no such text")


@pytest.mark.parametrize("name", MODELS)
def test_its_loss_is_ours(forks, recipe_file, tiny_corpus, tmp_path, name):
    model, form = MODELS[name]
    recipe = recipe_file(model=model, checkpoint={"every": 4}, run={"folder": str(tmp_path / "run")})
    (end,) = forks.command("pretrain", recipe)
    assert end.code == 0, end.err
    tokenizer = load_tokenizer(tiny_corpus.tokenizer)
    source = json.loads(tiny_corpus.validation.with_suffix(".jsonl").read_text().splitlines()[0])["text"]
    text, windows = whole_windows(tokenizer, source, 16)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    arguments = ("--data", tmp_path / "text.jsonl", "--max-sequences", windows, "--json")
    (end,) = forks.command("fmoe", "evaluate", tmp_path / "run", *arguments)
    assert end.code == 0, end.err
    (ours,) = json.loads(end.out)["runs"]

    done = export_checkpoint(tmp_path / "run", tmp_path / "out", form)
    assert done.family.name == form
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "text.yaml").write_text(TASK.format(data=tmp_path / "text.jsonl"))
    settings = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    settings |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--batch_size", "1"]
    command += ["--model_args", f"pretrained={tmp_path / 'out'},dtype=float32,trust_remote_code=True"]
    command += ["--tasks", "local_text", "--include_path", str(tmp_path / "tasks")]
    command += ["--output_path", str(tmp_path / "found")]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (found,) = (tmp_path / "found").rglob("results*.json")
    bits_per_byte = json.loads(found.read_text())["results"]["local_text"]["bits_per_byte,none"]
    loss = bits_per_byte * math.log(2) * len(text.encode()) / (windows * 16)
    assert ours["tokens"] == windows * 16
    assert loss == pytest.approx(ours["loss"], rel=1e-4)
