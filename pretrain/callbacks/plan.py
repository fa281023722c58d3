"""Comparison of a run with its plan."""

import logging
from collections.abc import Mapping
from statistics import median
from typing import Any

from fmoe.runtime.phases import WAITS, WORK
from pretrain.callbacks.base import Callback, Loop, Metrics

logger = logging.getLogger(__name__)

_LIMIT = 0.1  # drift that is reported
_MIB = 1 << 20


class PlanCheck(Callback):
    """Compare step times and, on GPUs, memory with the plan that ``fmoe plan --out`` wrote to ``tracking.plan``.

    Adds the metrics ``plan/step_ratio`` and ``plan/memory_ratio``, measured over predicted. After each window of steps,
    a median or a memory that differs from the plan by more than 10% is a warning. With times by phase
    (``tracking.phases_every``), it names the phase that differs the most. It is not repeated until a window agrees
    with the plan.

    Args:
        plan: seconds of a step (``seconds``) and of its phases, and bytes of memory (``memory``).
        window: number of steps.
    """

    def __init__(self, plan: Mapping[str, float], window: int = 20):
        self.plan = plan
        self.window = window
        self._ratios: list[float] = []
        self._phases: dict[str, float] = {}  # latest seconds
        self._has_drifted = False

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        measured: Any = metrics
        ratio = measured["step_seconds"] / self.plan["seconds"]
        metrics["plan/step_ratio"] = ratio
        self._ratios.append(ratio)
        memory_ratio = 1.0
        if trainer.processes.device.type == "cuda" and "memory" in self.plan:
            used = measured.get("memory_mb/largest", measured["memory_mb"]) * _MIB
            memory_ratio = used / self.plan["memory"]
            metrics["plan/memory_ratio"] = memory_ratio
        for phase in (*WORK, *WAITS):
            if f"time/{phase}_ms" in metrics:
                self._phases[phase] = measured[f"time/{phase}_ms"] / 1e3
        if len(self._ratios) < self.window:
            return
        middle = median(self._ratios)
        self._ratios.clear()
        has_drifted = max(abs(middle - 1), memory_ratio - 1) > _LIMIT
        if has_drifted and not self._has_drifted and trainer.processes.is_main:
            logger.warning(
                "step %d: a step takes %.3g times and memory %.3g times the plan's%s (docs/planner.md)",
                trainer.step,
                middle,
                memory_ratio,
                self._largest_drift(),
            )
        self._has_drifted = has_drifted

    def _largest_drift(self) -> str:
        drifts = {phase: seconds - self.plan.get(phase, 0.0) for phase, seconds in self._phases.items()}
        if not drifts:
            return ""
        phase = max(drifts, key=lambda name: abs(drifts[name]))
        return f"; {phase} takes {self._phases[phase]:.3g} s, planned {self.plan.get(phase, 0.0):.3g} s"
