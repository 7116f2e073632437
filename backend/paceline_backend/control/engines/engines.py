"""Reconciliation of engines with the database: engines have the jobs that runs request, no others.

The database holds the requested jobs (`store.jobs`), and `Engine.look` lists the existing ones. The
worker compares the two every few seconds, so it can be killed at any time:

* It submits a requested job that the engine does not have. A job that a killed worker had submitted
  is found by its label.
* If all jobs of a run have ended and no more messages arrive, the run fails with the engine's
  reason, or is stopped if the jobs were cancelled.
* It stops the jobs of an ended run, after its nodes had time to deliver their telemetry. Jobs of a
  run that moved elsewhere or was deleted are stopped at once (`store.jobs.leftovers`).
* It passes cordons of machines, and their ends, to the engine.

A worker acts for a run only while it holds a claim on it (`claims`). It submits a job, or concludes
that none is left, only if it has held the claim since before it queried the engine, so that the
answer includes everything that other workers did. The claims of a killed worker last for
`claims.LEASE_S`. Until then, nothing is submitted or concluded for its runs. A worker that ends
gives its claims back. While an engine does not answer, nothing is concluded about its runs.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import redis

from paceline.core.outage import Outage
from paceline_backend import backends
from paceline_backend.backends import Engine, EngineAwayError, Job
from paceline_backend.control.engines.attending import Attendant
from paceline_backend.control.engines.claims import EngineClaims
from paceline_backend.control.engines.engine_jobs import stop_left
from paceline_backend.control.nodes import cordons
from paceline_backend.store import Store, StoreError, jobs
from paceline_backend.store.jobs import EngineRun, Leftover
from paceline_backend.store.nodes import cordons as stored_cordons
from paceline_backend.store.nodes.cordons import Word

log = logging.getLogger(__name__)

# Interval at which an engine is queried. Jobs to submit cause a query at once.
_LOOK_S = 3.0


class Engines:
    """Reconciler of all runs on engines. Not thread-safe."""

    def __init__(
        self,
        store: Store,
        owner: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._clock = clock
        self._claims = EngineClaims(store, owner)
        self._attendant = Attendant(store, self._claims, _LOOK_S, clock)
        # By engine: time of the next query.
        self._look_at: dict[str, float] = {}
        # By engine, by engine and kind of work (cordons, leftovers), and by run.
        self._outages: dict[str, Outage] = {}

    def keep_claims(self) -> None:
        """Extend the claims on runs; another thread than that of `look` calls this."""
        self._claims.keep()

    def end(self) -> None:
        """Give the claims back, so that another worker need not wait."""
        self._claims.give_back()

    def look(self, client: redis.Redis) -> None:
        """Reconcile the engines that are due."""
        engines = backends.engines()
        with self._store.read() as connection:
            known = jobs.open_runs(connection, list(engines))
            left = jobs.leftovers(connection, list(engines))
            words = stored_cordons.untold(connection, list(engines))
        ids = {run.id for run in known}
        self._attendant.forget_others(ids)
        self._claims.forget_others(ids | {each.run for each in left})
        kept = ids | {
            f"{name}{part}" for name in engines for part in ("", " cordons", " leftovers")
        }
        self._outages = {what: each for what, each in self._outages.items() if what in kept}
        for name, engine in engines.items():
            own = [run for run in known if run.backend == name]
            others = [each for each in left if each.backend == name]
            if (own or others) and self._due(engine, own):
                self._attend_all(client, engine, own, others)
            untold = [word for word in words if word.backend == name]
            if untold:
                self._tell(engine, untold)

    def _due(self, engine: Engine, own: Sequence[EngineRun]) -> bool:
        name = engine.name
        if self._outage(engine).paused:
            return False
        urgent = any(
            not run.final and run.jobs.get("0", "") is None and not self._trouble(run).paused
            for run in own
        )
        due = urgent or self._clock() >= self._look_at.get(name, 0.0)
        if due:
            self._look_at[name] = self._clock() + _LOOK_S
        return due

    def _outage(self, engine: Engine) -> Outage:
        begins = f"{engine.title} does not answer: its runs stay as they are"
        return self._pauses(engine.name, begins, f"{engine.title} answers again")

    def _trouble(self, run: EngineRun) -> Outage:
        begins = f"run {run.id}: managing its jobs failed"
        return self._pauses(run.id, begins, f"run {run.id}: managing its jobs works again")

    def _pauses(self, what: str, begins: str, ends: str) -> Outage:
        return self._outages.setdefault(what, Outage(log, begins, ends, most_s=10.0))

    def _tell(self, engine: Engine, untold: Sequence[Word]) -> None:
        begins, ends = "forwarding cordons is delayed", "forwarding cordons works again"
        outage = self._pauses(
            f"{engine.name} cordons", f"{engine.title}: {begins}", f"{engine.title}: {ends}"
        )
        if outage.paused:
            return
        try:
            cordons.tell(self._store, engine, self._attendant.plane, untold)
            outage.over()
        except EngineAwayError as error:
            outage.failed(error)

    def _attend_all(
        self,
        client: redis.Redis,
        engine: Engine,
        own: Sequence[EngineRun],
        left: Sequence[Leftover],
    ) -> None:
        outage = self._outage(engine)
        prefix = f"paceline.{self._attendant.plane}."
        # Claims must be older than the engine's answer.
        self._attendant.claim(own, left)
        try:
            of_run: dict[str, list[Job]] = defaultdict(list)
            for job in engine.look(prefix):
                of_run[job.label.removeprefix(prefix).partition(".")[0]].append(job)
        except EngineAwayError as error:
            outage.failed(error)
            for run in own:
                self._attendant.tell_away(client, run, f"{engine.title} does not answer: {error}")
            return
        # Engines can be plug-ins; a faulty one must not block the others.
        except Exception as error:
            if not outage.active:
                log.exception("managing runs on %s failed", engine.title)
            outage.failed(error)
            return
        outage.over()
        for run in own:
            self._attend_one(client, engine, run, of_run.get(run.id, []))
        if left:
            self._clear_up(engine, left, of_run)

    def _attend_one(
        self, client: redis.Redis, engine: Engine, run: EngineRun, known: Sequence[Job]
    ) -> None:
        """Reconcile one run. Its errors do not affect other runs."""
        trouble = self._trouble(run)
        if trouble.paused:
            return
        try:
            self._attendant.attend(client, engine, run, known)
            trouble.over()
        except EngineAwayError as error:
            trouble.failed(error)
            self._attendant.tell_away(client, run, f"{engine.title} does not answer: {error}")
        except (StoreError, redis.RedisError):
            raise
        # Engines can be plug-ins with faults of their own.
        except Exception as error:
            if not trouble.active:
                log.exception("run %s: managing its jobs failed", run.id)
            trouble.failed(error)

    def _clear_up(
        self, engine: Engine, left: Sequence[Leftover], of_run: Mapping[str, Sequence[Job]]
    ) -> None:
        """Stop the engine's jobs of runs that have moved away or were deleted.

        Runs that came back during the engine's query are left alone.
        """
        begins, ends = "stopping leftover jobs is delayed", "stopping leftover jobs works again"
        outage = self._pauses(
            f"{engine.name} leftovers", f"{engine.title}: {begins}", f"{engine.title}: {ends}"
        )
        if outage.paused:
            return
        try:
            with self._store.read() as connection:
                still = jobs.leftovers(connection, [engine.name])
            for each in (each for each in left if each in still):
                alone = each.key is None or self._claims.alone(each.run)
                stop_left(self._store, engine, each, of_run.get(each.run, ()), alone=alone)
            outage.over()
        except (StoreError, redis.RedisError):
            raise
        # The engine does not answer, or it is a plug-in with a fault.
        except Exception as error:
            outage.failed(error)
