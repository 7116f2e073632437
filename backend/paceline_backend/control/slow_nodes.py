"""Detection of slow nodes, and their replacement in runs with `replace_slow_nodes`.

The worker calls `SlowNodeWatch.scan` every two seconds. Forecasts run in the child process of a
`Forecaster`.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time

import msgspec
import redis

from paceline_backend import requests
from paceline_backend.insight import replacements
from paceline_backend.insight.verdict import THRESHOLDS, judge, read_observed, slow_node
from paceline_backend.insight.whatif.answer import FORECAST_STEPS, MARGIN
from paceline_backend.insight.whatif.auto import AUTO_STEPS
from paceline_backend.insight.whatif.child import Forecaster
from paceline_backend.requests import ConflictError, InvalidRequestError, spares
from paceline_backend.store import Store, StoreUnavailableError, attempts, nodes
from paceline_backend.store.audit import CONTROL_PLANE, RequestedChange, Requester
from paceline_backend.store.nodes import slowness
from paceline_backend.store.nodes.slowness import RunOnNodes, Slow
from paceline_backend.store.outcomes import forecasts

log = logging.getLogger(__name__)

# Between two verdicts about a run, at least this many steps and this many seconds must pass.
LOOK_STEPS = 20
NODE_VERDICT_INTERVAL_S = 3.0
# If a run's newest steps need another verdict (see `_guarded`), it is made after this many pauses.
_AGAIN = 10

_POLL_S = 0.25


class SlowNodeWatch:
    """Checker of multi-node runs, which makes a verdict every few steps. Not thread-safe.

    When a verdict names a node as slow, `SlowNodeWatch` forecasts the run without the node's
    slowness. In a run with `replace_slow_nodes`, a spare replaces the node once verdicts have named
    it for `AUTO_STEPS` steps and the lower bound of the forecast's saving exceeds `MARGIN`.

    Args:
        pause_s: minimum pause in seconds between two verdicts about a run.
    """

    def __init__(
        self, store: Store, bus_url: str, owner: str, *, pause_s: float = NODE_VERDICT_INTERVAL_S
    ) -> None:
        self._store = store
        self._bus_url = bus_url
        self._owner = owner
        self._pause_s = pause_s
        # By key of the run: its attempt, and the step and monotonic time at which its next check
        # is due.
        self._next: dict[int, tuple[int, int, float]] = {}

    def scan(self, forecaster: Forecaster, stop: threading.Event) -> None:
        """Check all runs that are due."""
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

    def _is_due(self, run: RunOnNodes, step: int) -> bool:
        attempt, due, at = self._next.get(run.key, (-1, 0, 0.0))
        return time.monotonic() >= at and (attempt != run.attempt or step >= due)

    def _guarded(
        self, run: RunOnNodes, step: int, forecaster: Forecaster, stop: threading.Event
    ) -> bool:
        """Make a verdict and act on it; return True if the newest steps need no other verdict.

        Another verdict is needed if the ranks have just been placed, if this verdict failed, or if
        there is no spare now.
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
        # A failed verdict must not end the worker, which also plans runs.
        except Exception:
            log.exception("run %s: the slow-node check failed", run.id)
            return False

    def look(self, run: RunOnNodes, step: int) -> Slow | None:
        """Record the verdict about a run's newest steps, and return the node that it names.

        `step` is the run's newest complete step.
        """
        with self._store.read() as connection:
            placement = attempts.placement(connection, run.key)
            if placement is None or placement.attempt != run.attempt:
                # The ranks have just been placed, so no step of this placement is complete.
                return None
            seen = read_observed(connection, run.key, (None, None), placement)
        made = judge(seen)
        if made.steps < THRESHOLDS.node_steps:
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
        """Return True if a recent forecast is about the slow node; make one if there is none."""
        since = max(slow.step, step - AUTO_STEPS)
        with self._store.read() as connection:
            if replacements.forecast_of(connection, run.key, slow.node, since) is not None:
                return True
        # Forecast only the run without the slowness of the node. Forecasts of presets would take
        # most of the time, on cores that the run may need.
        future = forecaster.submit(run.id, FORECAST_STEPS, presets=())
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
        """Replace the node with a spare, if the run allows it and the forecast's saving is certain.

        Return False if the node should be replaced but no spare is available now.
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
