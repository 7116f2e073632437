"""Conclusions about a run from its jobs on an engine, and removal of leftover jobs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from paceline.wire import State
from paceline_backend.backends import Engine, Job
from paceline_backend.store import Store, jobs
from paceline_backend.store.jobs import WAITING, EngineRun, Leftover

log = logging.getLogger(__name__)


def timely(run: EngineRun, part: str, by_part: Mapping[str, Job]) -> bool:
    """Return True if a job may be submitted now.

    Jobs of nodes that join are submitted only once the run trains, because they could only wait
    before.
    """
    runs = any(job.state == "running" for job in by_part.values())
    return part == "0" or runs or run.state not in WAITING


def seen_to_begin(run: EngineRun, by_part: Mapping[str, Job]) -> set[str]:
    """Return the parts whose jobs have started or ended without this being recorded yet.

    A job that was submitted and that the engine does not list has ended.
    """
    waiting = {part for part, job in by_part.items() if job.state == "queued"}
    waiting |= {part for part, ref in run.jobs.items() if ref is None and part not in by_part}
    return set(run.jobs) - waiting - set(run.begun)


def age(job: Job) -> tuple[int, str]:
    """Return a sort key by age, because engines number their jobs.

    Of two jobs with the same label, the older one is kept.
    """
    return len(job.ref), job.ref


def end(
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
    """Return the job whose end explains the end of a run, or None if the engine has forgotten it.

    `by_part` are the jobs that the engine still lists. `last` are the parts whose jobs ended last;
    a cancelled job among them takes precedence. It is empty if no worker has observed that.
    """
    parts = sorted(last or run.jobs, key=int)
    known = [by_part[part] for part in parts if part in by_part]
    if known:
        return next((job for job in known if job.cancelled and last), known[0])
    refs = [ref for part in parts if (ref := run.jobs.get(part)) is not None]
    if not refs or not engine.keeps_ended:
        return None
    return Job("", refs[0], "ended", "it was removed", cancelled=True)


def stop_left(
    store: Store, engine: Engine, left: Leftover, known: Sequence[Job], *, alone: bool
) -> None:
    """Stop the jobs of a run that moved elsewhere or was deleted; record when none are left.

    `known` are the jobs that the engine lists for the run. With `alone`, no other worker can be
    submitting a job of the run now.

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
