"""`auto`: forecasts what other policies would take, and switches where that is allowed."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
import redis

from paceline.wire import ENDED
from paceline_backend.insight.whatif.answer import STEPS, Decision, Forecast, kept
from paceline_backend.insight.whatif.auto import (
    AUTO_STEPS,
    BY,
    FIRST_STEP,
    Mode,
    decide,
    steps_to_hold,
)
from paceline_backend.insight.whatif.cautions import PLAIN
from paceline_backend.insight.whatif.child import Forecaster
from paceline_backend.requests import switch
from paceline_backend.store import Connection, Store, StoreUnavailableError, switches
from paceline_backend.store.audit import RequestedChange, Requester
from paceline_backend.store.outcomes import forecasts
from paceline_backend.store.outcomes.forecasts import AdvisedRun

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, PAUSE_S = 1.0, 30.0  # the first and the longest pause between two looks at a run

_POLL_S = 0.25


@dataclass(frozen=True)
class NextLook:
    """When `auto` looks at a run next.

    Args:
        attempt: the run's.
        step: the first step at which it is due.
        at: the earliest time, in s of a monotonic clock.
        pause_s: how long the look after it is put off, in s.
        option: label of the only option to forecast, to see whether a promise holds; None: all.
        relaxed: whether presets that change the training may be chosen.
    """

    attempt: int | None
    relaxed: bool
    step: int = FIRST_STEP
    at: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    option: str | None = None

    @property
    def presets(self) -> list[str] | None:
        """What to forecast; None: all. Harm is told by what `PLAIN` takes."""
        return None if self.option is None else [self.option, PLAIN]

    def after(self, made: Forecast | None, step: int, now: float, longest_s: float) -> NextLook:
        """The look after this one.

        Args:
            made: this look's forecast, with its decision; None: there is none.
            step: the run's newest step at this look.
            now: when this look ended.
            longest_s: the longest pause.
        """
        decision = None if made is None else made.decision
        switched = decision is not None and decision.decided in ("switch", "back")
        pause_s = min(FIRST_PAUSE_S if switched else self.pause_s, longest_s)
        soon = replace(
            self, step=step + FIRST_STEP, at=now + pause_s, pause_s=2 * pause_s, option=None
        )
        if made is None or decision is None:  # for want of steps, say
            return soon
        if self.option is not None and decision.decided in ("stay", "wait"):
            return soon  # the promise is broken: look at all options
        assert made.step is not None
        if decision.decided == "wait" and decision.policy is not None:
            promise = made.of(decision.policy, decision.parameters)
            assert promise is not None
            return replace(soon, step=made.step + steps_to_hold(promise), option=promise.label)
        # Of twice as many steps a forecast says more.
        steps = AUTO_STEPS if switched else min(AUTO_STEPS, max(FIRST_STEP, made.steps))
        return replace(soon, step=made.step + steps)


class Advisor:
    """Looks at runs whose `auto` is on: at the step `FIRST_STEP`, and then every `AUTO_STEPS`.

    Where a forecast rests on fewer steps than that, as at a run's begin and after a change of
    speed, the next one follows once there are twice as many.

    A promise is looked at again as soon as it must have held (`steps_to_hold`), without the other
    options, which takes a tenth to a fifth of the time.

    A forecast takes seconds of a core, whatever a step takes. So each look doubles the pause before
    the next one, up to `pause_s`, until `auto` switches: what that brought is looked at soon.

    The advisor keeps nothing of its own but when it looks next: decisions are stored with their
    forecasts.

    Args:
        store: the database.
        bus_url: ``redis://…``.
        owner: this worker; runs that another one plans are that one's.
        pause_s: the longest pause before a run's next look.
    """

    def __init__(self, store: Store, bus_url: str, owner: str, *, pause_s: float = PAUSE_S) -> None:
        self._store = store
        self._bus_url = bus_url
        self._owner = owner
        self._pause_s = pause_s
        self._next: dict[int, NextLook] = {}  # by run

    def scan(self, forecaster: Forecaster, stop: threading.Event) -> bool:
        """Look at all runs whose turn it is; return whether `auto` is on in any.

        Raises:
            StoreUnavailableError: the database is away.
            redis.RedisError: the bus is away.
        """
        with self._store.read() as connection:
            watched = forecasts.watched(connection, self._owner)
            newest = {run.key: forecasts.newest_step(connection, run.key) for run in watched}
        self._next = {key: look for key, look in self._next.items() if key in newest}
        if watched:
            _start(forecaster)
        for run in watched:
            step, look = newest[run.key], self._next.get(run.key)
            if look is None or (look.attempt, look.relaxed) != (run.attempt, run.relaxed):
                look = NextLook(run.attempt, run.relaxed)
            if step >= look.step and (now := time.monotonic()) >= look.at:
                # Kept before the look: one that fails must not hold up the looks at other runs.
                self._next[run.key] = look.after(None, step, now, self._pause_s)
                made = self._advise(run, look, forecaster, stop)
                self._next[run.key] = look.after(made, step, time.monotonic(), self._pause_s)
            if stop.is_set():
                break
        return bool(watched)

    def _advise(
        self, run: AdvisedRun, look: NextLook, forecaster: Forecaster, stop: threading.Event
    ) -> Forecast | None:
        """A forecast, and what was decided after it; None: there is no decision."""
        try:
            return self._look(run, look, forecaster, stop)
        except (StoreUnavailableError, redis.RedisError):
            raise
        except Exception:  # advice is not worth a worker, which plans runs
            logger.exception("run %s: no advice", run.id)
            return None

    def _look(
        self, run: AdvisedRun, look: NextLook, forecaster: Forecaster, stop: threading.Event
    ) -> Forecast | None:
        future = forecaster.submit(run.id, STEPS, look.presets, relaxed=run.relaxed)
        while not concurrent.futures.wait([future], _POLL_S).done:
            if stop.is_set():
                return None
        made = replace(future.result(), option=look.option)
        labels = [option.label for option in made.forecasts]
        if made.step is None or look.option not in (None, *labels):
            return None
        return self._decide(run, made)

    def _decide(self, run: AdvisedRun, made: Forecast) -> Forecast | None:
        with self._store.read() as connection:
            asked = switches.history(connection, run.key)
            bodies = forecasts.bodies(connection, run.key)
        earlier = [forecast for forecast in kept(bodies) if forecast.decision is not None]
        if asked[-1].version != made.current.version:
            return None  # switched meanwhile
        decision = decide(made, earlier, asked, cast(Mode, run.mode), relaxed=run.relaxed)
        logger.info("run %s: auto: %s: %s", run.id, decision.decided, decision.reason)
        made = replace(made, decision=decision)
        body = msgspec.to_builtins(made)
        if decision.decided in ("switch", "back"):
            self._switch(run, decision, body)
        else:
            with self._store.write() as connection:
                forecasts.add(connection, run.key, body)
        return made

    def _switch(self, run: AdvisedRun, decision: Decision, body: dict[str, Any]) -> None:
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
        change = RequestedChange(run.id, Requester(BY, why=decision.reason))
        switch(self._store, self._bus_url, change, policy, parameters, unless=unless)


def _start(forecaster: Forecaster) -> None:
    try:
        forecaster.start()
    except Exception:  # the first forecast tries again, and then the error is logged
        logger.debug("the child that forecasts cannot be started", exc_info=True)
