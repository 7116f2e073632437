"""Store in which segments ranks all-reduced gradients in spite of the synchroniser, and why."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import sqlalchemy as sa

from paceline.wire import Fallback
from paceline_backend.store import refusals
from paceline_backend.store.schema import segments
from paceline_backend.store.telemetry.locked import LockedRun

logger = logging.getLogger(__name__)


def write(connection: sa.Connection, fallbacks: Sequence[tuple[LockedRun, Fallback]]) -> None:
    """Store each fallback with its segment; drop it if the segment is not stored.

    Rank 0 sends the segment's `Adopted` first. An outage of the bus can swap the two messages,
    because spooled messages arrive later, and two ingest threads can store them in the other order.
    Then only the fallback of this segment is lost, because each segment has its own.
    """
    c = segments.c
    for run, message in fallbacks:
        run.refuse("Fallback", refusals.of_fallback(message))
        noted = (
            sa.update(segments)
            .where(c.run == run.key, c.attempt == message.attempt, c.seq == message.segment)
            .values(fallback=message.why)
        )
        if not connection.execute(noted).rowcount:
            logger.debug(
                "run %s: a fallback of segment %d of attempt %d is dropped: no such segment",
                run.id,
                message.segment,
                message.attempt,
            )
