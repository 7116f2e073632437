"""Reconciliation of a single run with its engine: submits jobs, stops them, and ends the run.

`Engines` calls `Attendant.attend` for each run after it has listed the engine's jobs. A *part* is
one of a run's jobs: part "0" starts the run, and the others bring nodes that join later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import redis

from paceline.wire import State
from paceline_backend import backends
from paceline_backend.backends import Engine, EngineRefusedError, Job, Order
from paceline_backend.control.engines.claims import EngineClaims
from paceline_backend.control.engines.engine_jobs import age, end, seen_to_begin, telling, timely
from paceline_backend.control.listening import ListeningClock
from paceline_backend.requests import streams
from paceline_backend.store import Store, jobs, meta, runs
from paceline_backend.store.jobs import EngineRun, Leftover
from paceline_backend.store.new_runs import NewRun

log = logging.getLogger(__name__)

# Reports from the nodes of an ended job may take this long to arrive.
_SETTLE_S = 5.0
# Time for the nodes of an ended run to leave on their own.
_DELIVER_S = 20.0


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
        # By run: time since which its jobs or the run itself have ended, and the time of the run's
        # last message by then.
        self._since: dict[str, tuple[float, object]] = {}
        # By run that this worker has seen active, and whose jobs it has not stopped since: the
        # parts whose jobs the engine listed last.
        self._last: dict[str, Collection[str]] = {}

    def forget_others(self, ids: Collection[str]) -> None:
        """Forget runs that need no more attention. Must be called in every round."""
        self._listened()
        self._since = {run: since for run, since in self._since.items() if run in ids}
        self._last = {run: parts for run, parts in self._last.items() if run in ids}

    @property
    def plane(self) -> str:
        """ID of the control plane."""
        self._plane_id = self._plane_id or meta.control_id(self._store)
        return self._plane_id

    def claim(self, own: Sequence[EngineRun], left: Sequence[Leftover]) -> None:
        """Claim runs with jobs to submit, and runs that may have no jobs left."""
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
        if surplus and self._mine(run):
            log.warning("run %s: surplus jobs are stopped: %s", run.id, ", ".join(surplus))
            engine.stop(surplus)
        # Record this before submitting jobs, so that nodes that have arrived need not wait.
        if new := seen_to_begin(run, by_part):
            with self._store.write() as connection:
                jobs.note_begun(connection, run, new)
        for part, ref in run.jobs.items():
            if part in by_part and by_part[part].ref != ref:
                self._note(run, part, by_part[part].ref)
            elif part not in by_part and ref is None and timely(run, part, by_part):
                self._submit(client, engine, run, part)
        self._forget_replaced(run, by_part)
        self._judge(client, engine, run, by_part)

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
        log.info("run %s: job %s of %s", run.id, ref, engine.title)
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

    def _judge(
        self, client: redis.Redis, engine: Engine, run: EngineRun, by_part: dict[str, Job]
    ) -> None:
        """Record why a run waits, or end the run if none of its jobs is left."""
        left = [job for job in by_part.values() if job.state != "ended"]
        last = self._last[run.id]
        begins_with = by_part.get("0")
        if run.state in jobs.WAITING and begins_with and begins_with.state == "ended":
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
        # Messages from the run's nodes still arrive.
        if said != run.seen_at:
            self._since[run.id] = (self._listened(), run.seen_at)
        elif self._listened() - since >= _SETTLE_S and self._mine(run):
            self._end(client, run, *end(engine, run, by_part, last))

    def _queue(self, client: redis.Redis, run: EngineRun, why: str) -> None:
        if run.state not in jobs.WAITING:
            return
        with self._store.write() as connection:
            changed = jobs.current(connection, run) and jobs.queue(connection, run, why)
        if changed:
            streams.tell_change(client, run.id)

    def tell_away(self, client: redis.Redis, run: EngineRun, why: str) -> None:
        """Record in a waiting run that its engine does not answer."""
        if run.state in jobs.WAITING and run.message != why:
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
        patient = self._listened() - since < _DELIVER_S
        delivering = begun | {job.ref for job in left if job.state == "running"}
        due = [job.ref for job in left if not (patient and job.ref in delivering)]
        if due and self._mine(run):
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
            jobs.over(connection, run)
        if changed:
            streams.tell_change(client, run.id)

    def _mine(self, run: EngineRun) -> bool:
        return self._claims.hold(run.id, run.key)

    def _note(self, run: EngineRun, part: str, ref: str) -> None:
        with self._store.write() as connection:
            jobs.note(connection, run, part, ref)

    def _forget_replaced(self, run: EngineRun, by_part: Mapping[str, Job]) -> None:
        # Jobs that were to bring a replacement node, and have ended, can no longer bring it.
        for part in run.replaces:
            over = part not in by_part or by_part[part].state == "ended"
            if over and run.jobs.get(part) is not None:
                with self._store.write() as connection:
                    jobs.forget_replacing(connection, run, part)

    def _by_part(self, run: EngineRun, known: Sequence[Job]) -> dict[str, Job]:
        """Return the jobs of the run's latest launch, and the oldest if a label occurs twice."""
        wanted = {self._label(run, part): part for part in run.jobs}
        by_part: dict[str, Job] = {}
        for job in sorted(known, key=age):
            if job.label in wanted:
                by_part.setdefault(wanted[job.label], job)
        return by_part

    def _label(self, run: EngineRun, part: str) -> str:
        return f"paceline.{self.plane}.{run.id}.{run.launch}.{part}"
