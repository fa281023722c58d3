"""Serve folders with vLLM: ``python vllm_command.py OUT < JOBS``. No test.

JOBS is a JSON list of folders with a list of token ids each, the prompt. OUT becomes a JSON list with a list of
[token, log-probability] of each folder's greedy tokens, or the line with which vLLM refused the folder. vLLM prints to
the standard output.
"""

import gc
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NEW = 16
OPTIONS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # no waits for the compiler
    "HF_HUB_OFFLINE": "1",
}


def vllm_python() -> str | None:
    """The path of a Python with vLLM, or None."""
    return os.environ.get("FMOE_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)


def serve(python: str, models: Mapping[str, Path], prompts: Mapping[str, list[int]], folder: Path) -> list[Any]:
    """Results of folders by name, one prompt each; ``folder`` gets vLLM's output."""
    out, jobs = folder / "served.json", [(str(path), prompts[name]) for name, path in models.items()]
    with (folder / "vllm.log").open("w") as log:
        subprocess.run(
            [python, __file__, str(out)],
            input=json.dumps(jobs),
            text=True,
            env=os.environ | OPTIONS,
            stdout=log,
            stderr=log,
            check=True,
        )
    return list(json.loads(out.read_text()))


def served(folder: str, prompt: list[int]) -> Any:
    """Greedy tokens of a folder's model with their log-probabilities; or the first line of vLLM's error."""
    from vllm import LLM, SamplingParams

    try:
        model = LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=32,
            max_num_seqs=2,
            skip_tokenizer_init=True,
        )
        greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0, detokenize=False)
        (result,) = model.generate([{"prompt_token_ids": prompt}], greedy)
    except Exception as error:  # of any kind: it is the result
        return f"{type(error).__name__}: {error}".strip().split("\n")[0]
    steps = zip(result.outputs[0].token_ids, result.outputs[0].logprobs, strict=True)
    return [[token, by_id[token].logprob] for token, by_id in steps]


def main() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    found = []
    for folder, prompt in json.load(sys.stdin):
        found.append(served(folder, prompt))
        gc.collect()
        cleanup_dist_env_and_memory()
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":  # vLLM's engine may be a process that imports this file
    main()
