"""Duties: work that one worker process does for all of them.

A worker holds a duty for a limited time and renews it. If the worker dies, the duty expires and
another worker takes it.
"""

from __future__ import annotations

import logging

import sqlalchemy as sa

from paceline_backend.store.database import Store, StoreError, insert, now
from paceline_backend.store.schema import duties

log = logging.getLogger(__name__)


def hold(connection: sa.Connection, duty: str, owner: str, for_s: float) -> bool:
    """Take or renew a duty for `for_s` seconds; return False if another owner holds it.

    Until this transaction ends, no other owner can take the duty.
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
    """Release a duty early, so that others need not wait until it expires; log a failure."""
    mine = (duties.c.name == duty, duties.c.owner == owner)
    try:
        with store.write() as connection:
            connection.execute(sa.delete(duties).where(*mine))
    except StoreError as error:
        log.warning("cannot release the duty %s, so it is held until it expires: %s", duty, error)
