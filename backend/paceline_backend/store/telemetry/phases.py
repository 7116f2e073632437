"""Store and read reports of ranks that have been in the same phase for a long time."""

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

# Phases that are over when the step is complete. In other phases, `LongPhase.step` can be the last
# step that the rank has ended.
_IN_STEP = (Phase.COMPUTE.value, Phase.SYNC.value)
# `current` returns the times of this many newest steps.
_STANDING_STEPS = 50


@dataclass(frozen=True)
class RunPhases:
    """Progress of a run, with the phases in which ranks have been for a long time.

    Args:
        world: number of ranks of the latest attempt; 0 if unknown.
        placement: node of each rank; empty if all are on one node.
        step: the newest step that all ranks have ended; None if there is none.
        steps_s: times of the newest steps, in seconds.
        phases: current phases by rank, if they were reported recently.
        begun: ranks that have reported a step or a long phase in the latest attempt; all ranks once
            a step is complete.
    """

    state: str
    world: int
    placement: Sequence[str]
    step: int | None
    steps_s: Sequence[float]
    phases: Mapping[int, LongPhase]
    begun: Collection[int]


def write(connection: sa.Connection, messages: Sequence[tuple[LockedRun, LongPhase]]) -> None:
    """Store the newest report of each rank, unless the stored report is newer."""
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
    """Return those of `runs` (keys) in which a rank has been in one phase for `least_s` seconds.

    Reports older than `fresh_s` do not count, because the phase may have ended since then.
    """
    c = long_phases.c
    heard = (c.heard_at >= time.time() - fresh_s, c.since_s >= least_s)
    return set(connection.scalars(sa.select(c.run).distinct().where(c.run.in_(runs), *heard)))


def current(connection: sa.Connection, run: int, fresh_s: float) -> RunPhases:
    """Return the progress of a run and its ranks' long phases; for `fresh_s` see `long_since`."""
    attempt, world, parts = records.counting(connection, run)
    newest = attempts.newest_complete(connection, run, parts)
    step = None if newest is None else newest.step
    c = steps.c
    ended = sa.select(c.step_s).where(c.run == run, c.step <= (-1 if step is None else step))
    times = ended.order_by(c.step.desc()).limit(_STANDING_STEPS)
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
