"""Guards that skip steps whose loss or gradient norm is not finite, or is a spike."""

import logging
import math
from collections import deque
from collections.abc import Collection
from statistics import median

from pretrain.callbacks.base import Callback, Loop, Metrics, State
from pretrain.config import GuardConfig
from pretrain.engine.nonfinite import nonfinite_report
from pretrain.start.process import Diverged

logger = logging.getLogger(__name__)

# Lower bounds on the spread of the loss, relative to its median, and of the logarithm of the gradient norm. Ten sigma
# are then at least 20% more loss or 7.4 times the norm. The norms of small batches have a small spread, but outliers of
# 2.7 times the median (in 2,000 steps of a tiny model).
_LOSS_FLOOR = 0.02
_LOG_NORM_FLOOR = 0.2
# Standard deviation over median absolute deviation of a normal distribution.
_SIGMA_OF_MAD = 1.4826


def limit_of(history: Collection[float], sigma: float, floor: float) -> float:
    """Return median + sigma * spread of the history.

    The spread is the scaled median absolute deviation, or ``floor`` if that is larger.
    """
    middle = median(history)  # medians, unlike mean and standard deviation, are robust to a few outliers
    spread = _SIGMA_OF_MAD * median(abs(value - middle) for value in history)
    return middle + sigma * max(spread, floor)


class StepGuard(Callback):
    """Skip steps or end the run according to the recipe's ``guard.*`` keys.

    Adds the metric ``guard/skipped``: 1 if the guard skipped the step, else 0. It is also 0 for an fp16 overflow, which
    the loss scaler skips.

    The decision is the same on every rank. A skipped step counts as a step: it consumes its samples and advances the
    learning-rate schedule.
    """

    def __init__(self, config: GuardConfig):
        self.config = config
        # Values of applied steps only, so that a spike does not make the next spike look normal.
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
                raise Diverged(f"step {trainer.step + 1}: {reason}; the step was not applied")
        if reason is None:
            self._in_a_row = 0
            self._losses.append(loss)
            self._log_norms.append(_log(grad_norm))
            return None
        self._in_a_row += 1
        self._has_skipped = True
        if self._in_a_row > self.config.max_skips:
            # Skipped steps do not change the weights, so skipping does not leave a region of large gradients.
            remedy = ": lower optimizer.lr, or set guard.spike_sigma=0" if "is a spike" in reason else ""
            raise Diverged(
                f"step {trainer.step + 1}: {reason}; this is skip {self._in_a_row} in a row, more than "
                f"guard.max_skips={self.config.max_skips}{remedy}"
            )
        if trainer.processes.is_main:
            event = (trainer.step + 1, "skip")
            logger.warning("step %d is skipped: %s", trainer.step + 1, reason, extra={"event": event})
        return reason

    def _spike(self, loss: float, grad_norm: float) -> str | None:
        sigma = self.config.spike_sigma
        window = len(self._losses)
        if not sigma or not self.config.spike_window or window < self.config.spike_history:
            return None
        limit = limit_of(self._losses, sigma, _LOSS_FLOOR * abs(median(self._losses)))
        if loss > limit:
            return (
                f"loss {loss:.4g} is a spike: guard.spike_sigma={sigma:g} over the last {window} steps allows at most "
                f"{limit:.4g}"
            )
        # The noise of a norm is multiplicative.
        limit = limit_of(self._log_norms, sigma, _LOG_NORM_FLOOR)
        if _log(grad_norm) > limit:
            return (
                f"gradient norm {grad_norm:.4g} is a spike: guard.spike_sigma={sigma:g} over the last {window} steps "
                f"allows at most {math.exp(limit):.4g}"
            )
        return None

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        # `check_step` is not called for an fp16 overflow, which neither extends nor ends a row of skips.
        metrics["guard/skipped"] = int(self._has_skipped)
        self._has_skipped = False

    def state_dict(self) -> State:
        return {"losses": list(self._losses), "log_norms": list(self._log_norms), "in_a_row": self._in_a_row}

    def load_state_dict(self, state: State) -> None:
        self._losses.extend(state["losses"])
        self._log_norms.extend(state["log_norms"])
        self._in_a_row = state["in_a_row"]


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-30))
