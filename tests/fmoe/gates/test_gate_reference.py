"""Decisions, weights and losses of every gate, against a loop over Python floats (gate_loops.py)."""

import gate_loops
import pytest
import torch

from fmoe.gates import GATES, build_gate
from fmoe.routing import RoutingGroups

WIDTH, EXPERTS, SEQUENCES, LENGTH, SIZE = 8, 6, 3, 11, 9  # groups of 9 out of 33 tokens: the last has 6
KEY = 4242


def build(name, top_k, training, dtype, **options):
    torch.manual_seed(5)
    gate = build_gate(name, WIDTH, EXPERTS, top_k, **options).to(dtype).train(training)
    with torch.no_grad():
        for parameter in gate.parameters():  # decided routers, uneven loads
            parameter.copy_(torch.randn(parameter.shape) * 0.7)
        if name == "sigmoid":
            gate.expert_bias_E.copy_(torch.linspace(-0.4, 0.4, EXPERTS))
    return gate


def groups_of(mask):
    ids = torch.arange(SEQUENCES * LENGTH) * 7 % 50
    return RoutingGroups(
        SEQUENCES, LENGTH, size=SIZE, mask_T=mask, token_ids_T=ids, first_group=5, noise_key=lambda: KEY
    )


def noise_of(name, gate, groups):
    """Return the random numbers that the gate draws in training, per token."""
    cpu = torch.device("cpu")
    kinds = {
        "switch": lambda: groups.local_uniform16(WIDTH, "switch jitter", cpu),
        "gshard": lambda: groups.uniform(max(gate.top_k - 1, 1), "gshard second expert", cpu),
        "noisy": lambda: groups.normal(EXPERTS, "noisy top-k", cpu),
        "random": lambda: groups.uniform(EXPERTS, "random gate", cpu),
        "sparsemixer": lambda: groups.uniform(gate.top_k * (EXPERTS + 1), "sparsemixer", cpu),
    }
    return kinds[name]().double().tolist() if name in kinds else [[]] * groups.num_tokens


def options_of(name, gate, ids):
    options = {"ids": ids}
    keys = ("jitter", "normalize", "capacity_factor", "iterations", "tolerance", "routed_scale", "kept_groups")
    for key in (*keys, "score", "num_nodes", "node", "bonus", "skew", "margin"):
        if hasattr(gate, key):
            options[key] = getattr(gate, key)
    if getattr(gate, "expert_groups", None) is not None:
        options["expert_groups"] = gate.expert_groups
    if name == "noisy":
        options["noise_rows"] = gate.noise_weight.double().tolist()
    if name == "hash":
        options["key"] = gate._key
    if name == "sigmoid":
        options["bias"] = gate.expert_bias_E.double().tolist()
    return options


VARIANTS = [pytest.param(name, k, {}, id=f"{name}-top{k}") for name in GATES for k in (1, 2, EXPERTS)] + [
    pytest.param("naive", 2, {"normalize": False}, id="naive-raw"),
    pytest.param("naive", 2, {"normalize": False, "routed_scale": 16.0}, id="naive-scaled"),
    pytest.param("naive", 2, {"score": "sigmoid"}, id="naive-sigmoid"),
    pytest.param("naive", 1, {"score": "sigmoid", "normalize": False, "routed_scale": 2.5}, id="naive-sigmoid-raw"),
    pytest.param("sigmoid", 2, {"score": "softmax"}, id="sigmoid-softmax"),
    pytest.param("sigmoid", 2, {"score": "softmax", "normalize": False, "routed_scale": 2.5}, id="sigmoid-softmax-raw"),
    pytest.param("naive", 2, {"expert_groups": 3, "kept_groups": 2}, id="naive-groups"),
    pytest.param("sigmoid", 2, {"expert_groups": 3, "kept_groups": 2, "routed_scale": 2.5}, id="sigmoid-groups"),
    pytest.param("switch", 1, {"jitter": 0.4, "capacity_factor": 0.7}, id="switch-capacity"),
    pytest.param("sigmoid", 2, {"capacity_factor": 0.7}, id="sigmoid-capacity"),
    pytest.param("random", 2, {"capacity_factor": 0.7}, id="random-capacity"),
    pytest.param("expert_choice", None, {"capacity_factor": 1.3}, id="expert_choice-fraction"),
    pytest.param("sparsemixer", 2, {"margin": 0.8}, id="sparsemixer-wide"),
    pytest.param("sparsemixer", EXPERTS, {"margin": 5.0, "capacity_factor": 0.7}, id="sparsemixer-capacity"),
    pytest.param("topology", 2, {"num_nodes": 2, "bonus": 1.5}, id="topology-two-nodes"),
    pytest.param("topology", 1, {"num_nodes": 3, "bonus": 4.0, "skew": 1.0}, id="topology-bound"),
]


@pytest.mark.cover(2)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("name", "top_k", "options"), VARIANTS)
@torch.no_grad()
def test_decisions_weights_and_losses(name, top_k, options, training, dtype, masked):
    gate = build(name, top_k, training, dtype, **options)
    torch.manual_seed(1)
    x = torch.randn(SEQUENCES * LENGTH, WIDTH, dtype=dtype)
    mask = torch.arange(len(x)) % 5 != 2 if masked else None
    groups = groups_of(mask)
    routing = gate(x, groups)

    noise, extra = noise_of(name, gate, groups), options_of(name, gate, groups.token_ids_T.tolist())
    rows = gate.weight.double().tolist() if hasattr(gate, "weight") else [[0.0] * WIDTH] * EXPERTS
    losses, sizes, made, kept = [], [], 0, 0
    for begin in range(0, len(x), SIZE):
        tokens = [t for t in range(begin, min(begin + SIZE, len(x))) if mask is None or mask[t]]
        group = gate_loops.Group(
            x[tokens].double().tolist(),
            rows,
            gate.top_k,
            training,
            [noise[t] for t in tokens],
            {**extra, "ids": [extra["ids"][t] for t in tokens]},
        )
        chosen, group_losses = gate_loops.LOOPS[name](group)
        made += sum(e >= 0 for row in chosen for e, _ in row)
        factor = gate.capacity_factor if training else gate.eval_capacity_factor
        if factor is not None and name != "expert_choice":
            chosen = gate_loops.drop(chosen, gate.top_k, EXPERTS, factor)
        kept += sum(e >= 0 for row in chosen for e, _ in row)
        losses.append(group_losses)
        sizes.append(len(tokens))
        for t, row in zip(tokens, chosen, strict=True):
            got = routing.expert_TK[t].tolist()
            assert got == [e for e, _ in row] + [-1] * (len(got) - len(row)), f"token {t}"
            for weight, (e, expected) in zip(routing.weight_TK[t].tolist(), row, strict=False):
                if e >= 0:
                    assert weight == pytest.approx(expected, rel=1e-4 if dtype == torch.float32 else 1e-10)
    if mask is not None:
        assert (routing.expert_TK[~mask] == -1).all()
    assert routing.stats.load_E.sum() == kept
    assert routing.stats.dropped == made - kept
    assert routing.losses.keys() == (losses[0].keys() if training else set())
    for key, value in routing.losses.items():
        expected = sum(loss[key] * n for loss, n in zip(losses, sizes, strict=True)) / sum(sizes)
        assert float(value) == pytest.approx(expected, rel=1e-4 if dtype == torch.float32 else 1e-9, abs=1e-7), key
