"""Admission of nodes: which token a node's session was made with, and how long it counts.

`expect` notes that an agent gets a session, and `bind` that a run's node asks to join its run. A
node of the fleet is admitted by an agent's or an admin's token. It stays one: no token of a run
ever changes it. A node of a run is admitted by the run's token, and stays this run's. Its name ends
with the run's id (`is_name`), so that no run can take a name that others want.

A session ends with its token, whatever ended the token. No row has to be changed for that:
`admitted` is asked each time. The next session of the name has a new seed, and so other keys.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.database import insert, now
from paceline_backend.store.schema import meta, nodes, tokens

UNHEARD = 0.0  # `heartbeat_at` of a node whose agent has a session and has not spoken yet
_CONFIGURED = "token "  # + id: the name in `meta` of a token that the server's configuration gives


def admitted() -> sa.ColumnElement[bool]:
    """Select nodes whose session counts: the token that it was made with is valid.

    An agent without a session, and one that came by a proxy's word, has no token that could end.
    """
    t, n = tokens.c, nodes.c
    unexpired = t.expires_at.is_(None) | (t.expires_at > time.time())
    valid = sa.exists().where(t.id == n.token, t.revoked_at.is_(None), unexpired)
    configured = sa.exists().where(meta.c.name == _CONFIGURED + n.token)
    return n.token.is_(None) | valid.correlate(nodes) | configured.correlate(nodes)


def configure(connection: sa.Connection, identities: Collection[str]) -> None:
    """Note which tokens the server's configuration gives; sessions by earlier ones end.

    Args:
        connection: to write with.
        identities: of the tokens.
    """
    names = [_CONFIGURED + each for each in identities]
    former = (meta.c.name.startswith(_CONFIGURED), meta.c.name.not_in(names))
    connection.execute(sa.delete(meta).where(*former))
    for name in names:
        made = insert(connection, meta).values(name=name, value="")
        connection.execute(made.on_conflict_do_nothing())


def seeds(connection: sa.Connection, names: Iterable[str]) -> dict[str, str]:
    """Return the seeds of those of some nodes whose sessions count."""
    c = nodes.c
    some = (c.id.in_(list(names)), c.seed.is_not(None), admitted())
    return {row.id: row.seed for row in connection.execute(sa.select(c.id, c.seed).where(*some))}


def of_token(connection: sa.Connection, token: str) -> list[str]:
    """Return the nodes whose sessions were made with a token."""
    query = sa.select(nodes.c.id).where(nodes.c.token == token)
    return list(connection.execute(query).scalars())


def registered(connection: sa.Connection, names: Iterable[str]) -> set[str]:
    """Return those of some nodes that the database has, whether their sessions count or not."""
    query = sa.select(nodes.c.id).where(nodes.c.id.in_(list(names)))
    return set(connection.execute(query).scalars())


def is_name(node: str, run: str) -> bool:
    """Return whether a node that is admitted by a run's token may have this name."""
    return node.endswith(f".{run}")


def expect(
    connection: sa.Connection, node: str, token: str | None = None, run: str | None = None
) -> str | None:
    """Note that a node's agent gets a session: ingest reads its reports from now on.

    Args:
        connection: to write with.
        node: its name.
        token: id of the token that asks; None: none that could end.
        run: the run whose token this is; None: it is no run's.

    Returns:
        The seed of the node's keys; None: the name is another's, or the token has ended. Then the
        transaction must not be committed.
    """
    parent = sa.select(tokens.c.parent).where(tokens.c.id == token)
    token = connection.execute(parent).scalar() or token  # of a browser: that let it in
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
    values = {
        "id": node,
        "hostname": node,
        "cores": 0,
        "memory_bytes": 0,
        "gpus": [],
        "paceline": "",
        "registered_at": now(connection),
        "heartbeat_at": UNHEARD,
        "left": True,
        "runs": [],
        "signed": True,
        **admission,
    }
    row = insert(connection, nodes).values(values).on_conflict_do_nothing()
    return connection.execute(row.returning(nodes.c.id)).scalar() is not None


def bind(
    connection: sa.Connection, node: str, run: str, backend: str | None, host: str | None = None
) -> bool:
    """Note where a node of a run is; False: its session was not made with the run's token.

    Args:
        connection: to write with.
        node: its name.
        run: public id.
        backend: the engine that started it; None: none of ours.
        host: what the engine calls its machine; None: it does not say.
    """
    c = nodes.c
    own = (c.id == node, c.signed, c.only_run == run, c.token.is_not(None), admitted())
    query = sa.update(nodes).where(*own).values(backend=backend, host=host)
    return connection.execute(query).rowcount > 0


def forget(connection: sa.Connection, node: str) -> None:
    """Delete what is known of a node. Its cordons, and what runs say of it, stay."""
    connection.execute(sa.delete(nodes).where(nodes.c.id == node))
