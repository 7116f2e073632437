"""Read how much data moved to nodes for each epoch, and how long steps waited for it."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from paceline_backend.store.schema import data_epochs


def rows(connection: sa.Connection, run: int, limit: int) -> list[dict[str, Any]]:
    """Return the newest `limit` rows by attempt, epoch and node: sums over the node's ranks."""
    c, func = data_epochs.c, sa.func
    sums = (
        "planned_bytes",
        "moved_bytes",
        "moved",
        "moved_s",
        "read_bytes",
        "read",
        "waits",
        "waited_s",
        "held_bytes",
    )
    keys = (c.attempt, c.epoch, c.node)
    query = (
        sa.select(
            *keys,
            # Sums of integers may overflow.
            *(func.sum(sa.cast(c[name], sa.Double)).label(name) for name in sums),
            func.max(c.at).label("at"),
        )
        .where(c.run == run)
        .group_by(*keys)
        .order_by(*(key.desc() for key in keys))
        .limit(limit)
    )
    summed = reversed(connection.execute(query).mappings().all())
    whole = {name for name in sums if not name.endswith("_s")}
    return [
        {name: int(value) if name in whole else value for name, value in row.items()}
        for row in summed
    ]
