"""`auto`: forecasts what other policies would take, and switches where that is allowed."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from typing import Any, cast

import msgspec
import redis

from paceline.core.outage import Outage
from paceline.wire import ENDED
from paceline_backend.insight.whatif.answer import STEPS, Decision, Forecast, kept
from paceline_backend.insight.whatif.auto import AUTO_STEPS, BY, Mode, decide
from paceline_backend.insight.whatif.child import Forecaster
from paceline_backend.requests import switch
from paceline_backend.store import Connection, Store, StoreUnavailableError, switches
from paceline_backend.store.audit import Requester
from paceline_backend.store.outcomes import forecasts
from paceline_backend.store.outcomes.forecasts import Watched

logger = logging.getLogger(__name__)

PAUSE_S = 30.0  # between two looks at a run, at least

_SCAN_S = 1.0
_POLL_S = 0.25


class Advisor:
    """Looks at runs whose `auto` is on, every `AUTO_STEPS` steps but not more often than `pause_s`.

    It keeps nothing of its own but when it looked: decisions are stored with their forecasts.

    Args:
        store: the database.
        bus_url: ``redis://…``.
        owner: this worker; runs that another one plans are that one's.
        pause_s: see above.
    """

    def __init__(self, store: Store, bus_url: str, owner: str, *, pause_s: float = PAUSE_S) -> None:
        self._store = store
        self._bus_url = bus_url
        self._owner = owner
        self._pause_s = pause_s
        self._looked: dict[int, tuple[int, float]] = {}  # run → step, monotonic time

    def run(self, stop: threading.Event) -> None:
        """Works until `stop` is set; waits out bus and database."""
        outage = Outage(logger, "auto looks again later", "auto looks at runs again")
        with Forecaster(self._store.url.render_as_string(hide_password=False)) as forecaster:
            while not stop.wait(_SCAN_S):
                try:
                    self._scan(forecaster, stop)
                    outage.over()
                except (StoreUnavailableError, redis.RedisError) as error:
                    stop.wait(outage.failed(error))

    def _scan(self, forecaster: Forecaster, stop: threading.Event) -> None:
        with self._store.read() as connection:
            watched = forecasts.watched(connection, self._owner)
            newest = {run.key: forecasts.newest_step(connection, run.key) for run in watched}
        self._looked = {key: at for key, at in self._looked.items() if key in newest}
        for run in watched:
            step, now = newest[run.key], time.monotonic()
            before, at = self._looked.get(run.key, (-AUTO_STEPS, -self._pause_s))
            # Fewer steps than before: another attempt.
            if step >= 0 and not before <= step < before + AUTO_STEPS and now >= at + self._pause_s:
                self._looked[run.key] = (step, now)
                self._advise(run, forecaster, stop)
            if stop.is_set():
                return

    def _advise(self, run: Watched, forecaster: Forecaster, stop: threading.Event) -> None:
        try:
            self._look(run, forecaster, stop)
        except (StoreUnavailableError, redis.RedisError):
            raise
        except Exception:  # advice is not worth a worker, which plans runs
            logger.exception("run %s: no advice", run.id)

    def _look(self, run: Watched, forecaster: Forecaster, stop: threading.Event) -> None:
        future = forecaster.submit(run.id, STEPS, relaxed=run.relaxed)
        while not concurrent.futures.wait([future], _POLL_S).done:
            if stop.is_set():
                return
        made = future.result()
        if made.step is not None:
            self._decide(run, made)

    def _decide(self, run: Watched, made: Forecast) -> None:
        with self._store.read() as connection:
            asked = switches.history(connection, run.key)
            bodies = forecasts.bodies(connection, run.key)
        earlier = [forecast for forecast in kept(bodies) if forecast.decision is not None]
        if asked[-1].version != made.current.version:
            return  # switched meanwhile
        decision = decide(made, earlier, asked, cast(Mode, run.mode), relaxed=run.relaxed)
        logger.info("run %s: auto: %s: %s", run.id, decision.decided, decision.reason)
        body = msgspec.to_builtins(msgspec.structs.replace(made, decision=decision))
        if decision.decided in ("switch", "back"):
            self._switch(run, decision, body)
        else:
            with self._store.write() as connection:
                forecasts.add(connection, run.key, body)

    def _switch(self, run: Watched, decision: Decision, body: dict[str, Any]) -> None:
        """Switches and keeps the forecast, unless somebody has changed policy or mind since."""
        assert decision.policy is not None

        def unless(connection: Connection) -> bool:
            allowed = forecasts.auto(connection, run.key)["mode"] == "switch"
            current = forecasts.version(connection, run.key) == body["current"]["version"]
            if not allowed or not current or forecasts.state(connection, run.key) in ENDED:
                return True
            forecasts.add(connection, run.key, body)
            return False

        policy, parameters = decision.policy, decision.parameters
        by = Requester(BY, why=decision.reason)
        switch(self._store, self._bus_url, run.id, policy, parameters, by, unless=unless)
