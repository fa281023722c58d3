"""Every example runs, and what it trains learns."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


# Libraries of extras that examples need, which take seconds to import.
LIBRARIES = {
    "accelerate_loop": ("accelerate",),
    "finetune": ("transformers",),
    "hf_bert": ("transformers",),
    "hf_trainer": ("transformers", "accelerate"),
    "lightning_module": ("lightning",),
    "lightning_parallel": ("lightning", "transformers"),
    "parallel_trainer": ("transformers", "accelerate"),
    "sft_trainer": ("transformers", "trl"),
}


@pytest.mark.parametrize(
    "example",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in LIBRARIES)) for path in EXAMPLES],
)
def test_an_example(example, forks):
    if example.stem not in LIBRARIES:
        (end,) = forks.command(str(example))
        return check(end.code, end.out, end.err)
    for library in LIBRARIES[example.stem]:
        pytest.importorskip(library, reason=f"{library} is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=240, env=environment)
    check(done.returncode, done.stdout, done.stderr)


def test_fine_tuning_on_real_text(forks, text_folder, tmp_path):
    """Speech and reply of a play. The exported model's loss of each answer, alone in transformers, is that of packs."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    speeches = (text_folder / "tinyshakespeare.txt").read_text().split("\n\n")
    pairs = [pair for pair in itertools.pairwise(speeches) if sum(map(len, pair)) < 300][:300]
    rows = [
        {"messages": [{"role": "user", "content": speech}, {"role": "assistant", "content": reply}]}
        for speech, reply in pairs
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    example = Path(__file__).parent.parent / "examples" / "finetune.py"
    (end,) = forks.command(str(example), tmp_path / "rows.jsonl", tmp_path / "out")
    check(end.code, end.out, end.err)
    everything = ("--max-sequences", "1000000", "--json")
    (end,) = forks.command("fmoe", "evaluate", tmp_path / "out" / "tuned", *everything)
    assert end.code == 0, end.err
    (told,) = json.loads(end.out)["runs"]

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "out")
    total = 0.0
    count = 0
    for row in rows[:20]:  # the example's validation data
        prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True)["input_ids"]
        tokens = torch.tensor([tokenizer.apply_chat_template(row["messages"])["input_ids"]])[:, : 128 + 1]
        with torch.no_grad():
            losses = torch.log_softmax(model(tokens).logits[0, :-1], -1).gather(1, tokens[0, 1:, None])
        total -= float(losses[len(prompt) - 1 :].sum())
        count += max(tokens.shape[1] - len(prompt), 0)
    assert told["tokens"] == count
    assert told["loss"] == pytest.approx(total / count, rel=1e-4)


def check(code, out, err):
    assert code == 0, err
    numbers = [float(line.split()[-1]) for line in out.splitlines() if re.match(r"step\s+\d+", line)]
    assert len(numbers) >= 2 and numbers[-1] < numbers[0], out
