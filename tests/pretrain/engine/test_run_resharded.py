"""A checkpoint goes on at another split, optimizer included: the next loss is the same, and so is every sample taken.

A chain is a list of splits that a run goes through; other splits join by adding chains.
"""

from dataclasses import replace

import pytest
import torch
from engines import ONE, RECIPE, STAGE, Samples, chained, digests, engine_of, load, save
from forks import values

CHAINS = dict.fromkeys(
    [
        "EP2, one, EP4",
        "EP2 ZeRO1, one ZeRO1, EP4 ZeRO1",
        "DP2, one, DP2",
        "DP2 ZeRO1, one ZeRO1, DP2 ZeRO1",
        "DP2 ZeRO1, EP2, EP2 DP2, one ZeRO1",
        "DP2 ZeRO1 bf16, EP2 bf16",
        "TP2, one, TP2",
        "CP2, one, CP2",
        "CP2 EP4 ZeRO1, TP2, CP2 PP2 ZeRO1",
        "PP2, one, PP2",
        "TP2 PP2, EP2 DP2",
        "TP2 PP2 ZeRO1, EP2 DP2 ZeRO1",
        "DP2 ZeRO1 overlap, one ZeRO1, DP2 ZeRO1 overlap",
        "TP2 DP2 ZeRO1, PP2",
    ]
) | {  # of `MODELS`
    "further tokens": "TP2 PP2, EP2 ZeRO1, PP2",
    "modern": "TP2 EP2, EP2 ZeRO1, TP2 PP2",
    "latent attention": "TP2, EP2 ZeRO1, PP2",
    "memory": "TP2, DP2 ZeRO1, PP2, one, EP2",
    "experts cut by TP, virtual stages": "TP2 ETP2, PP2 VPP2, TP2 ETP2 ZeRO1",
}
# More layers where there are virtual stages; a dense layer, gated blocks and an untied output layer to be cut.
MODELS = {
    "experts cut by TP, virtual stages": {
        "num_layers": 4,
        "moe.layers": (1, 4),
        "gated": True,
        "tie_embeddings": False,
    },
    "latent attention": {
        "attention.kv_lora_rank": 10,
        "attention.q_lora_rank": 12,
        "attention.qk_head_dim": 6,
        "attention.qk_rope_head_dim": 4,
        "attention.v_head_dim": 5,
        "tie_embeddings": False,
    },
    "further tokens": {"mtp_layers": 2},
    "memory": {"position.encoding": "transformer_xl", "position.memory_length": 24},
    "modern": {
        "attention.num_heads": 4,
        "attention.num_query_groups": 2,
        "attention.head_dim": 6,
        "attention.qk_norm": True,
        "norm": "rms",
        "moe.layers": (2,),
        "dense_ffn_hidden_size": 40,
        "moe.num_shared_experts": 2,
        "gated": True,
        "tie_embeddings": False,
    },
}
# Masters are fp32, but the sums of bf16 activations depend on the split.
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
GATES = {"switch": {}, "sigmoid": {"moe.gate": "sigmoid", "moe.capacity_factor": None}}


# A gate's buffer is replicated alike at every split: two chains do for it.
CASES = [(chain, "switch") for chain in CHAINS] + [(chain, "sigmoid") for chain in CHAINS if chain.startswith("EP")]


@pytest.mark.by_default("TP2 PP2 ZeRO1, EP2 DP2 ZeRO1-switch")
@pytest.mark.parametrize(("chain", "gate"), CASES)
def test_the_next_loss_is_the_same_at_another_split(forks, tmp_path, chain, gate):
    base = replace(RECIPE, model=RECIPE.model.with_values({**GATES[gate], **MODELS.get(chain, {})}))
    splits = CHAINS[chain] or chain
    taken = chained(forks, tmp_path, splits, base, TOLERANCE)
    count = len(splits.split(",")) * STAGE * base.train.global_batch
    assert sorted(taken) == list(range(count)), "a sample was taken twice or not at all"


def saved_and_loaded(folder, base):
    """Crc of everything that is loaded against what was saved, into an engine with other weights."""
    engine = engine_of(ONE.recipe(base))
    for step in range(3):
        engine.train_step(step, Samples())
    save(engine, folder, 3)
    before = digests(engine)
    for step in range(3, 5):
        engine.train_step(step, Samples())
    assert digests(engine) != before
    load(engine, folder)
    return before, digests(engine), engine.scheduler.num_steps


def test_gates_biases_and_modules_for_further_tokens_are_saved_and_loaded(forks, tmp_path):
    base = replace(RECIPE, model=RECIPE.model.with_values({**GATES["sigmoid"], "mtp_layers": 2}))
    ((before, after, num_steps),) = values(forks.run(1, saved_and_loaded, tmp_path, base))
    biases = [name for name in before if "expert_bias_E" in name]
    assert biases and all(name.startswith("model/") for name in biases)
    assert sum(name.startswith("model/mtp.layers.1.") for name in before) > 8
    assert after == before
    assert num_steps == 3
    from pretrain.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(tmp_path)
    assert all(checkpoint.read(name).abs().sum() > 0 for name in biases), "the bias never moved"


def draws():
    """States of every generator through JSON and back: what is drawn afterwards is what was drawn before."""
    import random

    import numpy as np
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from pretrain.checkpoint import codec
    from pretrain.engine import rng

    engine_of(ONE.recipe(RECIPE))

    def draw():
        with get_cuda_rng_tracker().fork():
            tracked = torch.rand(3).tolist()
        generator = np.random  # the global one is what libraries draw from
        return random.random(), random.gauss(0, 1), generator.rand(), generator.randn(), torch.rand(3).tolist(), tracked

    random.gauss(0, 1)
    np.random.randn()  # noqa: NPY002 - each leaves half a pair behind, which is state too
    text = codec.dumps(rng.states(), "rng")
    first = draw()
    second = draw()
    rng.restore(codec.loads(text))
    return first == draw() and second == draw() and first != second, text.decode()


def test_every_generator_comes_back(forks):
    ((are_same, text),) = values(forks.run(1, draws))
    assert are_same
    assert all(f'"{name}"' in text for name in ("python", "numpy", "torch", "megatron"))
