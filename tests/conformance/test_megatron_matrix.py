"""Megatron's splits change nothing: every case of the cover equals one process in the loss of each of 20 steps, the
gradient of the first, every gradient norm, routing statistics of every layer, final parameters and moments."""

import itertools
import json
import os

import megatron_cover as cover
import megatron_splits as splits
import pytest
from cover import name_of
from forks import only, values

LIMIT = 1e-5
# Partial sums are rounded to 8 bits, and that decides which of nearly equal experts gets a token.
BF16_LIMIT = {"loss": 2e-2, "gradient norm": 0.2, "final": 2e-2, "load": 0.2}


@pytest.fixture(scope="module")
def alone(forks):
    """In one process, and in one micro batch instead of four, once a model, precision and optimizer."""
    known = {}

    def get(model, precision="fp32", optimizer="adamw"):
        key = model, precision, optimizer
        if key not in known:
            recipe = splits.recipe_of(model, precision=precision, optimizer=optimizer)
            known[key] = only(forks.run(1, splits.train, recipe, model))
        return known[key]

    return get


def row(model, layout, sequence, is_sharded, recompute="none", schedule="1f1b", optimizer="adamw"):
    return {
        "layout": layout,
        "sequence": sequence,
        "shard": "optimizer" if is_sharded else "none",
        "recompute": recompute,
        "schedule": schedule,
        "overlap": is_sharded,
        "model": model,
        "optimizer": optimizer,
    }


# Other models (`megatron_splits.BUILDERS`) and Muon; by default, tests/pretrain/engine has some of these cases.
OTHERS = [
    row("t5", "TP2", "on", False),
    row("t5", "TP2", "off", True, "full"),
    row("t5", "EP2", "-", True, "selective"),
    row("t5", "TP2xEP2", "on", True, "full"),
    row("t5", "TP2xEP2", "off", False, "selective"),
    row("t5", "TP2 ETP2", "on", False),
    row("bert", "TP2", "on", False),
    row("bert", "TP2", "off", True, "full"),
    row("bert", "EP2", "-", True, "selective"),
    row("bert", "TP2xEP2", "on", True, "full"),
    row("bert", "TP2xEP2", "off", False, "selective"),
    row("bert", "TP2 ETP2", "on", False),
    row("bert", "PP2xDP2", "-", True),
    row("gpt, modern", "TP2", "on", False),
    row("gpt, modern", "TP2", "off", True, "full"),
    row("gpt, modern", "EP2", "-", True, "selective"),
    row("gpt, modern", "TP2xEP2", "on", True),
    row("gpt, modern", "TP2xEP2", "off", False, "selective"),
    row("gpt, modern", "TP2 ETP2", "on", False),
    row("gpt, modern", "TP2xPP2", "on", True),
    row("gpt, modern", "PP2 VPP2", "-", False),
    row("gpt, modern", "EP2xDP2", "-", True),
    row("gpt, modern", "CP2xEP2", "-", True),
    row("gpt, modern", "CP4", "-", False, "full"),
    row("gpt, modern", "TP2xCP2", "on", False, "selective"),
    row("t5, modern", "TP2xEP2", "on", True),
    row("t5, modern", "TP2", "off", False, "selective"),
    row("gpt, latent attention", "TP2", "on", True),
    row("gpt, latent attention", "TP2", "off", False),
    row("gpt, latent attention", "EP2", "-", True, "full"),
    row("gpt, latent attention", "PP2", "-", False, "selective"),
    row("gpt, latent attention", "DP2", "-", True),
    row("gpt, latent attention", "PP2 VPP2", "-", False),
    row("gpt, latent attention", "TP2xPP2", "on", False, "full"),
    row("gpt, latent attention", "TP2xEP2", "on", True),
    row("gpt, latent attention", "TP2xEP2", "off", True, "selective"),
    row("gpt, latent attention", "TP2 ETP2", "on", False),
    row("gpt, mtp", "TP2", "on", False),
    row("gpt, mtp", "TP2", "off", True, "full"),
    row("gpt, mtp", "EP2", "-", True, "selective"),
    row("gpt, mtp", "PP2", "-", False),
    row("gpt, mtp", "PP2", "-", True, "full", "gpipe"),
    row("gpt, mtp", "PP4", "-", True),
    row("gpt, mtp", "PP2 VPP2", "-", True),
    row("gpt, mtp", "TP2xEP2 ETP2", "on", True, "selective"),
    row("gpt, mtp, dense and untied", "DP2", "-", True),
    row("gpt, mtp, dense and untied", "PP2", "-", True),
    row("gpt, mtp, dense and untied", "PP2 VPP2", "-", False, "full"),
    row("gpt, mtp, dense and untied", "TP2xPP2", "on", False, "selective"),
    row("gpt, mtp, dense and untied", "TP2xPP2", "off", True),
    *(
        row(*case, optimizer="muon")
        for case in (
            ("gpt", "DP2", "-", False),
            ("gpt", "PP2", "-", False),
            ("gpt", "PP4", "-", True),  # a stage without experts
            ("gpt, gated and untied", "TP2", "on", False),
            ("gpt, gated and untied", "DP2", "-", True),
            ("gpt, gated and untied", "EP2", "-", True),
            ("gpt, gated and untied", "PP2 VPP2", "-", True),
            ("gpt, gated and untied", "TP2xEP2 ETP2", "on", True),
            ("gpt, modern", "TP2", "off", True),
            ("gpt, modern", "TP2xEP2", "on", True),
            ("gpt, modern", "EP2xDP2", "-", True),
            ("gpt, modern", "TP2xPP2", "on", False),
            ("gpt, latent attention", "TP2xEP2", "on", True),
            ("bert", "TP2", "on", True),
            ("t5, modern", "TP2xEP2", "on", True),
            ("t5, modern", "EP2", "-", False),
            ("gpt, mtp", "TP2xPP2", "on", True),
        )
    ),
]


def log(line):
    if "FMOE_CONFORMANCE_LOG" in os.environ:
        with open(os.environ["FMOE_CONFORMANCE_LOG"], "a") as file:
            print(json.dumps(line), file=file)


def run(forks, case, precision="fp32"):
    recipe = splits.recipe_of(
        case["model"],
        precision=precision,
        optimizer=case.get("optimizer", "adamw"),
        **cover.parallel_of(case),
    )
    return values(forks.run(recipe.parallel.world_size, splits.train, recipe, case["model"]))


IN_CI = next(case for case in cover.CASES if case["layout"] == "PP2 VPP2" and case["shard"] == "none")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name_of(case), marks=[] if case is IN_CI else [pytest.mark.slow])
        for case in (*cover.CASES, *OTHERS)
    ],
)
def test_a_split_equals_one_process(forks, alone, case):
    errors = splits.errors(alone(case["model"], optimizer=case.get("optimizer", "adamw")), run(forks, case))
    worst = max(errors, key=errors.get)
    log(case | {"worst": errors[worst], "of": worst})
    assert len(errors) > 300
    assert not {name: error for name, error in errors.items() if error > LIMIT}


BF16 = {case["layout"]: case for case in cover.CASES if case["shard"] == "optimizer"}


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=layout) for layout, case in BF16.items()])
def test_a_split_in_bf16_is_near_one_process(forks, alone, case):
    errors = splits.errors(alone(case["model"], "bf16"), run(forks, case, "bf16"))
    worst = {}
    for name, error in errors.items():
        for kind in BF16_LIMIT:
            # Biases of norms begin at zero: what they are after some steps is rounding as much as anything.
            if name.startswith(f"{kind} ") and not name.endswith(("norm_bias", "norm.bias")):
                worst[kind] = max(worst.get(kind, 0.0), error)
    log({"bf16": case["layout"]} | worst)
    assert all(worst[kind] <= limit for kind, limit in BF16_LIMIT.items()), worst


@pytest.mark.slow
def test_the_case_means_something(alone):
    """Tokens are dropped, the gradient is clipped, losses fall, and statistics are of all layers with experts."""
    for model in cover.FACTORS["model"]:
        figures = alone(model).figures
        recipe = splits.BUILDERS[model].recipe
        for step, layer in itertools.product(range(splits.STEPS), recipe.model.moe.layers):
            assert figures[f"drop rate {step} {layer}"] > 0.01
            assert figures[f"tokens {step} {layer}"] == recipe.train.global_batch * splits.LENGTH
        assert all(figures[f"gradient norm {step}"] > recipe.optimizer.clip_grad for step in range(5))
        assert figures["validation"] < figures["validation before"]
