"""What the jobs of a run on an engine say, and what is done about those that nobody wants."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from paceline.wire import State
from paceline_backend.backends import Engine, Job
from paceline_backend.store import Store
from paceline_backend.store.jobs import WAITING, EngineRun
from paceline_backend.store.nodes import engine_runs
from paceline_backend.store.nodes.engine_runs import Leftover

log = logging.getLogger(__name__)


def timely(run: EngineRun, part: str, by_part: Mapping[str, Job]) -> bool:
    """Whether it is time for a job: a node that joins would only wait before the others train."""
    runs = any(job.state == "running" for job in by_part.values())
    return part == "0" or runs or run.state not in WAITING


def seen_to_begin(run: EngineRun, by_part: Mapping[str, Job]) -> set[str]:
    """The parts whose jobs have begun or ended, as is not noted yet.

    An engine has forgotten jobs that were submitted and that it does not show.
    """
    waiting = {part for part, job in by_part.items() if job.state == "queued"}
    waiting |= {part for part, ref in run.jobs.items() if ref is None and part not in by_part}
    return set(run.jobs) - waiting - set(run.begun)


def age(job: Job) -> tuple[int, str]:
    """Engines count their jobs: of two with the same label the first submitted stays."""
    return len(job.ref), job.ref


def end(
    engine: Engine, run: EngineRun, by_part: Mapping[str, Job], last: Collection[str]
) -> tuple[State, str]:
    """How a run ends of which no job is left, and why; see `telling`.

    What somebody cancelled on the engine's side is stopped, as what somebody stops here.
    """
    job = telling(engine, run, by_part, last)
    if job is None:
        names = ", ".join(ref for ref in run.jobs.values() if ref) or "none"
        return State.FAILED, f"{engine.title} does not know the run's jobs any more: {names}"
    why = f"job {job.ref} of {engine.title} ended before the run did: {job.reason}"
    return (State.STOPPED if job.cancelled else State.FAILED), why


def telling(
    engine: Engine, run: EngineRun, by_part: Mapping[str, Job], last: Collection[str]
) -> Job | None:
    """The job whose end says why a run ended; None: the engine has forgotten it.

    Args:
        engine: of the run.
        run: none of its jobs is left.
        by_part: the jobs that the engine still knows.
        last: the parts whose jobs were the last to end: one of them that somebody cancelled counts
            most. Empty: nobody has seen which.
    """
    parts = sorted(last or run.jobs, key=int)
    known = [by_part[part] for part in parts if part in by_part]
    if known:
        return next((job for job in known if job.cancelled and last), known[0])
    refs = [ref for part in parts if (ref := run.jobs.get(part)) is not None]
    if not refs or not engine.keeps_ended:
        return None
    return Job("", refs[0], "ended", "somebody removed it", cancelled=True)


def stop_left(
    store: Store, engine: Engine, left: Leftover, known: Sequence[Job], *, alone: bool
) -> None:
    """Stops the jobs of a run that went elsewhere or was deleted; notes when there are none.

    Args:
        store: the database.
        engine: that may have them.
        left: the run.
        known: the run's jobs, as the engine has them.
        alone: no other worker may just submit one.

    Raises:
        EngineAwayError: the engine does not answer any more.
        StoreError: or one of its kinds.
    """
    refs = [job.ref for job in known if job.state != "ended"]
    if refs:
        log.warning(
            "run %s is not on %s any more: jobs are stopped: %s",
            *(left.run, engine.title, ", ".join(refs)),
        )
        engine.stop(refs)
    elif alone:
        with store.write() as connection:
            engine_runs.clear(connection, left)
