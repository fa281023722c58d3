"""The table of recipes and families: ``python tests/conformance/exports.py [RECIPE...]``. Not a test.

Shrinks each recipe, keeps its options, draws all weights, norms and biases included, exports with ``--format auto``,
compares the logits of transformers with ours, imports the folder again, exports that, and compares the bits.
"""

import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmoe.errors import UserError
from pretrain.config import OptimizerConfig, ParallelConfig, Recipe, TrainConfig, load_recipe
from pretrain.config.load import shipped_recipes
from pretrain.interchange import export_checkpoint, import_folder
from pretrain.interchange.families import family_for

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent)]

from compare import relative_error  # noqa: E402
from forks import ForkServer, only  # noqa: E402

LIMIT = 1e-5  # of logits in float32, norm-wise
LENGTH, VOCAB = 16, 64
# Classes of transformers by kind, and whether their decoder gets its own tokens.
CLASSES = {"gpt": "AutoModelForCausalLM", "t5": "AutoModelForSeq2SeqLM", "bert": "AutoModelForMaskedLM"}


def small(recipe: Recipe) -> Recipe:
    """The recipe with few narrow layers, of the same kinds and with the same options."""
    model = recipe.model
    last = {"t5": 2, "gpt": 3, "bert": 4}[model.kind] if model.moe_layers or model.kind != "gpt" else 2
    per_group = model.num_heads // model.query_groups
    experts = min(model.num_experts, 8)
    small = replace(
        model,
        num_layers=last,
        num_decoder_layers=None if model.num_decoder_layers is None else last,
        moe_layers=tuple(n for n in model.moe_layers if n <= last),
        hidden_size=32,
        num_heads=4,
        num_query_groups=None if model.num_query_groups is None else max(4 // per_group, 1),
        head_dim=None if model.head_dim is None else 16 if model.kind == "t5" else 12,
        kv_lora_rank=None if model.kv_lora_rank is None else 10,
        q_lora_rank=None if model.q_lora_rank is None else 14,
        qk_head_dim=None if model.qk_head_dim is None else 8,
        qk_rope_head_dim=None if model.qk_rope_head_dim is None else 4,
        v_head_dim=None if model.v_head_dim is None else 6,
        ffn_hidden_size=24,
        dense_ffn_hidden_size=None if model.dense_ffn_hidden_size is None else 40,
        sequence_length=LENGTH,
        vocab_size=VOCAB,
        num_experts=experts,
        top_k=min(model.top_k, max(experts // 2, 1)),
        group_size=None if model.group_size is None else 2 * LENGTH,
        init_std=0.2,
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
        return "model.eval_capacity_factor" in str(error)
    return False


def random_run(recipe: Recipe, path: Path, batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
    """Saves a checkpoint of the recipe with random weights; our model, and its logits [b, s, V]."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_patch import cpu
    from pretrain.checkpoint import save
    from pretrain.engine import Engine, init_parallel, state
    from pretrain.models import kind_of
    from pretrain.process import Processes

    cpu.install()
    processes = Processes(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    if not parallel_state.model_parallel_is_initialized():
        init_parallel(recipe, processes)
    engine = Engine(recipe, processes)
    (model,) = engine.chunks
    torch.manual_seed(3)
    with torch.no_grad():
        for name, tensor in state._tensors([model]):
            if "norm" in name and name.endswith("weight"):
                tensor.uniform_(0.5, 1.5)
            elif "norm" in name or name.endswith(("bias", "bias_E", "bias_in", "bias_out", "softmax_offset")):
                tensor.uniform_(-0.3, 0.3)
            elif ".gate." in name:
                tensor.normal_(0, 0.5)
    pieces = (piece for piece in state.pieces(engine) if piece.name.startswith("model/"))
    save(path, 1, pieces, {"recipe": asdict(recipe), "weights_only": True}, state.rank_state())
    model.eval()
    with torch.no_grad():
        return model, kind_of(recipe).forward(model, batch)


def our_logits(runs: list[tuple[Recipe, Path]]) -> list[Tensor]:
    """Saves random runs; the logits of each. For a process of `forks`."""
    return [random_run(recipe, path, batch_of(recipe))[1] for recipe, path in runs]


def batch_of(recipe: Recipe) -> dict[str, Tensor]:
    """Random tokens, more than one routing group of them."""
    generator = torch.Generator().manual_seed(7)
    lengths = {"tokens": LENGTH} | ({"decoder_tokens": LENGTH // 2} if recipe.model.kind == "t5" else {})
    return {name: torch.randint(0, VOCAB, (4, length), generator=generator) for name, length in lengths.items()}


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


def weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's files."""
    from safetensors.torch import load_file

    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def same_bits(one: Path, other: Path) -> bool:
    """Return whether two folders have the same tensors."""
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(
        first[name].dtype == value.dtype and torch.equal(first[name], value) for name, value in second.items()
    )


def table(forks: ForkServer, recipes: dict[str, Recipe], folder: Path) -> dict[str, dict[str, Any]]:
    """Of each recipe its family, what loading needs, the distance of logits, and whether it comes back bit-equal; or
    the line that refuses it."""
    recipes = {name: small(recipe) for name, recipe in recipes.items()}
    dropless = {name for name, recipe in recipes.items() if needs_no_drops(recipe)}
    for name in dropless:
        recipes[name] = replace(recipes[name], model=replace(recipes[name].model, eval_capacity_factor=None))
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
        distance = relative_error(logits[..., :VOCAB], expected[..., :VOCAB])
        found[name] |= {"distance": distance, "back": same_bits(out, again)}
    return found


def line(name: str, found: dict[str, Any]) -> str:
    """A line of the Markdown table."""
    if found["family"] is None:
        return f"| `{name}` | none: {found['line']} | | | |"
    distance = f"{found['distance']:.0e}" if found["distance"] else "0"
    is_back = "bit-equal" if found["back"] else "DIFFERS"
    return f"| `{name}` | `{found['family']}` | {found['needs']} | {distance} | {is_back} |"


def main(names: list[str]) -> int:
    """Prints the table; 1 if a distance is too large or bits differ."""
    recipes = {Path(name).stem: load_recipe(name) for name in names or shipped_recipes()}
    with tempfile.TemporaryDirectory() as folder, ForkServer(Path(folder)) as forks:
        found = table(forks, recipes, Path(folder))
    print("| recipe | family | needs | distance of logits | imported again |\n|---|---|---|---|---|")
    for name, values in found.items():
        print(line(name, values))
    held = [values for values in found.values() if values["family"]]
    return 0 if all(values["distance"] <= LIMIT and values["back"] for values in held) else 1


if __name__ == "__main__":
    import exports  # its functions travel to processes by the module's name

    sys.exit(exports.main(sys.argv[1:]))
