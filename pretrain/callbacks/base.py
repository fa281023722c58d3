"""What a callback is."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretrain.trainer import Trainer

Metrics = dict[str, float | int | list[float]]


class Callback:
    """Called on every rank, at the same places: a callback may communicate. The default does nothing."""

    def on_start(self, trainer: "Trainer", metrics: Metrics) -> None:
        """Before the first step; ``trainer.step`` is where it begins. May add to the metrics of that place."""

    def on_step(self, trainer: "Trainer", metrics: Metrics) -> None:
        """After a step, which ``trainer.step`` counts already. May add to the step's metrics for those behind it."""

    def on_end(self, trainer: "Trainer", error: BaseException | None) -> None:
        """At the end, also after an error; every callback that was started is ended."""
