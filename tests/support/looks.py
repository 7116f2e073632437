"""Checks for silent runs, on a clock of the test's own."""

from __future__ import annotations

from typing import Any

from paceline.wire.bus import connect
from paceline_backend.control.silent_runs import SILENCE_CHECK_S, SilentRuns
from paceline_backend.store import Store


class Looks:
    """Checks for silent runs, and the time that passes before each."""

    def __init__(self, store: Store, bus_url: str, **options: Any) -> None:
        self.now = 0.0
        self._bus_url = bus_url
        self._silent_runs = SilentRuns(store, clock=lambda: self.now, **options)

    def after(self, seconds: float) -> list[str]:
        """The runs that are failed meanwhile, by looks as far apart as the server's."""
        end, failed = self.now + seconds, []
        while True:
            self.now = min(self.now + SILENCE_CHECK_S, end)
            failed += self._look()
            if self.now == end:
                return failed

    def suspended(self, seconds: float) -> list[str]:
        """The runs that are failed by the first look after so long without any."""
        self.now += seconds
        return self._look()

    def _look(self) -> list[str]:
        with connect(self._bus_url) as client:
            return self._silent_runs.look(client)
