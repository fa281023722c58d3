"""The best sizes, compared with a dense search and with tables of the papers; recipe keys."""

import math
import tomllib

import pytest

from pretrain.config.load import build_recipe, load_recipe
from pretrain.planner.laws import LAWS, Size
from pretrain.planner.sizing import optimum, plan, recipe_keys, result, text

INFINITE = math.inf
# Ludziejewski et al., table 1: FLOPs, experts, active parameters, tokens.
TABLE_1 = [
    *[(1e20, 1, 1.7e9, 9.7e9), (1e20, 2, 1.5e9, 11.4e9), (1e20, 4, 1.2e9, 13.9e9), (1e20, 8, 990e6, 17e9)],
    *[(1e20, 16, 810e6, 20.7e9), (1e20, 32, 669e6, 24.9e9), (1e21, 1, 5.7e9, 29.3e9), (1e21, 2, 5e9, 33e9)],
    *[(1e21, 4, 4.4e9, 38e9), (1e21, 8, 3.8e9, 44.3e9), (1e21, 16, 3.3e9, 51.2e9), (1e21, 32, 2.85e9, 58.4e9)],
    *[(1e22, 1, 18.8e9, 88.6e9), (1e22, 2, 17.4e9, 96e9), (1e22, 4, 15.8e9, 105.4e9), (1e22, 8, 14.4e9, 115.8e9)],
    *[(1e22, 16, 13.2e9, 126.5e9), (1e22, 32, 12.2e9, 136.9e9)],
]
# Krajewski et al., table 2: FLOPs, active parameters, tokens, granularity, loss.
TABLE_2 = [
    (2.95e18, 100e6, 4.37e9, 8, 3.133),
    (1.93e20, 1e9, 28.94e9, 16, 2.491),
    (1.41e21, 3e9, 72.90e9, 16, 2.245),
    (6.46e21, 7e9, 137.60e9, 32, 2.076),
    (4.16e23, 70e9, 941.07e9, 32, 1.694),
    (5.69e24, 300e9, 2.96e12, 64, 1.503),
    (4.97e25, 1e12, 7.94e12, 64, 1.367),
]
# Ludziejewski et al., table 2: FLOPs, bytes of memory, best number of experts. At 32, the table says 32 or more.
TABLE_MEMORY = [
    *[(1e21, 24e9, 16), (1e21, 80e9, 32), (1e21, 640e9, 32), (1e22, 24e9, 4), (1e22, 80e9, 16), (1e22, 640e9, 32)],
    *[(1e23, 24e9, 1), (1e23, 80e9, 8), (1e23, 640e9, 32), (1e24, 24e9, 1), (1e24, 80e9, 1), (1e24, 640e9, 16)],
]


@pytest.mark.parametrize(("flops", "experts", "active", "tokens"), TABLE_1)
def test_table_1_of_ludziejewski(flops, experts, active, tokens):
    """Heads of 64 make neighbouring widths differ by 3% to 5%."""
    size = optimum(LAWS["ludziejewski"]._replace(expansions=[experts]), flops, INFINITE)
    assert size.active == pytest.approx(active, rel=0.03)
    assert size.tokens == pytest.approx(tokens, rel=0.03)


@pytest.mark.parametrize(("flops", "active", "tokens", "granularity", "loss"), TABLE_2)
def test_table_2_of_krajewski(flops, active, tokens, granularity, loss):
    """Losses agree as far as the printed coefficients allow, which have two or three digits."""
    size = optimum(LAWS["krajewski-64"], flops, INFINITE)
    assert size.granularity == granularity
    assert size.active == pytest.approx(active, rel=0.05)
    assert size.tokens == pytest.approx(tokens, rel=0.05)
    assert size.loss == pytest.approx(loss, rel=0.01)


@pytest.mark.parametrize(("flops", "memory", "experts"), TABLE_MEMORY)
def test_table_2_of_ludziejewski(flops, memory, experts):
    """The table also counts a cache of keys and values, so the best numbers of experts may differ by a factor of 2."""
    size = optimum(LAWS["ludziejewski"], flops, memory / 2)  # parameters in 2 bytes
    assert size.total <= memory / 2
    assert 0.5 <= size.expansion / experts <= 2


@pytest.mark.parametrize("max_params", [INFINITE, 3e9])
@pytest.mark.parametrize("flops", [1e19, 1e20, 1e22])
@pytest.mark.parametrize("name", LAWS)
def test_no_size_of_a_dense_search_is_better(name, flops, max_params):
    """1,000 depths that are no whole numbers, and widths of exactly 64 times the depth."""
    law = LAWS[name]
    best = math.inf
    for expansion in law.expansions:
        for granularity in law.granularities:
            for step in range(1000):
                layers = 2 * 300 ** (step / 1000)
                size = Size(law, flops, expansion, granularity, layers, 64 * layers)
                if size.tokens * size.flops_per_token <= flops and size.total <= max_params:
                    best = min(best, size.loss)
    found = optimum(law, flops, max_params)
    assert found.tokens * found.flops_per_token <= flops * 1.000001
    assert found.total <= max_params
    assert found.loss <= best * 1.01


@pytest.mark.parametrize(
    ("flops", "max_params"),
    [
        (1e17, INFINITE),
        (1e19, INFINITE),
        (1e19, 2e8),
        (1e21, INFINITE),
        (1e21, 2e8),
        (1e24, INFINITE),
        (1e27, INFINITE),
    ],
)
@pytest.mark.parametrize("name", LAWS)
def test_recipe_keys_pass_the_check(name, flops, max_params):
    """The keys replace those of the quickstart recipe. The model then has the parameters of the plan."""
    size = optimum(LAWS[name], flops, max_params)
    values = load_recipe("quickstart").values()
    for section, keys in recipe_keys(size).items():
        values[section] |= keys
    values["model"]["vocab_size"] = 50257
    if size.expansion == 1:
        values["parallel"]["expert"] = 1
    recipe = build_recipe(values)
    recipe.check()
    law = size.law
    experts = size.expansion * size.granularity
    assert recipe.model.routed_experts == (experts if experts > 1 else 0)
    assert recipe.model.chosen_experts == size.granularity
    assert recipe.model.expert_width == result(size)["figures"]["expert_width"]
    # The law counts no routers, and perhaps other embeddings. Clark et al.'s attention has a fifth matrix.
    tables = 1 if recipe.model.tie_embeddings else 2
    uncounted = (tables * 50257 - 2 * law.vocabulary) * size.width
    uncounted += size.layers // law.every * size.width * recipe.model.routed_experts
    uncounted -= (law.attention - 4) * size.layers * size.width**2
    assert recipe.num_params() - uncounted == pytest.approx(size.total, rel=0.01)
    assert recipe.num_active_params() - uncounted == pytest.approx(size.active, rel=0.01)
    batch = recipe.train.global_batch * recipe.model.sequence_length
    assert batch == law.batch_tokens
    assert batch * recipe.train.steps == pytest.approx(size.tokens, abs=batch)


def test_extrapolation_is_labelled():
    inside = result(optimum(LAWS["ludziejewski"], 1e19, INFINITE))
    assert inside["extrapolation"] == []
    outside = result(optimum(LAWS["ludziejewski"], 1e21, INFINITE))
    assert outside["extrapolation"] == ["total_parameters", "active_parameters", "loss"]
    assert result(None) == {"figures": {}, "extrapolation": []}


def test_text_ends_with_toml():
    planned = plan(1e21, "krajewski-16", INFINITE)
    lines = text(planned)
    assert tomllib.loads(lines[lines.index("# size") :]) == planned["recipe"]
    for name, entry in planned["laws"].items():
        table = lines.split(f"\n{name}: ")[1].split("\n\n")[0]
        assert entry["source"] in table
        assert table.count("extrapolation") == len(entry["extrapolation"])


def test_text_says_that_no_size_fits():
    lines = text(plan(1e20, "clark", 2e6))
    assert "no size" in lines.split("\nkrajewski-64: ")[1].split("\n\n")[0]
    assert "no size" not in lines.split("\nkrajewski-16: ")[1].split("\n\n")[0]
