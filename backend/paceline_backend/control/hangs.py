"""Lets runs that hang start again, where that was asked for."""

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

AGAIN_S = 30.0  # until an order that changed nothing is given again

SCAN_S = 2.0
# A run has to stand still for so long from the first look that finds it hung. A rank whose steps
# take less than ten seconds says nothing but their ends, and others may wait for it meanwhile.
_CONFIRM_S = 15.0


class HangWatch:
    """Looks at runs with `restart_hung_s`: the ranks that hold one up are ended. For one thread.

    TorchElastic then starts all ranks again, from the newest checkpoint: one of the run's
    `max_restarts`. After the last, the run has failed.

    Args:
        store: the database.
        bus_url: ``redis://…``.
        owner: this worker; runs that another one plans are that one's.
        clock: monotonic time in seconds.
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
        self._at = 0.0  # of this scan
        self._ordered: dict[int, tuple[int, float]] = {}  # run → attempt, time listened
        self._still: dict[int, tuple[object, float]] = {}  # run → where it hangs, since when

    def scan(self) -> None:
        """Looks at all runs that start again when they hang.

        Raises:
            StoreError: the database is away.
            redis.RedisError: the bus is away.
        """
        self._at = self._listened()
        with self._store.read() as connection:
            watched = hanging.watched(connection, self._owner)
        keys = {run.key for run in watched}
        self._ordered = {key: at for key, at in self._ordered.items() if key in keys}
        self._still = {key: at for key, at in self._still.items() if key in keys}
        for run in watched:
            attempt, at = self._ordered.get(run.key, (-1, 0.0))
            if attempt != run.attempt or self._at > at + AGAIN_S:
                self._guarded(run)

    def _guarded(self, run: Restarted) -> None:
        try:
            self.look(run)
        except (StoreUnavailableError, redis.RedisError):
            raise
        except Exception:  # a hang is not worth a worker, which plans runs
            log.exception("run %s: whether it hangs is not known", run.id)

    def look(self, run: Restarted) -> None:
        """Has the ranks ended that hold up a run, if it has hung for long enough.

        Not where ranks wait for one that is in the script's own code, such as an evaluation: how
        long that may take, only the script knows.
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
            log.warning("run %s hangs; ranks %s are ended: %s", run.id, ranks, hang.words)
