"""Advice on the policies of runs, and the measured effects of switches.

`auto`, which a user turns on for a run, forecasts the step times of other policies, and switches to
another policy if the run allows it. The worker calls `Advisor.scan` every two seconds. Forecasts
run in the child process of a `Forecaster`. Based on a forecast, `insight.whatif.auto` decides
whether to switch. Decisions are stored with their forecasts.

The worker calls `Effects.look` every few seconds. `Effects` stores the effect of each switch once
enough steps have followed, or at the run's end.
"""

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
from paceline_backend.insight import effects
from paceline_backend.insight.whatif.answer import FORECAST_STEPS, Decision, Forecast, kept
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
from paceline_backend.store import Connection, Store, StoreError, StoreUnavailableError, switches
from paceline_backend.store.audit import RequestedChange, Requester
from paceline_backend.store.outcomes import effects as stored_effects
from paceline_backend.store.outcomes import forecasts
from paceline_backend.store.outcomes.effects import Due
from paceline_backend.store.outcomes.forecasts import AdvisedRun

logger = logging.getLogger(__name__)

# Pause between the first two checks of a run, and the maximum to which later pauses grow.
FIRST_CHECK_PAUSE_S, MOST_CHECK_PAUSE_S = 1.0, 30.0

_POLL_S = 0.25

# Minimum number of steps of an active run between two measurements of its switches' effects.
LOOK_STEPS = 20

# Maximum number of ended runs per `Effects.look`. After an upgrade of the database, the effects of
# many ended runs may not be stored yet.
_MOST_ENDED = 20


@dataclass(frozen=True)
class NextLook:
    """Schedule of the next check of a run.

    Args:
        step: the first step at which the check is due.
        at: the earliest time of the check, in seconds of a monotonic clock.
        pause_s: delay in seconds between this check and the one after it.
        option: label of the policy to forecast, when checking whether an earlier forecast of that
            policy still holds. None means all policies.
        relaxed: True if the run allows presets that change the training.
    """

    attempt: int | None
    relaxed: bool
    step: int = FIRST_STEP
    at: float = 0.0
    pause_s: float = FIRST_CHECK_PAUSE_S
    option: str | None = None

    @property
    def presets(self) -> list[str] | None:
        """Presets to forecast; None means all.

        `PLAIN` is among them, because a forecast warns of policies that are slower than `PLAIN`.
        """
        return None if self.option is None else [self.option, PLAIN]

    def after(self, made: Forecast | None, step: int, now: float, longest_s: float) -> NextLook:
        """Return the schedule of the check after this one.

        Args:
            made: forecast of this check, with its decision, or None if there is none.
            step: the run's newest step at this check.
            now: end of this check, in seconds of a monotonic clock.
            longest_s: longest pause, in seconds.
        """
        decision = None if made is None else made.decision
        switched = decision is not None and decision.decided in ("switch", "back")
        pause_s = min(FIRST_CHECK_PAUSE_S if switched else self.pause_s, longest_s)
        soon = replace(
            self, step=step + FIRST_STEP, at=now + pause_s, pause_s=2 * pause_s, option=None
        )
        if made is None or decision is None:
            return soon
        if self.option is not None and decision.decided in ("stay", "wait"):
            # The earlier forecast does not hold, so forecast all policies in the next check.
            return soon
        assert made.step is not None
        if decision.decided == "wait" and decision.policy is not None:
            promise = made.of(decision.policy, decision.parameters)
            assert promise is not None
            return replace(soon, step=made.step + steps_to_hold(promise), option=promise.label)
        # Check again once there are twice as many steps, because a forecast from more steps is more
        # certain.
        steps = AUTO_STEPS if switched else min(AUTO_STEPS, max(FIRST_STEP, made.steps))
        return replace(soon, step=made.step + steps)


class Advisor:
    """Checker of runs whose `auto` is on, at step `FIRST_STEP` and then every `AUTO_STEPS` steps.

    If a forecast is based on fewer than `AUTO_STEPS` steps, as at a run's start and after a change
    of speed, the next forecast follows once there are twice as many steps.

    `auto` acts on a promising forecast only if the forecast still holds `steps_to_hold` steps
    later. The next check follows at that step. This check forecasts only the promising policy,
    `PLAIN` and the policy in force, which takes a tenth to a fifth of the time of a full check.

    A forecast takes seconds of a CPU core, even if the `AUTO_STEPS` steps between two checks take
    less time. To save CPU time, each check doubles the pause before the next one, up to `pause_s`,
    until `auto` switches.

    Args:
        pause_s: longest pause before a run's next check, in seconds.
    """

    def __init__(
        self, store: Store, bus_url: str, owner: str, *, pause_s: float = MOST_CHECK_PAUSE_S
    ) -> None:
        self._store = store
        self._bus_url = bus_url
        self._owner = owner
        self._pause_s = pause_s
        self._next: dict[int, NextLook] = {}

    def scan(self, forecaster: Forecaster, stop: threading.Event) -> None:
        """Check all runs in which `auto` is on and whose next check is due."""
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
                # Reschedule before the check, so that a check that fails cannot block other runs.
                self._next[run.key] = look.after(None, step, now, self._pause_s)
                made = self._advise(run, look, forecaster, stop)
                self._next[run.key] = look.after(made, step, time.monotonic(), self._pause_s)
            if stop.is_set():
                break

    def _advise(
        self, run: AdvisedRun, look: NextLook, forecaster: Forecaster, stop: threading.Event
    ) -> Forecast | None:
        try:
            return self._look(run, look, forecaster, stop)
        except (StoreUnavailableError, redis.RedisError):
            raise
        # A failed forecast must not end the worker, which also plans runs.
        except Exception:
            logger.exception("run %s: the policy forecast failed", run.id)
            return None

    def _look(
        self, run: AdvisedRun, look: NextLook, forecaster: Forecaster, stop: threading.Event
    ) -> Forecast | None:
        future = forecaster.submit(run.id, FORECAST_STEPS, look.presets, relaxed=run.relaxed)
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
            # The policy was switched during the forecast, so the forecast is out of date.
            return None
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
        """Switch the policy and store the forecast.

        Do neither if the run has ended, or if a user has changed its policy or `auto` since the
        forecast.
        """
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
    # Ignore the error here, because the first forecast starts the child again and logs the error.
    except Exception:
        logger.debug("the forecast process cannot be started", exc_info=True)


class Effects:
    """Task that updates the stored effect of each switch until it is final. Not thread-safe.

    For each switch of a run, a check reads at most 200 steps before it and 200 steps after it. So
    transactions are short, and block neither planning nor ingest.
    """

    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._owner = owner
        # Newest step at the last check, by key of the active run.
        self._looked: dict[int, int] = {}

    def look(self, stop: threading.Event) -> None:
        """Store the effects of switches in all runs whose check is due."""
        with self._store.read() as connection:
            due = stored_effects.due(connection, self._owner, _MOST_ENDED)
            newest = {run.key: forecasts.newest_step(connection, run.key) for run in due}
        active = {run.key for run in due if not run.ended}
        self._looked = {key: step for key, step in self._looked.items() if key in active}
        for run in due:
            if stop.is_set():
                return
            # If the run has fewer steps than before, a new attempt has started.
            before, step = self._looked.get(run.key, -LOOK_STEPS), newest[run.key]
            if run.ended or not before <= step < before + LOOK_STEPS:
                if not run.ended:
                    self._looked[run.key] = step
                self._guarded(run)

    def _guarded(self, run: Due) -> None:
        try:
            effects.note(self._store, run.key, ended=run.ended)
        except StoreError:
            raise
        # A failure here must not end the worker, which also plans runs.
        except Exception:
            logger.exception("run %s: the effects of its policy switches were not measured", run.id)
