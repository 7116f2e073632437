"""Replace the server's secret, from which keys, passwords on the bus and cookies are derived.

`paceline db rotate-secret` calls this while no server runs. Agents keep their tokens, which are
stored as hashes and do not depend on the secret, and get new keys with them. Tokens that depend on
the secret, the server's own and those of runs, are revoked here. The worker process sets the new
passwords on the bus, and closes connections that used the old ones.
"""

from __future__ import annotations

import secrets

import sqlalchemy as sa

from paceline.wire import ENDED
from paceline_backend.store.access import tokens
from paceline_backend.store.audit import Requester, record
from paceline_backend.store.database import Connection, Store
from paceline_backend.store.schema import meta, runs


def active(connection: Connection) -> list[str]:
    """Return the runs that would lose the server, because their ranks keep their old keys."""
    query = sa.select(runs.c.id).where(runs.c.state.not_in(ENDED)).order_by(runs.c.key)
    return list(connection.execute(query).scalars())


def rotate(store: Store, by: Requester) -> None:
    """Replace the secret and revoke the tokens that are derived from it."""
    with store.write() as connection:
        query = sa.update(meta).where(meta.c.name == "secret")
        connection.execute(query.values(value=secrets.token_hex(32)))
        tokens.revoke_derived(connection)
        record(connection, by, "secret.rotate")
