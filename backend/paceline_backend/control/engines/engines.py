"""Sees to it that engines have the jobs that runs ask for, and no others.

What runs ask for stands in the database (`store.jobs`), and `Engine.look` says what there is. The
two are compared again and again, so it does not matter what was done when a worker was killed:

* A job that was asked for and that the engine does not have is submitted. A worker that was killed
  after it submitted one finds it by its label.
* A run whose jobs have all ended, and that says nothing more, has failed, for the engine's reason;
  or it is stopped, if somebody cancelled them.
* Jobs of a run that has ended are stopped, once its nodes had time to deliver what they have. Those
  of a run that went elsewhere or was deleted are stopped at once (`store.nodes.engine_runs`).
* An engine is told of cordons of its machines, and of their ends.

A worker acts for a run while it has a claim on it (`claims`). Before it submits a job, or concludes
that none is left, it has had the claim since before it asked the engine: so what another worker did
for the run shows in the answer. A worker that is killed leaves its claims for `claims.LEASE_S`: so
long nothing is submitted or concluded for these runs. A worker that ends gives them back. While an
engine does not answer, nothing is concluded about its runs.
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
from paceline_backend.control.engines.claims import Claims
from paceline_backend.control.engines.engine_jobs import stop_left
from paceline_backend.control.nodes import cordons
from paceline_backend.store import Store, StoreError, jobs
from paceline_backend.store.jobs import EngineRun
from paceline_backend.store.nodes import engine_cordons, engine_runs
from paceline_backend.store.nodes.engine_cordons import Word
from paceline_backend.store.nodes.engine_runs import Leftover

log = logging.getLogger(__name__)

_LOOK_S = 3.0  # an engine is asked so often, and at once for a job to submit


class Engines:
    """Compares the runs on all engines with the engines' jobs. For one thread.

    Args:
        store: the database.
        owner: this worker's name.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        store: Store,
        owner: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._clock = clock
        self._claims = Claims(store, owner)
        self._attendant = Attendant(store, self._claims, _LOOK_S, clock)
        self._look_at: dict[str, float] = {}  # by engine
        self._outages: dict[str, Outage] = {}  # by engine, of its cordons, and by run

    def keep_claims(self) -> None:
        """Extend the claims on runs, while a look may take long."""
        self._claims.keep()

    def end(self) -> None:
        """Give the claims back, so that another worker need not wait."""
        self._claims.give_back()

    def look(self, client: redis.Redis) -> bool:
        """Look once at the engines whose turn it is; return whether there is any.

        Raises:
            redis.RedisError: the bus is away.
            StoreError: or one of its kinds.
        """
        engines = backends.engines()
        with self._store.read() as connection:
            known = jobs.open_runs(connection, list(engines))
            left = engine_runs.leftovers(connection, list(engines))
            words = engine_cordons.waiting(connection, list(engines))
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
        return bool(known or left or words)

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
        begins = f"run {run.id}: its jobs cannot be looked after"
        return self._pauses(run.id, begins, f"run {run.id}: its jobs are looked after again")

    def _pauses(self, what: str, begins: str, ends: str) -> Outage:
        return self._outages.setdefault(what, Outage(log, begins, ends, most_s=10.0))

    def _tell(self, engine: Engine, untold: Sequence[Word]) -> None:
        begins, ends = "is told of cordons later", "is told of cordons again"
        outage = self._pauses(
            f"{engine.name} cordons", f"{engine.title} {begins}", f"{engine.title} {ends}"
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
        self._attendant.claim(own, left)  # before the engine is asked
        try:
            of_run: dict[str, list[Job]] = defaultdict(list)
            for job in engine.look(prefix):
                of_run[job.label.removeprefix(prefix).partition(".")[0]].append(job)
        except EngineAwayError as error:
            outage.failed(error)
            for run in own:
                self._attendant.tell_away(client, run, f"{engine.title} does not answer: {error}")
            return
        except Exception as error:  # of somebody's own engine: the others go on
            if not outage.active:
                log.exception("what looks after runs on %s has a fault", engine.title)
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
        """Does what a run needs. What goes wrong with one run holds up no other."""
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
        except Exception as error:  # of somebody's own engine
            if not trouble.active:
                log.exception("run %s: what looks after its jobs has a fault", run.id)
            trouble.failed(error)

    def _clear_up(
        self, engine: Engine, left: Sequence[Leftover], of_run: Mapping[str, Sequence[Job]]
    ) -> None:
        """Stops what an engine has of runs that are not there any more.

        Those that came back while it was asked are left alone.
        """
        begins, ends = "leftovers are stopped later", "leftovers are stopped again"
        outage = self._pauses(
            f"{engine.name} leftovers", f"{engine.title}: {begins}", f"{engine.title}: {ends}"
        )
        if outage.paused:
            return
        try:
            with self._store.read() as connection:
                still = engine_runs.leftovers(connection, [engine.name])
            for each in (each for each in left if each in still):
                alone = each.key is None or self._claims.alone(each.run)
                stop_left(self._store, engine, each, of_run.get(each.run, ()), alone=alone)
            outage.over()
        except (StoreError, redis.RedisError):
            raise
        except Exception as error:  # the engine is away, or somebody's own one has a fault
            outage.failed(error)
