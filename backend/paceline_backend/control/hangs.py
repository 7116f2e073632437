"""Restart of hung runs whose `restart_hung_s` is set.

The worker calls `HangWatch.scan` every `SCAN_S` seconds. `HangWatch` never restarts a run itself:
it kills the ranks that the other ranks wait for, and TorchElastic restarts all ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import redis

from paceline_backend import requests
from paceline_backend.control.listening import ListeningClock
from paceline_backend.insight import hangs
from paceline_backend.store import Store, StoreUnavailableError
from paceline_backend.store.audit import CONTROL_PLANE, Requester
from paceline_backend.store.nodes import hanging
from paceline_backend.store.nodes.hanging import Restarted

log = logging.getLogger(__name__)

ORDER_REPEAT_S = 30.0

SCAN_S = 2.0
# A run that a check finds hung must make no progress for this long before its ranks are killed. A
# rank reports a step that takes less than ten seconds only at its end, so only a later check shows
# whether the rank that the others wait for makes progress.
_CONFIRM_S = 15.0  # seconds


class HangWatch:
    """Killer of the ranks that block a run whose `restart_hung_s` is set. Not thread-safe.

    TorchElastic then restarts all ranks from the newest checkpoint, which uses up one of the run's
    `max_restarts`. If no restart is left, the run fails.
    """

    def __init__(
        self,
        store: Store,
        bus_url: str,
        owner: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._bus_url = bus_url
        self._owner = owner
        self._listened = ListeningClock(SCAN_S, clock)
        # Time of the current scan. This time, and all times below, are on the clock `_listened`.
        self._at = 0.0
        # By run: attempt and time of the last order to kill its ranks.
        self._ordered: dict[int, tuple[int, float]] = {}
        # By run that hangs: its attempt, its newest complete step and the number of later records,
        # and the time of the first check that found these values.
        self._still: dict[int, tuple[object, float]] = {}

    def scan(self) -> None:
        """Check all runs that must restart when they hang."""
        self._at = self._listened()
        with self._store.read() as connection:
            watched = hanging.watched(connection, self._owner)
        keys = {run.key for run in watched}
        self._ordered = {key: at for key, at in self._ordered.items() if key in keys}
        self._still = {key: at for key, at in self._still.items() if key in keys}
        for run in watched:
            attempt, at = self._ordered.get(run.key, (-1, 0.0))
            if attempt != run.attempt or self._at > at + ORDER_REPEAT_S:
                self._guarded(run)

    def _guarded(self, run: Restarted) -> None:
        try:
            self.restart_if_hung(run)
        except (StoreUnavailableError, redis.RedisError):
            raise
        # A failed check must not end the worker, which also plans runs.
        except Exception:
            log.exception("run %s: the hang check failed", run.id)

    def restart_if_hung(self, run: Restarted) -> None:
        """Kill the ranks that block a run, if the run has hung for long enough.

        A rank that runs the script's own code, such as an evaluation, is left alone, because the
        normal duration of that code is unknown.
        """
        with self._store.read() as connection:
            hang = hangs.look(connection, run.key, run.after_s)
            beyond = hanging.beyond(connection, run.key, hang.step) if hang.hung else 0
        place = (run.attempt, hang.step, beyond)
        if not hang.hung or hang.scripted:
            self._still.pop(run.key, None)
            return
        known, since = self._still.get(run.key, (None, 0.0))
        if known != place:
            self._still[run.key] = (place, self._at)
            return
        if self._at - since < _CONFIRM_S:
            return
        ranks = hang.holding or hang.waiting
        by = Requester(CONTROL_PLANE.name, why=hang.words)
        ordered = requests.end_hung(self._store, self._bus_url, run.id, run.attempt, ranks, by)
        if ordered:
            self._ordered[run.key] = (run.attempt, self._at)
            log.warning("run %s hangs; its ranks %s are killed: %s", run.id, ranks, hang.words)
