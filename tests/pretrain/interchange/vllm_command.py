"""Serve a folder with vLLM: ``python vllm_command.py FOLDER OUT < PROMPTS``. No test.

PROMPTS is a JSON list of lists of token ids. OUT becomes a JSON list of [token, log-probability] of each prompt's
greedy tokens. vLLM prints to the standard output.
"""

import json
import sys

NEW = 16


def main() -> None:
    from vllm import LLM, SamplingParams

    folder, out = sys.argv[1:]
    model = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=32, max_num_seqs=2, skip_tokenizer_init=True)
    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0, detokenize=False)
    results = model.generate([{"prompt_token_ids": ids} for ids in json.load(sys.stdin)], greedy)
    steps = [(result.outputs[0].token_ids, result.outputs[0].logprobs) for result in results]
    found = [[[t, by_id[t].logprob] for t, by_id in zip(*step, strict=True)] for step in steps]
    with open(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":  # vLLM's engine may be a process that imports this file
    main()
