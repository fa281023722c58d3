"""Comparison of a run with its plan."""

import logging
from types import SimpleNamespace

import pytest
import torch

from fmoe.errors import UserError
from pretrain.callbacks import PlanCheck
from pretrain.config.load import build_recipe

PLAN = {"seconds": 2.0, "memory": 2**30, "forward": 0.5, "backward": 1.0}


def _loop(device="cpu"):
    return SimpleNamespace(step=20, processes=SimpleNamespace(device=torch.device(device), is_main=True))


def _run(check, seconds, device="cpu", **metrics):
    """The metrics of the last of as many steps as a window has."""
    for _ in range(check.window):
        found = {"step_seconds": seconds, "memory_mb": 1024.0, **metrics}
        check.on_step(_loop(device), found)
    return found


def test_agreement_is_silent(caplog):
    metrics = _run(PlanCheck(PLAN, 4), 2.1)
    assert metrics["plan/step_ratio"] == pytest.approx(1.05)
    assert "plan/memory_ratio" not in metrics
    assert not caplog.records


def test_drift_is_one_warning_until_it_ends(caplog):
    caplog.set_level(logging.WARNING)
    check = PlanCheck(PLAN, 4)
    _run(check, 2.5, **{"time/forward_ms": 480.0, "time/backward_ms": 1500.0})
    _run(check, 2.5)
    (record,) = caplog.records
    assert "1.25" in record.getMessage()
    assert "backward takes 1.5 s, planned 1 s" in record.getMessage()
    _run(check, 2.0)
    _run(check, 1.5)
    assert len(caplog.records) == 2


def test_memory_counts_on_gpus(caplog):
    metrics = _run(PlanCheck(PLAN, 4), 2.0, "cuda", **{"memory_mb/largest": 1536.0})
    assert metrics["plan/memory_ratio"] == pytest.approx(1.5)
    assert "1.5" in caplog.text


@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        ({"memory": 1.0}, ("tracking.plan.seconds=0",)),
        ({"seconds": -1.0}, ("tracking.plan.seconds=-1",)),
        ({"seconds": 1.0, "forward": "fast"}, ("tracking.plan.forward=fast",)),
    ],
)
def test_a_plan_is_numbers(plan, parts):
    with pytest.raises(UserError) as error:
        build_recipe({"tracking": {"plan": plan}})
    assert all(part in str(error.value) for part in parts), error.value
