"""Read adopted segments: their rows, an attempt's decoded plans, and the steps they planned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline.wire import ALLREDUCE, PLANNED, Adopted, Hello, Plan
from paceline_backend.store import blobs
from paceline_backend.store.schema import segments

# The columns that the API shows.
SHOWN = [column for column in segments.c if column.name not in ("run", "body")]


@dataclass(frozen=True)
class RelaxedSegment:
    """A segment with relaxed synchronisation.

    `end` is one past the last step. `fallback` is the reason if gradients were nevertheless
    all-reduced, empty if they were not. `plan` is None if it cannot be decoded.
    """

    first_step: int
    end: int
    fallback: str
    plan: Plan | None


def row(message: Adopted) -> dict[str, Any]:
    """Return the row of an adopted segment, without run, body and fallback."""
    plan = message.plan
    return {
        "attempt": message.attempt,
        "seq": plan.seq,
        "epoch": plan.epoch,
        "first_step": plan.first_step,
        "steps": plan.steps,
        "policy": plan.policy,
        "version": plan.version,
        "source": plan.source,
        "moved": plan.moved,
        "across": plan.across,
        "plan_s": plan.plan_s,
        "adopted_at": message.adopted_at,
        "synchroniser": plan.synchroniser.name,
        "why": plan.why,
        "synchroniser_digest": plan.synchroniser.digest,
    }


def adopted(connection: sa.Connection, run: int, hello: Hello) -> Iterator[Plan]:
    """Yield an attempt's segments in the order in which they ran, if they fit its Hello."""
    query = (
        sa.select(segments.c.body)
        .where(segments.c.run == run, segments.c.attempt == hello.attempt)
        .order_by(segments.c.seq)
        .execution_options(yield_per=500)
    )
    for body in connection.scalars(query):
        if segment := blobs.plan(body, hello.world, hello.samples):
            yield segment


def before(connection: sa.Connection, run: int, hello: Hello) -> Plan | None:
    """Return the last plan that a policy made for steps before an attempt's first step.

    Return None if there is none, or if it was made for another number of ranks.
    """
    c = segments.c
    query = sa.select(c.body).where(
        c.run == run,
        c.attempt < hello.attempt,
        c.first_step < hello.step,
        c.source.in_(PLANNED),
    )
    body = connection.execute(query.order_by(c.attempt.desc(), c.seq.desc()).limit(1)).scalar()
    last = None if body is None else blobs.plan(body, None, hello.samples)
    # The number of ranks is not passed to `blobs.plan`, because it may change between attempts
    # and is then no reason for a warning.
    return last if last is not None and len(last.counts[0]) == hello.world else None


def is_complete(connection: sa.Connection, run: int, hello: Hello) -> bool:
    """Return whether an attempt has completed all epochs; True if their number is unknown."""
    if hello.epochs is None:
        return True
    c = segments.c
    query = sa.select(c.body).where(c.run == run, c.attempt == hello.attempt)
    body = connection.execute(query.order_by(c.seq.desc()).limit(1)).scalar()
    last = None if body is None else blobs.plan(body, hello.world, hello.samples)
    epochs = hello.epoch if last is None else last.epoch + last.epoch_end
    return epochs >= hello.epochs


def relaxed(connection: sa.Connection, run: int, hello: Hello, since: int) -> list[RelaxedSegment]:
    """Return an attempt's relaxed segments that end after step `since`, in the order they ran."""
    c = segments.c
    end = c.first_step + c.steps
    query = sa.select(c.first_step, end, c.fallback, c.body).where(
        c.run == run,
        c.attempt == hello.attempt,
        c.synchroniser != ALLREDUCE.name,
        end > since,
    )
    return [
        RelaxedSegment(first, end, fallback, blobs.plan(body, hello.world, hello.samples))
        for first, end, fallback, body in connection.execute(query.order_by(c.seq))
    ]


def apart(connection: sa.Connection, run: int, first: int, last: int) -> list[tuple[int, int, int]]:
    """Return (attempt, first step, end) of segments in which ranks did not wait for each other.

    `end` is one past the last step of the segment. Only segments that overlap the steps `first` to
    `last` are included.
    """
    c = segments.c
    end = c.first_step + c.steps
    query = sa.select(c.attempt, c.first_step, end)
    query = query.where(c.run == run, *_apart(c), c.first_step <= last, end > first)
    return [(attempt, begin, stop) for attempt, begin, stop in connection.execute(query)]


def apart_in(step: sa.Table) -> sa.ColumnElement[bool]:
    """Return the SQL condition that ranks did not wait for each other in a step.

    `step` is a table of the outer query with the columns `run` and `step`.
    """
    c = segments.alias().c
    newest = (
        sa.select(c.first_step + c.steps)
        .where(c.run == step.c.run, c.first_step <= step.c.step, *_apart(c))
        .order_by(c.first_step.desc())
        .limit(1)
        .correlate(step)
        .scalar_subquery()
    )
    return sa.func.coalesce(newest, 0) > step.c.step


def _apart(c: Any) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the SQL condition of `ix_segments_apart`: literals let the database use the index."""
    relaxed = c.synchroniser != sa.literal_column(f"'{ALLREDUCE.name}'")
    return relaxed, c.fallback == sa.literal_column("''")


def versions(
    connection: sa.Connection, run: int, attempt: int, span: tuple[int, int]
) -> list[tuple[int, int]]:
    """Return (first segment, policy version) for each version that planned an attempt's segments.

    Only segments with numbers in `span` (first and last number) are used.
    """
    c = segments.c
    first = sa.func.min(c.seq)
    query = sa.select(first, c.version).where(
        c.run == run, c.attempt == attempt, c.seq.between(*span)
    )
    rows = connection.execute(query.group_by(c.version).order_by(first))
    return [(seq, version) for seq, version in rows]


def equal_because(connection: sa.Connection, run: int, attempt: int | None) -> str:
    """Return why ranks get equal local batches whatever the policy plans; empty if they do not.

    `attempt` is the newest attempt, None if there is none.
    """
    c = segments.c
    query = sa.select(c.source, c.why).where(c.run == run, c.attempt == attempt)
    newest = connection.execute(query.order_by(c.seq.desc()).limit(1)).one_or_none()
    return newest.why if newest is not None and newest.source == "equal" else ""


def first_version(connection: sa.Connection, run: int, attempt: int | None) -> int:
    """Return the policy version of an attempt's first segment; 0 if no segment is stored.

    If `attempt` is None, use the first segment of the run.
    """
    c = segments.c
    query = sa.select(c.version).where(c.run == run).order_by(c.attempt, c.seq).limit(1)
    if attempt is not None:
        query = query.where(c.attempt == attempt)
    return connection.scalar(query) or 0


def newest_fallback(connection: sa.Connection, run: int, attempt: int, step: int) -> str:
    """Return why ranks all-reduced gradients in the newest segment with relaxed synchronisation.

    Return an empty string if they did not. `step` is the newest step: segments that begin later
    have not started and are ignored.
    """
    c = segments.c
    begun = [c.run == run, c.attempt == attempt, c.first_step <= step]
    # A literal instead of a parameter, so that the database can use the partial index.
    fell_back = c.fallback != sa.literal_column("''")
    query = sa.select(c.seq, c.fallback).where(*begun, fell_back)
    newest = connection.execute(query.order_by(c.first_step.desc()).limit(1)).first()
    if newest is None:
        return ""
    relaxed = sa.and_(*begun, c.seq > newest.seq, c.synchroniser != ALLREDUCE.name)
    followed = connection.execute(sa.select(sa.exists().where(relaxed))).scalar()
    return "" if followed else str(newest.fallback)


def planned(
    connection: sa.Connection, run: int, attempt: int, version: int, since: int
) -> list[tuple[int, int]]:
    """Return (first step, number of steps) of an attempt's segments that a policy planned.

    Only segments of this policy version that end after the step `since` are included.
    """
    c = segments.c
    query = sa.select(c.first_step, c.steps).where(
        c.run == run,
        c.attempt == attempt,
        c.version == version,
        c.source.in_(PLANNED),
        c.first_step + c.steps > since,
    )
    return [(first, steps) for first, steps in connection.execute(query)]


def planned_before(connection: sa.Connection, run: int, attempt: int) -> int:
    """Return the number of segments that a policy planned in earlier attempts."""
    c = segments.c
    query = sa.select(sa.func.count()).where(
        c.run == run, c.attempt < attempt, c.source.in_(PLANNED)
    )
    return int(connection.execute(query).scalar_one())
