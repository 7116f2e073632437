"""Admission of nodes: which token a node's session on the bus depends on, and whether it is valid.

`expect` records that an agent gets a session, and `bind` that a node requests to join its run. A
node that was admitted by an agent's or an admin's token can serve any run, and no token of a run
can take over its name. A node that was admitted by a run's token serves only this run. Its name
must end with the run's id (`is_name`), so that a run cannot occupy other names.

A session ends when its token is revoked or expires. No row has to change then, because each query
checks `admitted`. A node's keys are derived from a random seed, which is new in the node's next
session.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.database import insert, now
from paceline_backend.store.schema import meta, nodes, tokens

# `heartbeat_at` of a node whose agent has a session and has not sent a heartbeat yet.
UNHEARD = 0.0
# The table `meta` has a row for each token from the server's configuration. Its name is this
# prefix and the id of the token.
_CONFIGURED = "token "


def admitted() -> sa.ColumnElement[bool]:
    """Return the SQL condition for nodes whose session's token is valid, or that have no token.

    Agents without a session have no token, and neither have agents that a proxy authenticated.
    Their admission does not end.
    """
    t, n = tokens.c, nodes.c
    unexpired = t.expires_at.is_(None) | (t.expires_at > time.time())
    valid = sa.exists().where(t.id == n.token, t.revoked_at.is_(None), unexpired)
    configured = sa.exists().where(meta.c.name == _CONFIGURED + n.token)
    return n.token.is_(None) | valid.correlate(nodes) | configured.correlate(nodes)


def configure(connection: sa.Connection, identities: Collection[str]) -> None:
    """Store the ids of the configured tokens; this ends sessions of tokens no longer configured."""
    names = [_CONFIGURED + each for each in identities]
    former = (meta.c.name.startswith(_CONFIGURED), meta.c.name.not_in(names))
    connection.execute(sa.delete(meta).where(*former))
    for name in names:
        made = insert(connection, meta).values(name=name, value="")
        connection.execute(made.on_conflict_do_nothing())


def seeds(connection: sa.Connection, names: Iterable[str]) -> dict[str, str]:
    """Return the seeds of those nodes whose sessions are valid."""
    c = nodes.c
    some = (c.id.in_(list(names)), c.seed.is_not(None), admitted())
    return {row.id: row.seed for row in connection.execute(sa.select(c.id, c.seed).where(*some))}


def of_token(connection: sa.Connection, token: str) -> list[str]:
    """Return the nodes whose sessions were created with a token."""
    query = sa.select(nodes.c.id).where(nodes.c.token == token)
    return list(connection.execute(query).scalars())


def registered(connection: sa.Connection, names: Iterable[str]) -> set[str]:
    """Return the nodes in `names` that the database has, even if their session is not valid."""
    query = sa.select(nodes.c.id).where(nodes.c.id.in_(list(names)))
    return set(connection.execute(query).scalars())


def is_name(node: str, run: str) -> bool:
    """Return whether a node that is admitted by a run's token may have this name."""
    return node.endswith(f".{run}")


def expect(
    connection: sa.Connection, node: str, token: str | None = None, run: str | None = None
) -> str | None:
    """Record that a node's agent gets a session, so that ingest accepts its reports.

    `token` is the id of the requesting token (None: the session depends on no token), and `run`
    the run that the token belongs to (None: no run). Return the seed of the node's keys. Return
    None if a node with this name was admitted with another value of `run`, or if the token is no
    longer valid; then the caller must not commit the transaction.
    """
    parent = sa.select(tokens.c.parent).where(tokens.c.id == token)
    # If `token` is the id of a browser, use the token that the browser logged in with.
    token = connection.execute(parent).scalar() or token
    admission = {"token": token, "seed": secrets.token_hex(16), "only_run": run}
    c = nodes.c
    columns = (c.token, c.seed, c.only_run, admitted().label("admitted"))
    query = sa.select(*columns).where(c.id == node).with_for_update(of=nodes)
    if not _created(connection, node, admission):
        row = connection.execute(query).one()
        if row.only_run != run:
            return None
        if row.admitted and row.token == token and row.seed is not None:
            admission = {}
        update = sa.update(nodes).where(c.id == node).values(signed=True, **admission)
        connection.execute(update)
    row = connection.execute(query).one()
    return str(row.seed) if row.admitted else None


def _created(connection: sa.Connection, node: str, admission: dict[str, Any]) -> bool:
    machine = {"hostname": node, "cores": 0, "memory_bytes": 0, "gpus": [], "gpu_states": []}
    values = {
        "id": node,
        "registered_at": now(connection),
        "heartbeat_at": UNHEARD,
        "left": True,
        "report": {**machine, "paceline": "", "runs": []},
        "signed": True,
        **admission,
    }
    row = insert(connection, nodes).values(values).on_conflict_do_nothing()
    return connection.execute(row.returning(nodes.c.id)).scalar() is not None


def bind(
    connection: sa.Connection, node: str, run: str, backend: str | None, host: str | None = None
) -> bool:
    """Store the machine of a run's node; return False if the run's token does not admit the node.

    `backend` is the engine that started the node (None: Paceline did not start it), and `host` the
    engine's name of the machine (None: unknown).
    """
    c = nodes.c
    own = (c.id == node, c.signed, c.only_run == run, c.token.is_not(None), admitted())
    query = sa.update(nodes).where(*own).values(backend=backend, host=host)
    return connection.execute(query).rowcount > 0


def forget(connection: sa.Connection, node: str) -> None:
    """Delete a node, but keep its cordons, and its name in runs."""
    connection.execute(sa.delete(nodes).where(nodes.c.id == node))
