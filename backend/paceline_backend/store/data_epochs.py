"""Where data lives on nodes: what moved to them for each epoch, and what steps waited for."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from paceline_backend.store.schema import data_epochs


def rows(connection: sa.Connection, run: int, limit: int) -> list[dict[str, Any]]:
    """The newest rows of each attempt, epoch and node, in this order: sums over the node's ranks.

    Args:
        connection: to read from.
        run: key of the run.
        limit: at most so many.
    """
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
            # Integers may overflow.
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
