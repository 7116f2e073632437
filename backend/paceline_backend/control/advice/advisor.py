"""`auto`: forecasts what other policies would take, and switches where that is allowed."""

from __future__ import annotations

import concurrent.futures
import logging
import math
import threading
import time
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import redis

from paceline.core.outage import Outage
from paceline.wire import ENDED
from paceline_backend.insight.whatif.answer import STEPS, Decision, Forecast, kept
from paceline_backend.insight.whatif.auto import AUTO_STEPS, BY, FIRST_STEP, Mode, decide
from paceline_backend.insight.whatif.child import Forecaster
from paceline_backend.requests import switch
from paceline_backend.store import Connection, Store, StoreUnavailableError, switches
from paceline_backend.store.audit import Requester
from paceline_backend.store.outcomes import forecasts
from paceline_backend.store.outcomes.forecasts import Watched

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, PAUSE_S = 1.0, 30.0  # between two looks at a run: at least, and at most

_SCAN_S = 1.0
_POLL_S = 0.25


@dataclass(frozen=True)
class Looked:
    """The newest look at a run, and so when the next one is due.

    Args:
        step: the newest step that it saw.
        at: when, in s of a monotonic clock.
        pause_s: until the next look, at least.
    """

    step: int = FIRST_STEP - AUTO_STEPS
    at: float = -math.inf
    pause_s: float = FIRST_PAUSE_S

    def due(self, step: int, now: float) -> bool:
        """Whether the next look is due: `AUTO_STEPS` have passed, and the pause."""
        return step >= self.step + AUTO_STEPS and now >= self.at + self.pause_s

    def then(self, step: int, now: float, made: Forecast | None, most_s: float) -> Looked:
        """The look after this one.

        Args:
            step: the run's newest step.
            now: the time.
            made: the forecast, with a decision; None: there was none, or it came too late.
            most_s: the longest pause.
        """
        if made is None:
            return Looked(step, now, min(2 * self.pause_s, most_s))
        assert made.step is not None and made.decision is not None
        pause_s = self.pause_s
        if made.decision.decided in ("switch", "back"):
            pause_s = FIRST_PAUSE_S
        elif made.decision.decided != "wait":
            pause_s = min(2 * pause_s, most_s)
        return Looked(made.step, now, pause_s)


class Advisor:
    """Looks at runs whose `auto` is on, every `AUTO_STEPS` steps.

    A forecast costs seconds of a core, and short steps are no reason for more of them: each look
    that leads to nothing doubles the pause before the next one, up to `pause_s`. A promise that
    waits for the next look does not, and after a switch the pause is short again.

    The advisor keeps nothing of its own but when it looked: decisions are stored with their
    forecasts.

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
        self._looked: dict[int, Looked] = {}  # by run

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
        if watched:
            forecaster.start()
        self._looked = {key: at for key, at in self._looked.items() if key in newest}
        for run in watched:
            step, now = newest[run.key], time.monotonic()
            last = self._looked.get(run.key, Looked())
            if step < last.step:  # another attempt
                last = Looked()
            if last.due(step, now):
                made = self._advise(run, forecaster, stop)
                self._looked[run.key] = last.then(step, now, made, self._pause_s)
            if stop.is_set():
                return

    def _advise(
        self, run: Watched, forecaster: Forecaster, stop: threading.Event
    ) -> Forecast | None:
        """The forecast with what was decided after it; None: nothing was decided."""
        try:
            return self._look(run, forecaster, stop)
        except (StoreUnavailableError, redis.RedisError):
            raise
        except Exception:  # advice is not worth a worker, which plans runs
            logger.exception("run %s: no advice", run.id)
            return None

    def _look(self, run: Watched, forecaster: Forecaster, stop: threading.Event) -> Forecast | None:
        future = forecaster.submit(run.id, STEPS, relaxed=run.relaxed)
        while not concurrent.futures.wait([future], _POLL_S).done:
            if stop.is_set():
                return None
        made = future.result()
        return None if made.step is None else self._decide(run, made)

    def _decide(self, run: Watched, made: Forecast) -> Forecast | None:
        with self._store.read() as connection:
            asked = switches.history(connection, run.key)
            bodies = forecasts.bodies(connection, run.key)
        earlier = [forecast for forecast in kept(bodies) if forecast.decision is not None]
        if asked[-1].version != made.current.version:
            return None  # switched meanwhile
        decision = decide(made, earlier, asked, cast(Mode, run.mode), relaxed=run.relaxed)
        logger.info("run %s: auto: %s: %s", run.id, decision.decided, decision.reason)
        made = msgspec.structs.replace(made, decision=decision)
        body = msgspec.to_builtins(made)
        if decision.decided in ("switch", "back"):
            self._switch(run, decision, body)
        else:
            with self._store.write() as connection:
                forecasts.add(connection, run.key, body)
        return made

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
