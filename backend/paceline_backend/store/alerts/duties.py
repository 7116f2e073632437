"""Work that one worker does for all: who does it holds the duty for a limited time."""

from __future__ import annotations

import logging

import sqlalchemy as sa

from paceline_backend.store.alerts.tables import duties
from paceline_backend.store.database import Store, StoreError, insert, now

log = logging.getLogger(__name__)


def hold(connection: sa.Connection, duty: str, owner: str, for_s: float) -> bool:
    """Takes a duty that is free, expired or this owner's already; False: another has it.

    Args:
        connection: to write with. What this transaction does, no other owner does meanwhile.
        duty: its name.
        owner: who wants it.
        for_s: how long it lasts unless it is taken again.
    """
    at = now(connection)
    rows = insert(connection, duties).values(name=duty, owner=owner, expires_at=at + for_s)
    taken = connection.execute(
        rows.on_conflict_do_update(
            index_elements=[duties.c.name],
            set_={"owner": owner, "expires_at": rows.excluded.expires_at},
            where=(duties.c.owner == owner) | (duties.c.expires_at <= at),
        ).returning(duties.c.name)
    ).one_or_none()
    return taken is not None


def give_back(store: Store, duty: str, owner: str) -> None:
    """Gives a duty back, so that others need not wait for its expiry; they do if that fails."""
    mine = (duties.c.name == duty, duties.c.owner == owner)
    try:
        with store.write() as connection:
            connection.execute(sa.delete(duties).where(*mine))
    except StoreError as error:
        log.warning("the duty %s stays until it expires: %s", duty, error)
