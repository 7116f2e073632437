"""Saves a declared checkpoint before a signal ends the rank's process.

Slurm, Kubernetes and the launcher of `paceline run` send SIGTERM some seconds before they kill a
process; Slurm can send SIGUSR1 instead. A rank cannot save alone, and not in the middle of a step.
So the handler only asks the leader to end the plan, as `paceline stop` does. All ranks leave their
loop after the same step and save. Then the handler that the script had set runs, or the signal's
default action. This module replaces no handler of a signal that the script ignores, and none
outside of Python (such as faulthandler's). Without a declared checkpoint, it replaces no handler.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from paceline.train.feature import Feature

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Signals(Feature):
    """Handler of the signals that end a process. It does nothing outside of the main thread.

    Args:
        ask: requests that the leader ends the plan. A signal's handler calls it, so it must not
            block. `ask` returns False outside of the loop: then the signal takes effect at once,
            because there is nothing to save.
        close: closes the session, before a default action ends the process.
    """

    def __init__(self, ask: Callable[[], bool], close: Callable[[], None]) -> None:
        self._ask, self._close, self._process = ask, close, os.getpid()
        # The handlers that the script had set, or the default actions, by signal number.
        self._previous: dict[int, Any] = {}
        # Received signals that are not yet delivered to the script.
        self._came: list[int] = []

    def begin(self) -> None:
        self._install()

    def begin_epoch(self, epoch: int) -> None:
        # The script may have set handlers since the last epoch.
        self._install()

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN, self._on_signal):
                self._previous[number] = handler
                signal.signal(number, self._on_signal)

    def stopped(self) -> None:
        self._deliver(self._close)

    def _deliver(self, before_end: Callable[[], None]) -> None:
        """Run the script's handlers of the received signals, or the default actions.

        `before_end` is called before a default action, which ends the process.
        """
        while self._came:
            number = self._came.pop(0)
            handler = self._previous.get(number, signal.SIG_DFL)
            if callable(handler):
                handler(number, None)
                continue
            before_end()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def closed(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        self._deliver(lambda: None)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # In a forked process, such as a DataLoader worker, only restore the previous handler and
        # run it.
        if os.getpid() != self._process:
            signal.signal(number, self._previous[number])
            signal.raise_signal(number)
            return
        if number not in self._came:
            self._came.append(number)
        if not self._ask():
            self._deliver(lambda: None)
