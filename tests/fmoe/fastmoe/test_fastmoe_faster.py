"""FasterMoE's functions equal FastMoE's plain way: output, gradients of rows and of every expert."""

import pytest
import torch
import torch.distributed as dist
from compare import relative_error
from fmoe.fastermoe.config import float_from_env, switch_from_env
from fmoe.fastermoe.schedule import _fmoe_general_global_forward as smart
from fmoe.fastermoe.shadow_policy import get_shadow_policy
from fmoe.functions import ensure_comm
from fmoe.layers import _fmoe_general_global_forward as plain
from forks import values

import fmoe

WIDTH = 12


def both_ways(num_expert, stored, environment):
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(rank)
        x = torch.randn(10, WIDTH)
        gate = torch.randint(-1, size * num_expert, (10, 2))
        modules = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(2 * num_expert)]
        first, second = modules[:num_expert], modules[num_expert:]
        for a, b in zip(first, second, strict=True):
            b.load_state_dict(a.state_dict())
        x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
        ensure_comm(x1, None)
        calls = []

        def one(rows, count, index):
            assert count.tolist() == [len(rows)]
            calls.append(index)
            return first[index](rows)

        def all_of_them(rows, counts):
            parts = rows.split(counts.tolist())
            return torch.cat([module(part) for module, part in zip(second, parts, strict=True)])

        chosen = None if stored is None else torch.tensor(stored)
        y1 = smart(x1, gate, one, num_expert, size, experts=first, stored_models=chosen)
        y2 = plain(x2, gate, all_of_them, num_expert, size)
        upstream = torch.randn_like(y2)
        (y1 * upstream).sum().backward()
        (y2 * upstream).sum().backward()
        pairs = [(y1, y2), (x1.grad, x2.grad)]
        for a, b in zip(first, second, strict=True):
            pairs += [(a.weight.grad, b.weight.grad), (a.bias.grad, b.bias.grad)]
        return max(relative_error(a, b) for a, b in pairs), len(calls)


HOT = {"FMOE_FASTER_SHADOW_ENABLE": "ON", "FMOE_FASTER_GLBPLC_NETBW": "1", "FMOE_FASTER_GLBPLC_ALPHA": "0.0001"}


@pytest.mark.parametrize(
    ("num_expert", "stored", "environment", "shadows"),
    [
        (1, None, {}, 0),
        (2, None, {}, 0),
        (1, [True, False], {}, 1),
        (2, [False, True, True, False], {}, 2),
        (2, [True] * 4, {}, 4),
        (2, None, HOT, None),
    ],
)
def test_smart_equals_plain(two_ranks, num_expert, stored, environment, shadows):
    for error, calls in values(two_ranks.run(both_ways, num_expert, stored, environment)):
        assert error < 1e-6
        assert calls == num_expert + shadows if shadows is not None else calls > num_expert


def test_shadowing_needs_the_modules(two_ranks):
    for message in values(two_ranks.run(without_modules)):
        assert message.startswith("experts=None")


def without_modules():
    x, gate = torch.randn(4, WIDTH), torch.zeros(4, 1, dtype=torch.int64)
    try:
        smart(x, gate, lambda rows, count, index: rows, 1, 2, stored_models=torch.tensor([True, False]))
    except fmoe.UserError as error:
        return str(error)


def test_settings_from_the_environment(monkeypatch):
    assert float_from_env("FMOE_FASTER_X", 3) == 3 and not switch_from_env("FMOE_FASTER_X")
    monkeypatch.setenv("FMOE_FASTER_X", "ON")
    assert switch_from_env("FMOE_FASTER_X")
    with pytest.raises(fmoe.UserError, match="FMOE_FASTER_X='ON' must be a number"):
        float_from_env("FMOE_FASTER_X")
    counts = torch.tensor([7, 1])
    assert not get_shadow_policy(8)(counts, counts, 2, 1, torch.device("cpu")).any()
