"""Multi-latent attention against the equations of DeepSeek-V2 (arXiv 2405.04434 section 2.1), and its checks."""

import math
from dataclasses import replace

import pytest
import torch
from compare import assert_close
from forks import only, values
from test_run_optim import assert_split_equals_one
from test_run_split_engine import RECIPE, engine_of

from fmoe.errors import UserError
from pretrain.config import ModelConfig, ParallelConfig, Recipe

HEADS, CONTENT, ROTARY, VALUE, RANK, THETA, EPS = 3, 6, 4, 5, 10, 100.0, 1e-3
SCALE = 1 / math.sqrt(CONTENT + ROTARY)
KEYS = {"kv_lora_rank": RANK, "qk_head_dim": CONTENT, "qk_rope_head_dim": ROTARY, "v_head_dim": VALUE}
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,  # which HEADS does not divide
    num_heads=HEADS,
    **KEYS,
    rope_theta=THETA,
    norm="rms",
    norm_eps=EPS,
    ffn_hidden_size=24,
    sequence_length=8,
    vocab_size=32,
    num_experts=4,
    init_std=0.5,
)


def rotated(x, position):
    """Rotate the pairs (0, 1), (2, 3), ... of a vector, each as a complex number."""
    angles = position * THETA ** (-torch.arange(0, len(x), 2).double() / len(x))
    turned = torch.view_as_complex(x.reshape(-1, 2)) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten()


def normalized(x, weight):
    return x / (x.square().mean() + EPS).sqrt() * weight


def reference(weights, hidden):
    """Map one sequence [s, h] to the output of attention, token by token and head by head."""
    down, up = weights["linear_kv_down_proj.weight"], weights["linear_kv_up_proj.weight"].view(HEADS, -1, RANK)
    queries, keys, values, outputs = [], [], [], []
    for position, h in enumerate(hidden):
        if "linear_q_proj.weight" in weights:
            q = weights["linear_q_proj.weight"] @ h
        else:
            compressed = normalized(weights["linear_q_down_proj.weight"] @ h, weights["q_layernorm.weight"])
            q = weights["linear_q_up_proj.weight"] @ compressed
        latent = normalized(down[:RANK] @ h, weights["kv_layernorm.weight"])
        shared_key = rotated(down[RANK:] @ h, position)
        queries.append([torch.cat([x[:CONTENT], rotated(x[CONTENT:], position)]) for x in q.view(HEADS, -1)])
        keys.append([torch.cat([up[head, :CONTENT] @ latent, shared_key]) for head in range(HEADS)])
        values.append([up[head, CONTENT:] @ latent for head in range(HEADS)])
        heads = []
        for head in range(HEADS):
            scores = torch.stack([queries[position][head] @ key[head] for key in keys]) * SCALE
            heads.append(sum(p * value[head] for p, value in zip(scores.softmax(0), values, strict=True)))
        outputs.append(weights["linear_proj.weight"] @ torch.cat(heads))
    return torch.stack(outputs)


def both(rank):
    """(ours, the reference's): output and gradients of input and weights, of two sequences."""
    import torch.distributed as dist

    from megatron_patch import cpu
    from pretrain.engine import init_parallel
    from pretrain.engine.model import build_model
    from pretrain.start.process import Processes

    cpu.install()
    recipe = Recipe(model=replace(MODEL, q_lora_rank=rank))
    recipe.check()
    init_parallel(recipe, Processes(dist.get_rank(), 1, torch.device("cpu")))
    attention = build_model(recipe).decoder.layers[1].self_attention
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            if "layernorm" in name:
                parameter.uniform_(0.5, 1.5)
    hidden, d_out = torch.randn(2, 7, 2, 16)
    ours = hidden.clone().requires_grad_()
    out, _ = attention(ours, None)
    out.backward(d_out)
    weights = {name: p.detach().double().requires_grad_() for name, p in attention.named_parameters()}
    theirs = hidden.double().requires_grad_()
    expected = torch.stack([reference(weights, theirs[:, n]) for n in range(2)], dim=1)
    expected.backward(d_out.double())
    found = {"out": out.detach(), "hidden": ours.grad} | {n: p.grad for n, p in attention.named_parameters()}
    return found, {"out": expected.detach(), "hidden": theirs.grad} | {n: p.grad for n, p in weights.items()}


@pytest.mark.parametrize("rank", [None, 12], ids=["full queries", "compressed queries"])
def test_output_and_gradients_are_those_of_the_paper(forks, rank):
    ours, expected = only(forks.run(1, both, rank))
    assert len(ours) == (7 if rank is None else 9)
    for name, value in expected.items():
        assert_close(ours[name].double(), value, 1e-5, name)


REFUSED = {
    "a key without the rank": ({"kv_lora_rank": None}, {}, ["model.qk_head_dim=6", "model.kv_lora_rank"]),
    "no width": ({"v_head_dim": None}, {}, ["model.kv_lora_rank=10", "model.v_head_dim"]),
    "odd rotary width": ({"qk_rope_head_dim": 3}, {}, ["model.qk_rope_head_dim=3", "even"]),
    "no rank": ({"kv_lora_rank": 0}, {}, ["model.kv_lora_rank=0"]),
    "negative rank of queries": ({"q_lora_rank": -1}, {}, ["model.q_lora_rank=-1"]),
    "t5": ({"kind": "t5"}, {}, ["model.kv_lora_rank=10", "model.kind=gpt", "t5"]),
    "bert": ({"kind": "bert"}, {}, ["model.kv_lora_rank=10", "model.kind=gpt", "bert"]),
    "learned positions": ({"position": "learned_absolute"}, {}, ["model.kv_lora_rank=10", "learned_absolute"]),
    "groups": ({"num_query_groups": 3}, {}, ["model.num_query_groups=3", "model.kv_lora_rank=10"]),
    "width of heads": ({"head_dim": 4}, {}, ["model.head_dim=4", "model.kv_lora_rank=10"]),
    "norms of heads": ({"qk_norm": True}, {}, ["model.qk_norm=true", "model.kv_lora_rank=10"]),
    "biases": ({"qkv_bias": True}, {}, ["model.qkv_bias=true", "model.kv_lora_rank=10"]),
    "rotary fraction": ({"rotary_fraction": 0.5}, {}, ["model.rotary_fraction=0.5", "model.kv_lora_rank"]),
    "context": ({"num_heads": 4}, {"context": 2}, ["parallel.context=2", "model.kv_lora_rank=10"]),
    "ranks of keys": (
        {"num_heads": 4, "kv_lora_rank": 9},
        {"tensor": 2},
        ["parallel.tensor=2", "model.kv_lora_rank + model.qk_rope_head_dim=13"],
    ),
    "ranks of queries": ({"num_heads": 4, "q_lora_rank": 9}, {"tensor": 2}, ["parallel.tensor=2", "q_lora_rank=9"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_combination_is_named(case):
    model, parallel, parts = REFUSED[case]
    with pytest.raises(UserError) as error:
        Recipe(model=replace(MODEL, **model), parallel=ParallelConfig(**parallel)).check()
    assert all(part in str(error.value) for part in parts) and "\n" not in str(error.value), str(error.value)


ENGINE = replace(
    RECIPE, model=replace(RECIPE.model, norm="rms", q_lora_rank=12, num_shared_experts=1, rope_theta=THETA, **KEYS)
)


def recipe_of(optimizer, distributed=False, **parallel):
    options = {"adamw": {}, "lamb": {"lr": 2e-2, "max_trust": 20.0}, "adafactor": {"lr": 5e-2, "min_lr": 1e-2}}
    options |= {"lars": {"lr": 0.5, "trust_coefficient": 0.05}, "muon": {}}
    optimizer = replace(ENGINE.optimizer, name=optimizer, distributed=distributed, **options[optimizer])
    return replace(ENGINE, optimizer=optimizer, parallel=ParallelConfig(**parallel))


SPLITS = {
    "adamw, TP2": recipe_of("adamw", tensor=2, sequence=False),
    "adamw, TP2 SP": recipe_of("adamw", True, tensor=2),
    "adamw, EP2": recipe_of("adamw", True, expert=2, recompute="full"),
    "muon, TP2 SP": recipe_of("muon", True, tensor=2),
    "lamb, TP2": recipe_of("lamb", True, tensor=2, sequence=False),
    "lars, TP2 SP": recipe_of("lars", tensor=2),
    "adafactor, EP2": recipe_of("adafactor", expert=2),
}


@pytest.mark.by_default("muon, TP2 SP")
@pytest.mark.parametrize("case", SPLITS)
def test_splits_equal_one_process(forks, case):
    """Losses, gradient norms, weights and moments; see tests/conformance/test_megatron_matrix.py for more splits."""
    recipe = SPLITS[case]
    assert_split_equals_one(forks, recipe, recipe_of(recipe.optimizer.name), "linear_q_down_proj")


def matrices():
    """By name: sections, axis of the split and size of the group, of the first layer's attention."""
    from megatron_patch.muon import megatron_matrices

    engine = engine_of(recipe_of("muon", tensor=2))
    names = {parameter: name for name, parameter in engine.chunks[0].named_parameters()}
    found = {names[p].partition("layers.0.self_attention.")[2]: m for p, m in megatron_matrices(engine.chunks).items()}
    return {name: (m.sections, m.axis, m.group.size()) for name, m in found.items() if name}


def test_every_linear_layer_is_a_matrix_for_muon(forks):
    """Those of all heads together: down projections too are split by rows."""
    rows = {"linear_q_down_proj": 12, "linear_q_up_proj": 2 * (CONTENT + ROTARY)}
    rows |= {"linear_kv_down_proj": RANK + ROTARY, "linear_kv_up_proj": 2 * (CONTENT + VALUE)}
    expected = {f"{name}.weight": ((n // 2,), 0, 2) for name, n in rows.items()}
    expected["linear_proj.weight"] = ((32,), 1, 2)
    for found in values(forks.run(2, matrices)):
        assert found == expected
