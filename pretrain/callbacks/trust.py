"""Trust ratios of LAMB and LARS."""

import torch

from megatron_patch.trust import trust_ratios
from pretrain.callbacks.base import Callback, Loop, Metrics


class TrustRatios(Callback):
    """Add minimum, median and maximum of the optimizer's trust ratios to the metrics (``trust/dense_min``, ...).

    Adds them every ``every`` steps, and after the last step of this process, unless the step was skipped. They cover
    the whole model, and count each dense matrix and each expert's matrix once.
    """

    def __init__(self, every: int):
        self.every = every

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        if trainer.was_skipped or (trainer.step % self.every and not trainer.is_last):
            return
        for name, ratios in zip(("dense", "experts"), trust_ratios(trainer.engine.optimizer), strict=True):
            if len(ratios):
                quantiles = torch.quantile(ratios, ratios.new_tensor([0.0, 0.5, 1.0]))
                for which, value in zip(("min", "median", "max"), quantiles.tolist(), strict=True):
                    metrics[f"trust/{name}_{which}"] = value
