"""Signals that stop a run between steps."""

import signal
from typing import Any

from pretrain.callbacks.base import Callback, Loop, Metrics
from pretrain.start import lock

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stopping(Callback):
    """Stop all ranks after the same step, with a checkpoint, when any rank gets SIGTERM, SIGUSR1 or a first SIGINT.

    The ranks agree when they reduce the loss of a step. A signal after this reduction stops the run one step later. A
    second SIGINT interrupts at once.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._is_asked = False

    def on_start(self, trainer: Loop, metrics: Metrics) -> None:
        def ask(number: int, _frame: object) -> None:
            self._is_asked = trainer.engine.asks_to_stop = True
            lock.ending()
            if number == signal.SIGINT:
                signal.signal(number, self._before[number])

        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            signal.signal(number, ask)

    def on_end(self, trainer: Loop, error: BaseException | None) -> None:
        # Schedulers and launchers may repeat a signal, which must not kill a process that is ending.
        if not self._is_asked:
            for number, handler in self._before.items():
                signal.signal(number, handler)
