"""What each rank has been doing for long: the newest that it said, and what that is compared to."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import sqlalchemy as sa

from paceline.wire import LongPhase, Phase
from paceline_backend.store import attempts, records, refusals, schema
from paceline_backend.store.database import insert
from paceline_backend.store.schema import long_phases, runs, steps, worker_steps
from paceline_backend.store.telemetry.locked import LockedRun

_IN_STEP = (Phase.COMPUTE.value, Phase.SYNC.value)  # over when the step has ended
_STEPS = 50  # the newest ones, of which the times count


@dataclass(frozen=True)
class RunPhases:
    """How far a run has come, and what its ranks have been doing for long."""

    state: str  # of the run
    world: int  # ranks of the latest attempt; 0: not known yet
    placement: Sequence[str]  # the node of each rank; empty: all are on one
    step: int | None  # the newest that all ranks have ended
    steps_s: Sequence[float]  # times of the newest steps
    phases: Mapping[int, LongPhase]  # by rank, as they are now: heard of a short time ago
    begun: Collection[int]  # ranks of which the latest attempt has heard anything


def write(connection: sa.Connection, messages: Sequence[tuple[LockedRun, LongPhase]]) -> None:
    """Keeps the newest of each rank. Older ones change nothing.

    Raises:
        StoreRefusedError: some message holds what no database takes.
    """
    c = long_phases.c
    for run, message in messages:
        run.refuse("LongPhase", refusals.of_long_phase(message))
        run.check_rank(message.attempt, message.rank)
        row = msgspec.structs.asdict(message)
        row |= {"run": run.key, "phase": message.phase.value, "heard_at": time.time()}
        upsert = insert(connection, long_phases).values(row)
        values = {name: upsert.excluded[name] for name in row if name not in ("run", "rank")}
        newer = sa.tuple_(upsert.excluded.attempt, upsert.excluded.at) >= sa.tuple_(c.attempt, c.at)
        upsert = upsert.on_conflict_do_update(
            index_elements=[c.run, c.rank], set_=values, where=newer
        )
        connection.execute(upsert)


def long_since(
    connection: sa.Connection, runs: Collection[int], fresh_s: float, least_s: float
) -> set[int]:
    """Those of some runs, by key, of which a rank has been doing the same for so long.

    Args:
        connection: to read from.
        runs: keys.
        fresh_s: what was heard longer ago may be over.
        least_s: how long.
    """
    c = long_phases.c
    heard = (c.heard_at >= time.time() - fresh_s, c.since_s >= least_s)
    return set(connection.scalars(sa.select(c.run).distinct().where(c.run.in_(runs), *heard)))


def standing(connection: sa.Connection, run: int, fresh_s: float) -> RunPhases:
    """How far a run has come.

    Args:
        connection: to read from.
        run: key of the run.
        fresh_s: what was heard longer ago may be over.
    """
    attempt, world, parts = records.counting(connection, run)
    newest = attempts.newest_complete(connection, run, parts)
    step = None if newest is None else newest.step
    c = steps.c
    ended = sa.select(c.step_s).where(c.run == run, c.step <= (-1 if step is None else step))
    times = ended.order_by(c.step.desc()).limit(_STEPS)
    state = connection.execute(sa.select(runs.c.state).where(runs.c.key == run)).scalar_one()
    c = schema.attempts.c
    latest = sa.select(c.placement).where(c.run == run).order_by(c.attempt.desc()).limit(1)
    return RunPhases(
        state,
        world or 0,
        connection.execute(latest).scalar() or [],
        step,
        list(connection.execute(times).scalars()),
        _phases(connection, run, attempt or 0, -1 if step is None else step, fresh_s),
        range(world or 0) if step is not None else _begun(connection, run, attempt or 0),
    )


def _begun(connection: sa.Connection, run: int, attempt: int) -> set[int]:
    """Ranks that have told of a step or of a long phase, where no step of all ranks has ended."""
    rows, c = worker_steps.c, long_phases.c
    stepped = sa.select(rows.rank).where(rows.run == run, rows.attempt == attempt)
    long = sa.select(c.rank).where(c.run == run, c.attempt == attempt)
    return set(connection.scalars(sa.union(stepped, long)))


def _phases(
    connection: sa.Connection, run: int, attempt: int, step: int, fresh_s: float
) -> dict[int, LongPhase]:
    c = long_phases.c
    rows = connection.execute(
        sa.select(c.attempt, c.rank, c.step, c.phase, c.since_s, c.at).where(
            c.run == run,
            c.attempt == attempt,
            sa.or_(c.step > step, sa.and_(c.step == step, c.phase.not_in(_IN_STEP))),
            c.heard_at >= time.time() - fresh_s,
        )
    )
    return {row.rank: LongPhase(**{**row._mapping, "phase": Phase(row.phase)}) for row in rows}
