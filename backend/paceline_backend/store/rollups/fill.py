"""Write roll-ups that ingest deferred because telemetry was waiting, a few at a time."""

from __future__ import annotations

import sqlalchemy as sa

from paceline_backend.store.database import Store
from paceline_backend.store.rollups import writing
from paceline_backend.store.rollups.tables import BLOCK, rollups_due
from paceline_backend.store.schema import runs, steps

# Blocks per transaction, which then takes some milliseconds.
_BLOCKS = 5


def fill(store: Store, after: int = 0) -> int | None:
    """Write the roll-ups of a few blocks of one run; return its key, or None if nothing is due.

    `after` is the key of the run whose turn was before, so that runs take turns.
    """
    c = rollups_due.c
    turns = sa.select(c.run).order_by(c.run <= after, c.run).limit(1)
    with store.read() as connection:
        run = connection.execute(turns).scalar()
    if run is None:
        return None
    with store.write() as connection:
        # Lock the run like ingest does, so that neither transaction sees only a part of a block.
        connection.execute(
            sa.select(runs.c.key).where(runs.c.key == run).with_for_update(key_share=True)
        )
        due = connection.execute(sa.select(c.step).where(c.run == run)).scalar()
        if due is not None:
            _fill(connection, run, due)
    return int(run)


def _fill(connection: sa.Connection, run: int, due: int) -> None:
    c = rollups_due.c
    newer = sa.select(steps.c.step).where(steps.c.run == run, steps.c.step >= due - due % BLOCK)
    first = connection.execute(newer.order_by(steps.c.step).limit(1)).scalar()
    if first is None:
        connection.execute(sa.delete(rollups_due).where(c.run == run))
        return
    block = first - first % BLOCK
    end = block + _BLOCKS * BLOCK
    writing.add(connection, run, range(block, end))
    connection.execute(sa.update(rollups_due).where(c.run == run).values(step=end))
