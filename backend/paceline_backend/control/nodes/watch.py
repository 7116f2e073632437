"""Notes which nodes verdicts name slow, and replaces them in runs that allow it."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time

import msgspec
import redis

from paceline_backend import requests
from paceline_backend.insight import replacements
from paceline_backend.insight.verdict import FEWEST_STEPS, judge, read_observed, slow_node
from paceline_backend.insight.whatif.answer import MARGIN, STEPS
from paceline_backend.insight.whatif.auto import AUTO_STEPS
from paceline_backend.insight.whatif.child import Forecaster
from paceline_backend.requests import ConflictError, InvalidRequestError, spares
from paceline_backend.store import Store, StoreUnavailableError, attempts, nodes
from paceline_backend.store.audit import CONTROL_PLANE, RequestedChange, Requester
from paceline_backend.store.nodes import slowness
from paceline_backend.store.nodes.slowness import RunOnNodes, Slow
from paceline_backend.store.outcomes import forecasts

log = logging.getLogger(__name__)

LOOK_STEPS = 20  # between two verdicts about a run, at least
PAUSE_S = 3.0  # and so long
_AGAIN = 10  # pauses until the same steps are looked at again, if there is more to do about them

_POLL_S = 0.25


class Watch:
    """Makes a verdict about each run on several nodes, every few steps. For one thread.

    When a verdict names a node, it makes a forecast of the run without the node's slowness. In a
    run with `replace_slow_nodes`, a spare replaces the node when verdicts have named it for
    `AUTO_STEPS` steps, and the forecast's saving is surely above `MARGIN`.

    Args:
        store: the database.
        bus_url: ``redis://…``.
        owner: this worker; runs that another one plans are that one's.
        pause_s: see `PAUSE_S`.
    """

    def __init__(self, store: Store, bus_url: str, owner: str, *, pause_s: float = PAUSE_S) -> None:
        self._store = store
        self._bus_url = bus_url
        self._owner = owner
        self._pause_s = pause_s
        # Run → attempt, step and the clock's time from which the next look is due.
        self._next: dict[int, tuple[int, int, float]] = {}

    def scan(self, forecaster: Forecaster, stop: threading.Event) -> bool:
        """Look at all runs that are due; return whether there are runs to look after.

        Raises:
            StoreUnavailableError: the database is away.
            redis.RedisError: the bus is away.
        """
        with self._store.read() as connection:
            watched = slowness.watched(connection, self._owner)
            newest = {run.key: forecasts.newest_step(connection, run.key) for run in watched}
        self._next = {key: due for key, due in self._next.items() if key in newest}
        for run in watched:
            step = newest[run.key]
            if not stop.is_set() and self._is_due(run, step):
                settled = self._guarded(run, step, forecaster, stop)
                due, pauses = (step + LOOK_STEPS, 1) if settled else (0, _AGAIN)
                at = time.monotonic() + pauses * self._pause_s
                self._next[run.key] = (run.attempt, due, at)
        return bool(watched)

    def _is_due(self, run: RunOnNodes, step: int) -> bool:
        attempt, due, at = self._next.get(run.key, (-1, 0, 0.0))
        return time.monotonic() >= at and (attempt != run.attempt or step >= due)

    def _guarded(
        self, run: RunOnNodes, step: int, forecaster: Forecaster, stop: threading.Event
    ) -> bool:
        """Makes a verdict and acts on it.

        Returns:
            Whether these steps need no further verdict. They need one if the ranks have just been
            placed, if the verdict failed, or if there is no spare now.
        """
        try:
            with self._store.read() as connection:
                placement = attempts.placement(connection, run.key)
            if placement is None or placement.attempt != run.attempt:
                return False
            slow = self.look(run, step)
            if slow is not None and self._has_forecast(run, slow, step, forecaster, stop):
                return self._replace(run, slow, step)
            return True
        except (StoreUnavailableError, redis.RedisError):
            raise
        except Exception:  # a verdict is not worth a worker, which plans runs
            log.exception("run %s: no verdict", run.id)
            return False

    def look(self, run: RunOnNodes, step: int) -> Slow | None:
        """Notes the verdict about a run's newest steps; the node that it names.

        Args:
            run: which.
            step: its newest complete one.
        """
        with self._store.read() as connection:
            placement = attempts.placement(connection, run.key)
            if placement is None or placement.attempt != run.attempt:
                return None  # its ranks have just been placed
            seen = read_observed(connection, run.key, (None, None), placement)
        made = judge(seen)
        if made.steps < FEWEST_STEPS:
            return None
        named = slow_node(made)
        with self._store.write() as connection:
            if named is None or named.cause != "node":
                slowness.clear(connection, run.key)
                return None
            at, attempt, factor = time.time(), run.attempt, named.factor
            slow = Slow(run.key, at, named.node, attempt, step, factor, named.words)
            kept = slowness.name(connection, slow)
        if kept is slow:
            log.warning("run %s: %s", run.id, named.words)
        return kept

    def _has_forecast(
        self, run: RunOnNodes, slow: Slow, step: int, forecaster: Forecaster, stop: threading.Event
    ) -> bool:
        """Whether a forecast of the newest steps says what the node costs; makes one if not."""
        since = max(slow.step, step - AUTO_STEPS)
        with self._store.read() as connection:
            if replacements.forecast_of(connection, run.key, slow.node, since) is not None:
                return True
        # Other presets would take most of the time, on cores that the run may need.
        future = forecaster.submit(run.id, STEPS, presets=())
        while not concurrent.futures.wait([future], _POLL_S).done:
            if stop.is_set():
                return False
        made = future.result()
        if made.step is None or made.slow_node is None:
            return False
        with self._store.write() as connection:
            forecasts.add(connection, run.key, msgspec.to_builtins(made))
        return made.slow_node.node == slow.node

    def _replace(self, run: RunOnNodes, slow: Slow, step: int) -> bool:
        """Lets a spare take the node's place, if that is allowed and surely worth it.

        Returns:
            False if it is, and no spare is there now.
        """
        if not run.replace_slow_nodes or step < slow.step + AUTO_STEPS:
            return True
        with self._store.read() as connection:
            forecast = replacements.forecast_of(connection, run.key, slow.node, slow.step)
            names = spares.of_run(run.id, nodes.listed(connection))
        if forecast is None or forecast.saving_low <= MARGIN:
            return True
        if not names:
            return False
        by = Requester(CONTROL_PLANE.name, why=f"{slow.words} {forecast.words}")
        try:
            wanted = requests.NodeReplacement(slow.node, other=names[0])
            requests.replace(self._store, self._bus_url, RequestedChange(run.id, by), wanted)
            log.warning("run %s: %s replaces %s", run.id, names[0], slow.node)
        except (ConflictError, InvalidRequestError) as error:
            log.warning("run %s: %s is not replaced: %s", run.id, slow.node, error)
        return True
