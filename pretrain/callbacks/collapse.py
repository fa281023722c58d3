"""Warnings about collapsed routers."""

import logging
import math
from typing import Any

from fmoe.metrics import coefficient_of_variation
from pretrain.callbacks.base import Callback, Loop, Metrics, State
from pretrain.config import GuardConfig

logger = logging.getLogger(__name__)


class CollapseWarning(Callback):
    """Warn when a layer's router collapses, judged over windows of ``guard.collapse_window`` steps.

    A layer has collapsed if any of these holds:

    * The coefficient of variation of its expert load exceeds ``guard.collapse_cv``.
    * Its share of experts without a token in the window exceeds ``guard.collapse_dead``.
    * Its router is uniform: its mean entropy is less than ``guard.collapse_uniform`` nats below the maximum, the
      logarithm of the number of experts.

    Adds the metric ``guard/collapsed_layers`` at the end of a window. The warning is not repeated until the layer has
    recovered.
    """

    def __init__(self, config: GuardConfig, layers: tuple[int, ...]):
        self.config = config
        self.layers = layers
        self._steps = 0
        self._load: dict[int, list[float]] = {}  # sums over the window, by layer
        self._entropy: dict[int, float] = {}
        self._collapsed: set[int] = set()

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        for layer in self.layers:
            load: Any = metrics.get(f"moe/layer_{layer}/load", [])
            sums = self._load.get(layer) or [0.0] * len(load)
            self._load[layer] = [a + b for a, b in zip(sums, load, strict=True)]
            entropy: Any = metrics.get(f"moe/layer_{layer}/entropy", 0.0)
            self._entropy[layer] = self._entropy.get(layer, 0.0) + entropy
        self._steps += 1
        if self._steps < self.config.collapse_window:
            return
        described = {
            layer: _describe(self.config, load, self._entropy[layer] / self._steps)
            for layer, load in self._load.items()
        }
        collapsed = {layer: text for layer, text in described.items() if text}
        metrics["guard/collapsed_layers"] = len(collapsed)
        new = [layer for layer in collapsed if layer not in self._collapsed]
        if new and trainer.processes.is_main:
            logger.warning(
                "step %d: routers have collapsed over the last %d steps: %s",
                trainer.step,
                self._steps,
                "; ".join(f"layer {layer}: {collapsed[layer]}" for layer in new),
            )
        self._collapsed = set(collapsed)
        self._steps = 0
        self._load = {}
        self._entropy = {}

    def state_dict(self) -> State:
        load = {str(layer): sums for layer, sums in self._load.items()}
        entropy = {str(layer): entropy for layer, entropy in self._entropy.items()}
        return {"steps": self._steps, "load": load, "entropy": entropy, "collapsed": sorted(self._collapsed)}

    def load_state_dict(self, state: State) -> None:
        self._steps = state["steps"]
        self._collapsed = set(state["collapsed"])
        self._load = {int(layer): sums for layer, sums in state["load"].items()}
        self._entropy = {int(layer): entropy for layer, entropy in state.get("entropy", {}).items()}


def _describe(config: GuardConfig, load: list[float], entropy: float) -> str:
    """Describe why a layer with this load and mean entropy counts as collapsed; empty if it does not."""
    if not any(load):
        return ""
    cv = coefficient_of_variation(load)
    dead = sum(x == 0 for x in load)
    wrong = []
    if cv > config.collapse_cv:
        wrong.append(f"load CV {cv:.2f} above guard.collapse_cv={config.collapse_cv:g}")
    if dead > config.collapse_dead * len(load):
        wrong.append(f"{dead} of {len(load)} experts got no token, above guard.collapse_dead={config.collapse_dead:g}")
    below = max(math.log(len(load)) - entropy, 0)
    if len(load) > 1 and below < config.collapse_uniform:
        wrong.append(
            f"the router is uniform: entropy {entropy:.4f}, {below:.2g} below ln {len(load)} "
            f"(guard.collapse_uniform={config.collapse_uniform:g})"
        )
    return ", ".join(wrong)
