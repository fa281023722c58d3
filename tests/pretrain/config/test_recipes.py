"""The recipes that are shipped have published sizes, by arithmetic and on the meta device, and train, made small."""

import re
import shlex
from pathlib import Path

import pytest
from forks import only
from runs import steps, train

from fmoe.random import key
from pretrain.config import load_recipe
from pretrain.config.load import RECIPES

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"
NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))
# Parameters in all and active, as this project builds them.
COUNTS = {
    "bert": (6_337_472, 2_208_704),
    "deepseek-moe-16b": (16_375_728_128, 2_828_650_496),
    "deepseek-v2-lite": (15_706_484_224, 2_661_150_208),
    "gpt-64-bytes": (409_289_728, 19_219_456),
    "gpt-96": (4_935_960_576, 204_785_664),
    "gshard-600b": (619_333_802_496, 1_462_491_648),
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248),
    "quickstart": (10_434_240, 2_176_704),
    "qwen3-moe-30b-a3b": (30_532_122_624, 3_353_032_704),
    "switch-base": (7_415_217_408, 224_083_200),
    "switch-c": (1_571_308_972_448, 1_728_326_048),
    "switch-large": (26_309_291_008, 740_813_824),
    "switch-xxl": (394_543_508_864, 11_016_351_104),
    "t5": (12_796_160, 4_538_624),
    "transformer-xl-64": (821_601_280, 41_460_736),
    "transformer-xl-dense": (41_067_520, 41_067_520),
}
# What papers and model cards say, in billions, and how far from it the rounding goes.
PUBLISHED = {
    "switch-base": ((7.4, 0.05), None),
    "switch-large": ((26, 0.5), None),
    "switch-xxl": ((395, 0.5), None),
    "switch-c": ((1571, 0.5), None),
    "gshard-600b": ((600, 30), (1.5, 0.05)),  # the active ones from GLaM, arXiv 2112.06905
    "mixtral-8x7b": ((46.7, 0.05), (12.9, 0.05)),  # its announcement; the paper has 47 and 13
    "deepseek-moe-16b": ((16.4, 0.05), (2.8, 0.05)),
    "deepseek-v2-lite": ((15.7, 0.05), None),  # active: see below
    "qwen3-moe-30b-a3b": ((30.5, 0.05), (3.3, 0.06)),  # 3.35, which its card cuts off
}
# Processes of a grid that the published size asks for.
WORLD_SIZES = {"switch-c": 2048, "gshard-600b": 2048, "switch-xxl": 512, "gpt-96": 8, "switch-base": 8}


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_the_published_ones(name):
    recipe = load_recipe(name)
    counts = recipe.num_params(), recipe.num_active_params()
    assert counts == COUNTS[name]
    for count, published in zip(counts, PUBLISHED.get(name, ()), strict=False):
        if published is not None:
            value, rounding = published
            assert abs(count / 1e9 - value) <= rounding, f"{count:,}"
    assert recipe.parallel.world_size == WORLD_SIZES.get(name, recipe.parallel.world_size)


def test_published_active_parameters_without_the_embedding():
    """DeepSeek-V2-Lite's 2.4 billion, which cut off 2.45, leave out the matrix whose rows are looked up."""
    recipe = load_recipe("deepseek-v2-lite")
    active = recipe.num_active_params() - recipe.model.vocab_size * recipe.model.hidden_size
    assert 2.4e9 <= active < 2.5e9


def counted(names):
    """(parameters, those of experts that a token does not meet) of whole models on the meta device."""
    import torch.distributed as dist

    from fmoe.parallel import is_expert
    from pretrain.engine.meta import build_on_meta

    dist.destroy_process_group()
    found = []
    for name in names:
        recipe = load_recipe(name)
        parameters = list(build_on_meta(recipe).parameters())
        assert all(p.is_meta for p in parameters)
        experts = sum(p.numel() for p in parameters if is_expert(p))
        idle = experts // max(recipe.model.moe.num_experts, 1) * (recipe.model.moe.num_experts - recipe.model.moe.top_k)
        found.append((sum(p.numel() for p in parameters), idle))
    return found


@pytest.mark.slow
def test_models_on_the_meta_device_have_as_many(forks):
    for name, (built, idle) in zip(NAMES, only(forks.run(1, counted, NAMES)), strict=True):
        assert (built, built - idle) == COUNTS[name], name


def size_of(count):
    return f"{count / 1e9:,.1f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"


def test_the_table_of_the_page_is_what_the_recipes_say():
    rows = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if len(cells) == 9 and (found := re.fullmatch(r"`([\w-]+)`", cells[0])):
            rows[found[1]] = cells
    assert sorted(rows) == NAMES
    for name, (_, _source, *cells) in rows.items():
        recipe = load_recipe(name)
        model, parallel = recipe.model, recipe.parallel
        layers = f"{model.num_layers} + {model.decoder_layers}" if model.decoder_layers else str(model.num_layers)
        shared = f" + {model.moe.num_shared_experts}" if model.moe.num_shared_experts else ""
        grid = parallel.world_size_name.replace("parallel.", "").replace("=", " ").removesuffix(" x data 1")
        assert cells == [
            layers,
            f"{model.hidden_size:,}",
            f"{model.moe.num_experts:,}{shared} of {model.ffn_hidden_size:,}",
            str(model.moe.top_k),
            size_of(recipe.num_params()),
            size_of(recipe.num_active_params()),
            f"{grid} = {parallel.world_size:,}" if " x " in grid else grid,
        ], name


def small(name):
    """Options that the page gives to try a recipe on a laptop."""
    scripts = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.S)
    script = next(text for text in scripts if f"fmoe train {name} " in text)
    words = shlex.split(script.replace("\\\n", " "), comments=True)
    start = words.index(name) + 1
    return words[start : words.index("fmoe", start) if "fmoe" in words[start:] else None]


# What the page says to add.
OF_DEEPSEEK = ["--moe.layers", "2", "--model.dense-ffn-hidden-size", "256"]
OF_LATENT = ["--attention.head-dim", "none", "--attention.kv-lora-rank", "32", "--attention.qk-head-dim", "16"]
OF_LATENT += ["--attention.qk-rope-head-dim", "8", "--attention.v-head-dim", "16"]
OF_XL = ["--position.memory-length", "128"]
OF_DENSE = ["--moe.num-experts", "0", "--parallel.expert", "1", "--parallel.data", "2"]
OF_T5 = ["--model.num-decoder-layers", "2", "--moe.group-size", "none"]
IN_CI = ("mixtral-8x7b", "switch-c")
OF_THEIR_OWN = ("quickstart", "t5", "bert")  # trained by other tests


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_CI else [pytest.mark.slow])
        for name in NAMES
        if name not in OF_THEIR_OWN
    ],
)
def test_made_small_it_trains(forks, tiny_corpus, tmp_path, name):
    recipe = load_recipe(name)
    options = small("mixtral-8x7b")
    if recipe.model.kind == "t5":
        options += OF_T5
    if recipe.model.position.memory_length:
        options += OF_XL
    if not recipe.model.moe.num_experts:
        options += OF_DENSE
    if recipe.model.attention.num_query_groups is None:
        options += ["--attention.num-query-groups", "none"]
    if name.startswith("deepseek"):
        options += OF_DEEPSEEK
    if recipe.model.attention.kv_lora_rank is not None:
        options += OF_LATENT
    options += ["--run.folder", tmp_path / "run", "--train.steps", "2", "--train.seed", str(key("recipe", name) % 1000)]
    options += ["--optimizer.warmup-steps", "0", "--tracking.no-wandb", "--model.vocab-size", "384"]
    options += ["--data.tokenizer", tiny_corpus.tokenizer, "--model.sequence-length", "32"]
    options += ["--data.train", tiny_corpus.train, "--data.validation", tiny_corpus.validation]
    trained = load_recipe(name, list(map(str, options)))
    train(forks, name, *options, size=trained.parallel.world_size)
    rows = steps(tmp_path / "run")
    assert sorted(rows) == [0, 1, 2]
    assert rows[2]["loss"] < 10 and rows[2]["grad_norm"] > 0
    # Of the published model, what is not size stays.
    of_model = ("kind", "norm", "gated", "activation", "tie_embeddings")
    for of in (*of_model, "moe.gate", "moe.normalize", "moe.balance_loss", "attention.qk_norm"):
        assert trained.model.value(of) == recipe.model.value(of)
    assert (trained.model.attention.num_query_groups is None) == (recipe.model.attention.num_query_groups is None)
