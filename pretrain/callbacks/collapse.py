"""Warnings about collapsed routers."""

import logging
from typing import Any

from fmoe.metrics import coefficient_of_variation
from pretrain.callbacks.base import Callback, Loop, Metrics
from pretrain.config import GuardConfig

logger = logging.getLogger(__name__)


class CollapseWarning(Callback):
    """Check the load of each layer's experts over windows of ``guard.collapse_window`` steps.

    A layer has collapsed when the coefficient of variation of its load, or its fraction of experts without a token in
    the window, exceeds its limit. Adds the metric ``guard/collapsed_layers`` at the end of a window. Warns when a layer
    collapses, and does not repeat the warning until the layer has recovered.
    """

    def __init__(self, config: GuardConfig, layers: tuple[int, ...]):
        self.config, self.layers = config, layers
        self._steps = 0
        self._load: dict[int, list[float]] = {}  # sums over the window, by layer
        self._collapsed: set[int] = set()

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        for layer in self.layers:
            load: Any = metrics.get(f"moe/layer_{layer}/load", [])
            sums = self._load.get(layer) or [0.0] * len(load)
            self._load[layer] = [a + b for a, b in zip(sums, load, strict=True)]
        self._steps += 1
        if self._steps < self.config.collapse_window:
            return
        described = {layer: _describe(self.config, load) for layer, load in self._load.items()}
        collapsed = {layer: text for layer, text in described.items() if text}
        metrics["guard/collapsed_layers"] = len(collapsed)
        if trainer.processes.is_main and (new := [n for n in collapsed if n not in self._collapsed]):
            logger.warning(
                "step %d: routers have collapsed over the last %d steps: %s",
                trainer.step,
                self._steps,
                "; ".join(f"layer {layer}: {collapsed[layer]}" for layer in new),
            )
        self._collapsed = set(collapsed)
        self._steps, self._load = 0, {}

    def state_dict(self) -> dict[str, Any]:
        load = {str(layer): sums for layer, sums in self._load.items()}
        return {"steps": self._steps, "load": load, "collapsed": sorted(self._collapsed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps, self._collapsed = state["steps"], set(state["collapsed"])
        self._load = {int(layer): sums for layer, sums in state["load"].items()}


def _describe(config: GuardConfig, load: list[float]) -> str:
    """Describe why a window's load counts as collapsed; empty if it does not."""
    if not any(load):
        return ""
    cv, dead = coefficient_of_variation(load), sum(x == 0 for x in load)
    wrong = []
    if cv > config.collapse_cv:
        wrong.append(f"load CV {cv:.2f} above guard.collapse_cv={config.collapse_cv:g}")
    if dead > config.collapse_dead * len(load):
        wrong.append(f"{dead} of {len(load)} experts got no token, above guard.collapse_dead={config.collapse_dead:g}")
    return ", ".join(wrong)
