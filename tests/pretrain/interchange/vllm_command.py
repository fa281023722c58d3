"""Serve folders with vLLM: ``python vllm_command.py OUT FOLDER... < PROMPTS``. No test.

PROMPTS is a JSON list of lists of token ids. OUT becomes a JSON list with, of each folder, a list of
[token, log-probability] of each prompt's greedy tokens, or the line with which vLLM refused the folder. vLLM prints to
the standard output.
"""

import gc
import json
import sys
from typing import Any

NEW = 16


def served(folder: str, prompts: list[list[int]]) -> Any:
    """Greedy tokens of a folder's model with their log-probabilities; or the last line of vLLM's error."""
    from vllm import LLM, SamplingParams

    try:
        model = LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=32,
            max_num_seqs=2,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
        )
        greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0, detokenize=False)
        results = model.generate([{"prompt_token_ids": ids} for ids in prompts], greedy)
    except Exception as error:  # of any kind: it is the result
        return f"{type(error).__name__}: {error}".strip()
    steps = [(result.outputs[0].token_ids, result.outputs[0].logprobs) for result in results]
    return [[[t, by_id[t].logprob] for t, by_id in zip(*step, strict=True)] for step in steps]


def main() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    out, *folders = sys.argv[1:]
    prompts, found = json.load(sys.stdin), []
    for folder in folders:
        found.append(served(folder, prompts))
        gc.collect()
        cleanup_dist_env_and_memory()
    with open(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":  # vLLM's engine may be a process that imports this file
    main()
