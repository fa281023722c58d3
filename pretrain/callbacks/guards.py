"""Steps that are not made: of a loss or a gradient that is not finite, or far above the steps before."""

import logging
import math
from collections import deque
from collections.abc import Collection
from statistics import median
from typing import Any

from pretrain.callbacks.base import Callback, Loop, Metrics
from pretrain.config import GuardConfig
from pretrain.engine.nonfinite import nonfinite_report
from pretrain.process import Diverged

logger = logging.getLogger(__name__)

# The spread is never taken for less than this: of the median loss, and of the logarithm of the norm. Ten sigma are then
# at least 20% more loss or 7.4 times the norm. Norms of small batches lie close together, now and then one far above:
# 2.7 times the median in 2,000 steps of a tiny model.
_LOSS_FLOOR = 0.02
_LOG_NORM_FLOOR = 0.2
# Of a normal distribution, standard deviation over median absolute deviation.
_SIGMA_OF_MAD = 1.4826


def limit_of(history: Collection[float], sigma: float, floor: float) -> float:
    """Median + sigma spreads of the history, the spread taken from the median absolute deviation.

    Neither moves for the few outliers that a mean and a standard deviation would be made of.
    """
    middle = median(history)
    spread = _SIGMA_OF_MAD * median(abs(value - middle) for value in history)
    return middle + sigma * max(spread, floor)


class StepGuard(Callback):
    """Skips the step, or ends the run, as ``guard.*`` of the recipe says. Adds ``guard/skipped``: 0 or 1.

    What it saw is the same on every rank, and so is what it decides. A skipped step counts as one: its samples and its
    place in the learning rate's schedule are used up.
    """

    def __init__(self, config: GuardConfig):
        self.config = config
        # Of the steps that were made: a spike must not make the next one look normal.
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self._log_norms: deque[float] = deque(maxlen=config.spike_window)
        self._in_a_row = 0
        self._has_skipped = False

    def check_step(self, trainer: Loop, loss: float, grad_norm: float) -> str | None:
        if math.isfinite(loss) and math.isfinite(grad_norm):
            reason = self._spike(loss, grad_norm)
        else:
            what = "gradient" if math.isfinite(loss) else "loss"
            where = nonfinite_report(trainer.engine, trainer.step, trainer.inputs.train)
            reason = f"the {what} is not finite{trainer.engine.scale_limit}, first in: {where}"
            if self.config.nonfinite == "stop":
                raise Diverged(f"step {trainer.step + 1}: {reason}; nothing of the step was applied")
        if reason is None:
            self._in_a_row = 0
            self._losses.append(loss)
            self._log_norms.append(_log(grad_norm))
            return None
        self._in_a_row += 1
        self._has_skipped = True
        if self._in_a_row > self.config.max_skips:
            raise Diverged(
                f"step {trainer.step + 1}: {reason}; guard.max_skips={self.config.max_skips} steps before it were "
                "skipped in a row"
            )
        if trainer.processes.is_main:
            event = (trainer.step + 1, "skip")
            logger.warning("step %d is skipped: %s", trainer.step + 1, reason, extra={"event": event})
        return reason

    def _spike(self, loss: float, grad_norm: float) -> str | None:
        sigma, window = self.config.spike_sigma, len(self._losses)
        if not sigma or not self.config.spike_window or window < self.config.spike_history:
            return None
        limit = limit_of(self._losses, sigma, _LOSS_FLOOR * abs(median(self._losses)))
        if loss > limit:
            return f"loss {loss:.4g} is a spike: {sigma:g} sigma of the last {window} steps allow {limit:.4g}"
        # A norm is noisy by factors.
        limit = limit_of(self._log_norms, sigma, _LOG_NORM_FLOOR)
        if _log(grad_norm) > limit:
            return (
                f"gradient norm {grad_norm:.4g} is a spike: {sigma:g} sigma of the last {window} steps allow "
                f"{math.exp(limit):.4g}"
            )
        return None

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        # An overflow of fp16 is not asked about, and neither counts nor ends a row.
        metrics["guard/skipped"] = int(self._has_skipped)
        self._has_skipped = False

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "log_norms": list(self._log_norms), "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses.extend(state["losses"])
        self._log_norms.extend(state["log_norms"])
        self._in_a_row = state["in_a_row"]


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-30))
