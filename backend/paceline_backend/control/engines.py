"""Reconciliation of engines with the database, so that engines have exactly the requested jobs.

The database holds the requested jobs (`store.jobs`), and `Engine.look` lists the jobs that exist.
The worker compares both lists every few seconds, so it can be killed at any time:

* It submits a requested job that the engine does not have. A job that a killed worker had submitted
  is found by its label.
* If all jobs of a run have ended and no more messages arrive, the run fails with the engine's
  reason, or is stopped if the jobs were cancelled.
* It stops the jobs of an ended run, after its nodes had time to deliver their telemetry. Jobs of a
  run that moved to another backend or was deleted are stopped at once (`store.jobs.leftovers`).
* It passes cordons of machines, and their ends, to the engine.

`Engines` decides which engines are due, and isolates errors of one engine or run.
`Attendant` reconciles a single run with the jobs that its engine has just listed. A *part* is one
of a run's jobs: part "0" starts the run, and the others bring nodes that join later.

A worker acts for a run only while it holds a claim on it (`EngineClaims`). It submits a job, or
concludes that none is left, only if it took the claim before it queried the engine. The engine's
answer then includes everything that other workers did. The claims of a killed worker last for
`ENGINE_LEASE_S`. Until then, nothing is submitted or concluded for its runs. A worker that ends
gives its claims back. While an engine does not answer, nothing is concluded about its runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

import redis

from paceline.core.outage import Outage
from paceline.wire import State
from paceline.wire.states import WAITING
from paceline_backend import backends
from paceline_backend.backends import Engine, EngineAwayError, EngineRefusedError, Job, Order
from paceline_backend.control import leases
from paceline_backend.control.leases import Lease
from paceline_backend.control.listening import ListeningClock
from paceline_backend.requests import streams
from paceline_backend.store import Store, StoreError, jobs, meta, runs
from paceline_backend.store.jobs import EngineRun, Leftover
from paceline_backend.store.new_runs import NewRun
from paceline_backend.store.nodes import cordons
from paceline_backend.store.nodes.cordons import Word

log = logging.getLogger(__name__)

# Time after which another worker takes over the runs on engines of a worker that was killed.
ENGINE_LEASE_S = 10.0
# Interval at which an engine is queried. If there is a job to submit, the query is made at once.
_ENGINE_POLL_S = 3.0
# A run whose jobs have all ended is ended once none of its messages has arrived for this time.
_JOBS_SETTLE_S = 5.0
# Time for which the nodes of an ended run can deliver telemetry before their jobs are stopped.
_DELIVERY_GRACE_S = 20.0


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
        self._attendant = Attendant(store, self._claims, _ENGINE_POLL_S, clock)
        # By engine: time of the next query.
        self._look_at: dict[str, float] = {}
        # Outages by key: an engine's name, an engine's name with a kind of work (cordons or
        # leftovers), or a run's id.
        self._outages: dict[str, Outage] = {}

    def keep_claims(self) -> None:
        """Extend the claims on runs. Called by a thread of its own, not by the thread of `look`."""
        self._claims.keep()

    def end(self) -> None:
        """Give the claims back, so that another worker can take them at once."""
        self._claims.give_back()

    def look(self, client: redis.Redis) -> None:
        """Reconcile the engines that are due."""
        engines = backends.engines()
        with self._store.read() as connection:
            known = jobs.open_runs(connection, list(engines))
            left = jobs.leftovers(connection, list(engines))
            words = cordons.untold(connection, list(engines))
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
                self._forward_cordons(engine, untold)

    def _due(self, engine: Engine, own: Sequence[EngineRun]) -> bool:
        name = engine.name
        if self._outage(engine).paused:
            return False
        urgent = any(
            not run.final and run.jobs.get("0", "") is None and not self._run_outage(run).paused
            for run in own
        )
        due = urgent or self._clock() >= self._look_at.get(name, 0.0)
        if due:
            self._look_at[name] = self._clock() + _ENGINE_POLL_S
        return due

    def _outage(self, engine: Engine) -> Outage:
        begins = f"{engine.title} does not answer: its runs stay as they are"
        return self._outage_of(engine.name, begins, f"{engine.title} answers again")

    def _run_outage(self, run: EngineRun) -> Outage:
        begins = f"run {run.id}: managing its jobs failed"
        return self._outage_of(run.id, begins, f"run {run.id}: managing its jobs works again")

    def _outage_of(self, what: str, begins: str, ends: str) -> Outage:
        return self._outages.setdefault(what, Outage(log, begins, ends, most_s=10.0))

    def _forward_cordons(self, engine: Engine, untold: Sequence[Word]) -> None:
        begins, ends = "forwarding cordons is delayed", "forwarding cordons works again"
        outage = self._outage_of(
            f"{engine.name} cordons", f"{engine.title}: {begins}", f"{engine.title}: {ends}"
        )
        if outage.paused:
            return
        try:
            _pass_cordons(self._store, engine, self._attendant.plane, untold)
            outage.succeeded()
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
        # Take the claims before the engine is queried, because they must be older than its answer.
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
        outage.succeeded()
        for run in own:
            self._attend_one(client, engine, run, of_run.get(run.id, []))
        if left:
            self._stop_leftovers(engine, left, of_run)

    def _attend_one(
        self, client: redis.Redis, engine: Engine, run: EngineRun, known: Sequence[Job]
    ) -> None:
        outage = self._run_outage(run)
        if outage.paused:
            return
        try:
            self._attendant.attend(client, engine, run, known)
            outage.succeeded()
        except EngineAwayError as error:
            outage.failed(error)
            self._attendant.tell_away(client, run, f"{engine.title} does not answer: {error}")
        except (StoreError, redis.RedisError):
            raise
        # Engines can be plug-ins; an error in one must not affect other runs.
        except Exception as error:
            if not outage.active:
                log.exception("run %s: managing its jobs failed", run.id)
            outage.failed(error)

    def _stop_leftovers(
        self, engine: Engine, left: Sequence[Leftover], of_run: Mapping[str, Sequence[Job]]
    ) -> None:
        """Stop leftover jobs, except those of runs that have come back to the engine."""
        begins, ends = "stopping leftover jobs is delayed", "stopping leftover jobs works again"
        outage = self._outage_of(
            f"{engine.name} leftovers", f"{engine.title}: {begins}", f"{engine.title}: {ends}"
        )
        if outage.paused:
            return
        try:
            with self._store.read() as connection:
                still = jobs.leftovers(connection, [engine.name])
            for each in (each for each in left if each in still):
                alone = each.key is None or self._claims.alone(each.run)
                _stop_left(self._store, engine, each, of_run.get(each.run, ()), alone=alone)
            outage.succeeded()
        except (StoreError, redis.RedisError):
            raise
        # The engine does not answer, or it is a plug-in with a fault.
        except Exception as error:
            outage.failed(error)


class Attendant:
    """Reconciler of single runs with the jobs that their engine has just listed. Not thread-safe.

    `pause_s` is the interval in seconds at which an engine is queried.
    """

    def __init__(
        self, store: Store, claims: EngineClaims, pause_s: float, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._claims = claims
        self._listened = ListeningClock(pause_s, clock)
        self._plane_id = ""
        # By run: the time at which this worker first found that the run, or all its jobs, had
        # ended; and the time of the run's last message, as known then.
        self._since: dict[str, tuple[float, object]] = {}
        # By run: the parts whose jobs had not ended when the engine last listed any such job.
        # Contains only runs that this worker has seen active, and whose jobs it has not stopped
        # since.
        self._last: dict[str, Collection[str]] = {}

    def forget_others(self, ids: Collection[str]) -> None:
        """Forget all runs except `ids`. `Engines.look` must call this each time."""
        self._listened()
        self._since = {run: since for run, since in self._since.items() if run in ids}
        self._last = {run: parts for run, parts in self._last.items() if run in ids}

    @property
    def plane(self) -> str:
        """ID of the control plane."""
        self._plane_id = self._plane_id or meta.control_id(self._store)
        return self._plane_id

    def claim(self, own: Sequence[EngineRun], left: Sequence[Leftover]) -> None:
        """Claim runs with jobs to submit, and runs whose remaining jobs, if any, must be stopped.

        The latter are runs that have ended or have moved to another backend.
        """
        keys = {run.id: run.key for run in own if run.final or None in run.jobs.values()}
        keys |= {each.run: each.key for each in left if each.key is not None}
        self._claims.take(keys)

    def attend(
        self, client: redis.Redis, engine: Engine, run: EngineRun, known: Sequence[Job]
    ) -> None:
        """Reconcile one run with the jobs that the engine has for it.

        Raises:
            EngineAwayError: the engine does not answer.
        """
        if run.final:
            self._finish(client, engine, run, known)
            return
        by_part = self._by_part(run, known)
        left = [part for part, job in by_part.items() if job.state != "ended"]
        self._last[run.id] = left or self._last.get(run.id, ())
        kept = {job.ref for job in by_part.values()}
        # Surplus jobs are from an earlier launch, were withdrawn, or were submitted twice.
        surplus = [job.ref for job in known if job.state != "ended" and job.ref not in kept]
        if surplus and self._holds_claim(run):
            log.warning("run %s: surplus jobs are stopped: %s", run.id, ", ".join(surplus))
            engine.stop(surplus)
        # First record which jobs have begun, and only then submit others, so that nodes that have
        # arrived need not wait for the submissions.
        if new := _seen_to_begin(run, by_part):
            with self._store.write() as connection:
                jobs.note_begun(connection, run, new)
        for part, ref in run.jobs.items():
            if part in by_part and by_part[part].ref != ref:
                self._note(run, part, by_part[part].ref)
            elif part not in by_part and ref is None and _may_submit(run, part, by_part):
                self._submit(client, engine, run, part)
        self._forget_replaced(run, by_part)
        self._conclude(client, engine, run, by_part)

    def _submit(self, client: redis.Redis, engine: Engine, run: EngineRun, part: str) -> None:
        """Submit a job, unless another worker may have done so or the job is no longer wanted."""
        options = backends.options_of(engine.options, run.options)
        if not self._claims.alone(run.id):
            return
        with self._store.read() as connection:
            if not jobs.wanted(connection, run, part):
                return
            avoid = jobs.avoided(connection, run, part)
        order = Order(
            label=self._label(run, part),
            run=run.id,
            nodes=run.nodes_min if part == "0" else 1,
            nproc=run.nproc,
            cwd=backends.directory(NewRun("", run.script, run.nproc, "", cwd=run.cwd)),
            options=options,
            server=str(run.options.get("server", "")),
            token=jobs.token(self._store, run),
            avoid=avoid,
        )
        try:
            ref = engine.submit(order)
        except EngineRefusedError as error:
            self._refused(client, engine, run, part, f"{engine.title} refuses the job: {error}")
            return
        log.info("run %s: submitted as job %s of %s", run.id, ref, engine.title)
        self._note(run, part, ref)
        self._queue(client, run, f"waits as job {ref} of {engine.title}")

    def _refused(
        self, client: redis.Redis, engine: Engine, run: EngineRun, part: str, why: str
    ) -> None:
        if part == "0":
            self._end(client, run, State.FAILED, why)
            return
        log.warning("run %s: %s", run.id, why)
        with self._store.write() as connection:
            jobs.note(connection, run, part, None)
            runs.tell(connection, run.id, why)
        streams.tell_change(client, run.id)

    def _conclude(
        self, client: redis.Redis, engine: Engine, run: EngineRun, by_part: dict[str, Job]
    ) -> None:
        """Record the reason why a run waits, or end the run if none of its jobs is left."""
        left = [job for job in by_part.values() if job.state != "ended"]
        last = self._last[run.id]
        begins_with = by_part.get("0")
        if run.state in WAITING and begins_with and begins_with.state == "ended":
            # No node of the first job arrived, so the nodes of other jobs have nothing to join.
            left, last = [], ["0"]
        if left or run.jobs.get("0") is None:
            self._since.pop(run.id, None)
            if left and all(job.state == "queued" for job in left):
                job = left[0]
                self._queue(client, run, f"waits as job {job.ref} of {engine.title}: {job.reason}")
            elif left:
                ref = left[0].ref
                self._queue(client, run, f"waits for the nodes of job {ref} of {engine.title}")
            return
        since, said = self._since.setdefault(run.id, (self._listened(), run.seen_at))
        # Messages from the run's nodes still arrive, so the waiting time starts again.
        if said != run.seen_at:
            self._since[run.id] = (self._listened(), run.seen_at)
        elif self._listened() - since >= _JOBS_SETTLE_S and self._holds_claim(run):
            self._end(client, run, *_final_state(engine, run, by_part, last))

    def _queue(self, client: redis.Redis, run: EngineRun, why: str) -> None:
        if run.state not in WAITING:
            return
        with self._store.write() as connection:
            changed = jobs.current(connection, run) and jobs.queue(connection, run, why)
        if changed:
            streams.tell_change(client, run.id)

    def tell_away(self, client: redis.Redis, run: EngineRun, why: str) -> None:
        """Record in a waiting run that its engine does not answer."""
        if run.state in WAITING and run.message != why:
            with self._store.write() as connection:
                runs.tell(connection, run.id, why)
            streams.tell_change(client, run.id)

    def _end(self, client: redis.Redis, run: EngineRun, state: State, why: str) -> None:
        # The run's nodes may still report another end, which then replaces this one.
        with self._store.write() as connection:
            current = jobs.current(connection, run)
            ended = current and runs.end(connection, run.id, state, why, lost=True)
        if ended:
            log.warning("run %s: %s", run.id, why)
            streams.tell_end(client, run.id)

    def _finish(
        self, client: redis.Redis, engine: Engine, run: EngineRun, known: Sequence[Job]
    ) -> None:
        """Stop the remaining jobs of an ended run, after its nodes had time to leave."""
        left = [job for job in known if job.state != "ended"]
        since, _ = self._since.setdefault(run.id, (self._listened(), None))
        by_part = self._by_part(run, known)
        begun = {by_part[part].ref for part in run.begun if part in by_part}
        patient = self._listened() - since < _DELIVERY_GRACE_S
        delivering = begun | {job.ref for job in left if job.state == "running"}
        due = [job.ref for job in left if not (patient and job.ref in delivering)]
        if due and self._holds_claim(run):
            self._last.pop(run.id, None)
            engine.stop(due)
        # Without the claim, another worker may be submitting a job now.
        if left or not self._claims.alone(run.id):
            return
        untouched = run.id in self._last
        last = self._last.get(run.id, ())
        job = telling(engine, run, by_part, last) if by_part or untouched else None
        words = f"job {job.ref} of {engine.title} ended: {job.reason}" if job else ""
        said = run.message is not None and f"job {job and job.ref} of " in run.message
        with self._store.write() as connection:
            changed = bool(words) and not said and jobs.explain(connection, run, words)
            if job is not None and job.cancelled and untouched:
                changed |= jobs.cancelled(connection, run)
            jobs.end(connection, run)
        if changed:
            streams.tell_change(client, run.id)

    def _holds_claim(self, run: EngineRun) -> bool:
        return self._claims.hold(run.id, run.key)

    def _note(self, run: EngineRun, part: str, ref: str) -> None:
        with self._store.write() as connection:
            jobs.note(connection, run, part, ref)

    def _forget_replaced(self, run: EngineRun, by_part: Mapping[str, Job]) -> None:
        # Jobs that should have brought a replacement node, and have ended, can no longer bring it.
        for part in run.replaces:
            over = part not in by_part or by_part[part].state == "ended"
            if over and run.jobs.get(part) is not None:
                with self._store.write() as connection:
                    jobs.forget_replacing(connection, run, part)

    def _by_part(self, run: EngineRun, known: Sequence[Job]) -> dict[str, Job]:
        """Return the jobs of the run's latest launch, by part: the oldest job of each part."""
        wanted = {self._label(run, part): part for part in run.jobs}
        by_part: dict[str, Job] = {}
        for job in sorted(known, key=_age):
            if job.label in wanted:
                by_part.setdefault(wanted[job.label], job)
        return by_part

    def _label(self, run: EngineRun, part: str) -> str:
        return f"paceline.{self.plane}.{run.id}.{run.launch}.{part}"


def _may_submit(run: EngineRun, part: str, by_part: Mapping[str, Job]) -> bool:
    """Return True if `part` is the run's first job, or if nodes of the run have started."""
    runs = any(job.state == "running" for job in by_part.values())
    return part == "0" or runs or run.state not in WAITING


def _seen_to_begin(run: EngineRun, by_part: Mapping[str, Job]) -> set[str]:
    """Return the parts whose jobs have started or ended although this is not recorded yet.

    A job that was submitted and that the engine does not list has ended.
    """
    waiting = {part for part, job in by_part.items() if job.state == "queued"}
    waiting |= {part for part, ref in run.jobs.items() if ref is None and part not in by_part}
    return set(run.jobs) - waiting - set(run.begun)


def _age(job: Job) -> tuple[int, str]:
    """Return a sort key that orders jobs by age: engines number their jobs in ascending order."""
    return len(job.ref), job.ref


def _final_state(
    engine: Engine, run: EngineRun, by_part: Mapping[str, Job], last: Collection[str]
) -> tuple[State, str]:
    """Return the final state of a run without jobs, and the reason; see `telling`.

    A run whose job was cancelled with the engine's own tools is stopped, not failed.
    """
    job = telling(engine, run, by_part, last)
    if job is None:
        names = ", ".join(ref for ref in run.jobs.values() if ref) or "none"
        return State.FAILED, f"{engine.title} no longer lists the run's jobs: {names}"
    why = f"job {job.ref} of {engine.title} ended before the run did: {job.reason}"
    return (State.STOPPED if job.cancelled else State.FAILED), why


def telling(
    engine: Engine, run: EngineRun, by_part: Mapping[str, Job], last: Collection[str]
) -> Job | None:
    """Return the job whose end explains a run's end, or None if the engine has forgotten that job.

    `by_part` are the jobs that the engine still lists. `last` are the parts whose jobs ended last;
    a cancelled job among them takes precedence. `last` is empty if no worker has observed the end.
    """
    parts = sorted(last or run.jobs, key=int)
    known = [by_part[part] for part in parts if part in by_part]
    if known:
        return next((job for job in known if job.cancelled and last), known[0])
    refs = [ref for part in parts if (ref := run.jobs.get(part)) is not None]
    if not refs or not engine.keeps_ended:
        return None
    return Job("", refs[0], "ended", "it was removed", cancelled=True)


def _stop_left(
    store: Store, engine: Engine, left: Leftover, known: Sequence[Job], *, alone: bool
) -> None:
    """Stop the jobs of a run that moved to another backend or was deleted.

    Record when the engine has none of the run's jobs left. `alone` is True if no other worker can
    be submitting a job of the run now.

    Raises:
        EngineAwayError: the engine does not answer.
    """
    refs = [job.ref for job in known if job.state != "ended"]
    if refs:
        log.warning(
            "run %s is no longer on %s: its jobs are stopped: %s",
            *(left.run, engine.title, ", ".join(refs)),
        )
        engine.stop(refs)
    elif alone:
        with store.write() as connection:
            jobs.clear_leftover(connection, left)


class EngineClaims:
    """Claims of one worker on runs: each is a lease for managing the jobs of a run.

    One thread takes the claims. Another thread extends them with `keep`, because a call to an
    engine may take longer than a lease lasts.
    """

    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._lock = threading.Lock()
        # Leases by public id of the run.
        self._held: dict[str, Lease] = {}
        # Claims held since before the engine was queried.
        self._before: dict[str, Lease] = {}

    def take(self, keys: Mapping[str, int]) -> None:
        """Claim runs. Call it before querying their engine.

        Args:
            keys: database keys of the runs, by public id.
        """
        self._before = {}
        taken = [run for run, key in keys.items() if self.hold(run, key)]
        self._before = {run: self._held[run] for run in taken}

    def alone(self, run: str) -> bool:
        """Return True if only this worker can have acted for a run since it queried the engine."""
        lease = self._before.get(run)
        return lease is not None and lease.held()

    def hold(self, run: str, key: int) -> bool:
        """Return True if this worker may act for a run now, and claim the run if it is free."""
        lease = self._held.get(run)
        if lease is not None and lease.held():
            return True
        lease = leases.acquire(self._store, key, self._owner, ENGINE_LEASE_S, "jobs")
        with self._lock:
            self._held.pop(run, None)
            if lease is not None:
                self._held[run] = lease
        return lease is not None

    def forget_others(self, ids: Collection[str]) -> None:
        """Let the claims on all runs except `ids` expire."""
        with self._lock:
            self._held = {run: lease for run, lease in self._held.items() if run in ids}

    def keep(self) -> None:
        """Extend the claims."""
        with self._lock:
            held = list(self._held.values())
        leases.extend(self._store, held, ENGINE_LEASE_S, "jobs")

    def give_back(self) -> None:
        """Release all claims, so that the next worker need not wait for their expiry."""
        with self._lock:
            held, self._held, self._before = list(self._held.values()), {}, {}
        # Claims that cannot be released expire.
        with suppress(StoreError):
            for lease in held:
                leases.release(self._store, lease)


def _pass_cordons(store: Store, engine: Engine, plane: str, words: Iterable[Word]) -> None:
    """Pass pending cordons, and ends of cordons, to an engine.

    If a worker is killed after it has passed a cordon and before it has recorded that, the cordon
    is passed again, which changes nothing. `plane` is the id of the control plane.

    Raises:
        EngineAwayError: the engine does not answer. Cordons that were not passed stay pending.
    """
    for word in words:
        refusal = None
        try:
            engine.cordon_as(plane, word.host, word.reason)
        except EngineRefusedError as error:
            refusal = str(error)
            what = "the end of a cordon" if word.reason is None else "a cordon"
            log.warning("%s refuses %s of %s: %s", engine.title, what, word.host, error)
        with store.write() as connection:
            cordons.note_told(connection, word, refusal)
