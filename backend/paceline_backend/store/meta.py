"""What is true of a database as a whole."""

from __future__ import annotations

import secrets

import sqlalchemy as sa

from paceline_backend.store.database import Store, insert
from paceline_backend.store.schema import meta, runs


def probe(connection: sa.Connection) -> None:
    """Reads from a table that every release has: raises StoreError unless the database answers."""
    connection.execute(sa.select(runs.c.key).limit(1))


def control_id(store: Store) -> str:
    """Names the control plane of this database, wherever its server listens; made once.

    Raises:
        StoreError: or one of its kinds.
    """
    query = sa.select(meta.c.value).where(meta.c.name == "id")
    with store.read() as connection:
        name = connection.execute(query).scalar()
    if name is None:
        values = {"name": "id", "value": secrets.token_hex(8)}
        with store.write() as connection:
            connection.execute(insert(connection, meta).values(values).on_conflict_do_nothing())
            name = connection.execute(query).scalar_one()
    return str(name)
