"""Adopted segments: their rows, those of one attempt decoded, and which steps they planned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from paceline.wire import ALLREDUCE, Adopted, Hello, Segment
from paceline_backend.store import blobs
from paceline_backend.store.schema import segments


def row(message: Adopted) -> dict[str, Any]:
    """An adopted segment as its row, without run and body: what the API shows, too."""
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
        "plan_s": segment.plan_s,
        "adopted_at": message.adopted_at,
        "synchroniser": segment.synchroniser.name,
        "why": segment.why,
        "synchroniser_digest": segment.synchroniser.digest,
    }


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


def relaxed(
    connection: sa.Connection, run: int, hello: Hello, since: int
) -> list[tuple[int, Segment | None]]:
    """Segments of an attempt whose ranks ran ahead of each other, in order.

    Args:
        connection: to read from.
        run: key of the run.
        hello: of the attempt.
        since: only segments that end after this step.

    Returns:
        One past the last step of each, and the segment; None where it cannot be read.
    """
    c = segments.c
    query = sa.select(c.first_step + c.steps, c.body).where(
        c.run == run,
        c.attempt == hello.attempt,
        c.synchroniser != ALLREDUCE.name,
        c.first_step + c.steps > since,
    )
    return [
        (end, blobs.segment(body, hello.world, hello.samples))
        for end, body in connection.execute(query.order_by(c.seq))
    ]


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
