"""Adopted segments: their rows, those of one attempt decoded, and which steps they planned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline.wire import ALLREDUCE, Adopted, Hello, Segment
from paceline_backend.store import blobs
from paceline_backend.store.schema import segments

# The columns that the API shows.
SHOWN = [column for column in segments.c if column.name not in ("run", "body")]


@dataclass(frozen=True)
class RelaxedSegment:
    """A segment with a relaxed synchroniser: ranks ran ahead of each other, or fell back."""

    first_step: int
    end: int  # one past the last step
    fallback: str  # why gradients were all-reduced; empty: they were not
    segment: Segment | None  # None: it cannot be read


def row(message: Adopted) -> dict[str, Any]:
    """An adopted segment as its row, without run, body and fallback."""
    segment = message.segment
    return {
        "attempt": message.attempt,
        "seq": segment.seq,
        "epoch": segment.epoch,
        "first_step": segment.first_step,
        "steps": segment.steps,
        "policy": segment.policy,
        "version": segment.version,
        "source": segment.source,
        "moved": segment.moved,
        "across": segment.across,
        "plan_s": segment.plan_s,
        "adopted_at": message.adopted_at,
        "synchroniser": segment.synchroniser.name,
        "why": segment.why,
        "synchroniser_digest": segment.synchroniser.digest,
    }


def shown(
    connection: sa.Connection, run: int, named: Iterable[tuple[int, int]]
) -> list[dict[str, Any]]:
    """Segments as the API shows them, in order.

    Args:
        connection: to read from.
        run: key of the run.
        named: attempt and number of each; those that are not stored are left out.
    """
    numbers: dict[int, list[int]] = defaultdict(list)
    for attempt, seq in named:
        if 0 <= attempt < 2**15 and 0 <= seq < 2**63:  # as the columns
            numbers[attempt].append(seq)
    if not numbers:
        return []
    c = segments.c
    of_attempts = (sa.and_(c.attempt == k, c.seq.in_(seqs)) for k, seqs in numbers.items())
    query = sa.select(*SHOWN).where(c.run == run, sa.or_(*of_attempts)).order_by(c.attempt, c.seq)
    return [{str(k): v for k, v in row.items()} for row in connection.execute(query).mappings()]


def adopted(connection: sa.Connection, run: int, hello: Hello) -> Iterator[Segment]:
    """The segments of an attempt, as they ran. Those that do not fit its Hello are left out.

    Args:
        connection: to read from.
        run: key of the run.
        hello: of the attempt.
    """
    query = (
        sa.select(segments.c.body)
        .where(segments.c.run == run, segments.c.attempt == hello.attempt)
        .order_by(segments.c.seq)
        .execution_options(yield_per=500)
    )
    for body in connection.scalars(query):
        if segment := blobs.segment(body, hello.world, hello.samples):
            yield segment


def before(connection: sa.Connection, run: int, hello: Hello) -> Segment | None:
    """The last segment before an attempt's first step that a controller planned.

    None if there is none, or if the attempt before had other ranks.

    Args:
        connection: to read from.
        run: key of the run.
        hello: of the attempt.
    """
    c = segments.c
    query = sa.select(c.body).where(
        c.run == run,
        c.attempt < hello.attempt,
        c.first_step < hello.step,
        c.source == "controller",
    )
    body = connection.execute(query.order_by(c.attempt.desc(), c.seq.desc()).limit(1)).scalar()
    last = None if body is None else blobs.segment(body, None, hello.samples)
    # Runs grow and shrink: other ranks are nothing to warn about.
    return last if last is not None and len(last.counts[0]) == hello.world else None


def through(connection: sa.Connection, run: int, hello: Hello) -> bool:
    """Whether an attempt has come to the end of its epochs; True if their number is not known."""
    if hello.epochs is None:
        return True
    c = segments.c
    query = sa.select(c.body).where(c.run == run, c.attempt == hello.attempt)
    body = connection.execute(query.order_by(c.seq.desc()).limit(1)).scalar()
    last = None if body is None else blobs.segment(body, hello.world, hello.samples)
    epochs = hello.epoch if last is None else last.epoch + last.epoch_end
    return epochs >= hello.epochs


def relaxed(connection: sa.Connection, run: int, hello: Hello, since: int) -> list[RelaxedSegment]:
    """Segments of an attempt with a relaxed synchroniser, in order.

    Args:
        connection: to read from.
        run: key of the run.
        hello: of the attempt.
        since: only segments that end after this step.
    """
    c = segments.c
    end = c.first_step + c.steps
    query = sa.select(c.first_step, end, c.fallback, c.body).where(
        c.run == run,
        c.attempt == hello.attempt,
        c.synchroniser != ALLREDUCE.name,
        end > since,
    )
    return [
        RelaxedSegment(first, end, fallback, blobs.segment(body, hello.world, hello.samples))
        for first, end, fallback, body in connection.execute(query.order_by(c.seq))
    ]


def apart(connection: sa.Connection, run: int, first: int, last: int) -> list[tuple[int, int, int]]:
    """Attempts' steps in which ranks did not wait for each other: attempt and half-open range.

    Args:
        connection: to read from.
        run: key of the run.
        first: step,
        last: and the last one.
    """
    c = segments.c
    end = c.first_step + c.steps
    query = sa.select(c.attempt, c.first_step, end)
    query = query.where(c.run == run, *_apart(c), c.first_step <= last, end > first)
    return [(attempt, begin, stop) for attempt, begin, stop in connection.execute(query)]


def apart_in(step: sa.Table) -> sa.ColumnElement[bool]:
    """The condition that ranks did not wait for each other in a step.

    Args:
        step: a table with columns `run` and `step`; the query around the condition has it.
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
    """The condition of the index `ix_segments_apart`, written out so that it may be used."""
    relaxed = c.synchroniser != sa.literal_column(f"'{ALLREDUCE.name}'")
    return relaxed, c.fallback == sa.literal_column("''")


def versions(
    connection: sa.Connection, run: int, attempt: int, span: tuple[int, int]
) -> list[tuple[int, int]]:
    """The versions of the policy that planned segments, each with the first of its segments.

    Args:
        connection: to read from.
        run: key of the run.
        attempt: only its segments.
        span: the number of the first segment, and of the last one.
    """
    c = segments.c
    first = sa.func.min(c.seq)
    query = sa.select(first, c.version).where(
        c.run == run, c.attempt == attempt, c.seq.between(*span)
    )
    rows = connection.execute(query.group_by(c.version).order_by(first))
    return [(seq, version) for seq, version in rows]


def equal_because(connection: sa.Connection, run: int, attempt: int | None) -> str:
    """Why ranks get equal parts, whatever the policy plans; empty: they need not.

    Args:
        connection: to read from.
        run: key of the run.
        attempt: its newest; None: it has none.
    """
    c = segments.c
    query = sa.select(c.source, c.why).where(c.run == run, c.attempt == attempt)
    newest = connection.execute(query.order_by(c.seq.desc()).limit(1)).one_or_none()
    return newest.why if newest is not None and newest.source == "equal" else ""


def first_version(connection: sa.Connection, run: int, attempt: int | None) -> int:
    """The version of the policy that planned an attempt's first segment; 0: it has none.

    Args:
        connection: to read from.
        run: key of the run.
        attempt: None: the first one of the run.
    """
    c = segments.c
    query = sa.select(c.version).where(c.run == run).order_by(c.attempt, c.seq).limit(1)
    if attempt is not None:
        query = query.where(c.attempt == attempt)
    return connection.scalar(query) or 0


def newest_fallback(connection: sa.Connection, run: int, attempt: int, step: int) -> str:
    """Why the newest relaxed segment that has begun was all-reduced; empty: it was not.

    Args:
        connection: to read from.
        run: key of the run.
        attempt: only its segments.
        step: the newest step: later segments have not begun.
    """
    c = segments.c
    begun = [c.run == run, c.attempt == attempt, c.first_step <= step]
    # Written out, so that the index of these alone may be used.
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
    """First step and number of steps of the segments that a controller planned.

    Args:
        connection: to read from.
        run: key of the run.
        attempt: only its segments.
        version: only those by this version of the policy.
        since: only those that end after this step.
    """
    c = segments.c
    query = sa.select(c.first_step, c.steps).where(
        c.run == run,
        c.attempt == attempt,
        c.version == version,
        c.source == "controller",
        c.first_step + c.steps > since,
    )
    return [(first, steps) for first, steps in connection.execute(query)]


def planned_before(connection: sa.Connection, run: int, attempt: int) -> int:
    """How many segments a controller planned in the attempts before this one."""
    c = segments.c
    query = sa.select(sa.func.count()).where(
        c.run == run, c.attempt < attempt, c.source == "controller"
    )
    return int(connection.execute(query).scalar_one())
