"""Access tokens of the control plane, and the browsers that log in with them.

A token is `pl_<id>_<secret>`. The database stores the id and a hash of the secret. A browser that
logs in has a row of its own, so that an operator can list and revoke it like a token. A one-time
link logs in one browser.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import sqlalchemy as sa

from paceline_backend.store import meta
from paceline_backend.store.database import Connection, Store, insert
from paceline_backend.store.schema import meta as settings
from paceline_backend.store.schema import tokens

Scope = Literal["viewer", "operator", "agent", "admin"]

# Lifetime of a login link, in seconds.
LINK_S = 600.0
# Lifetime of a browser's login, in seconds.
BROWSER_S = 30 * 24 * 3600.0
PREFIX = "pl"
# Key in the table `meta` for the id of the server's own token.
_EMBEDDED = "embedded token"

_SHOWN = (
    *(tokens.c.id, tokens.c.kind, tokens.c.name, tokens.c.scope, tokens.c.created_at),
    *(tokens.c.created_by, tokens.c.expires_at, tokens.c.revoked_at, tokens.c.used_at),
    *(tokens.c.node, tokens.c.run),
)


class Secret(NamedTuple):
    """Id and secret of a token or login link; `str()` returns the text that the user gets."""

    id: str
    secret: str

    def __str__(self) -> str:
        return f"{PREFIX}_{self.id}_{self.secret}"


@dataclass(frozen=True)
class Holder:
    """Identity and rights of the token or browser that authenticated a request.

    Args:
        scope: what the token allows.
        used_at: Unix time of the last use; None: never used.
        refused: why the token is no longer valid; empty if it is valid.
        node: the only node that an agent's token is valid for; None: all.
        run: the only run whose nodes may use an agent's token; None: all.
    """

    id: str
    name: str
    scope: Scope
    used_at: float | None = None
    refused: Literal["", "expired", "revoked"] = ""
    node: str | None = None
    run: str | None = None


def parsed(text: str) -> Secret | None:
    """Parse a text that has the form of a token; return None for any other text."""
    prefix, _, rest = text.partition("_")
    identity, _, secret = rest.partition("_")
    return Secret(identity, secret) if prefix == PREFIX and identity and secret else None


def create(
    connection: Connection,
    name: str,
    scope: Scope,
    created_by: str,
    *,
    expires_at: float | None = None,
    node: str | None = None,
) -> Secret:
    """Store a new token and return it with its secret, which cannot be read again later.

    `created_by` is the requester's name, `expires_at` a Unix time (None: never), and `node` the
    only node that may use the token (None: all).
    """
    made = _new()
    rights = {"name": name, "scope": scope, "node": node, "created_by": created_by}
    _add(connection, made, kind="token", expires_at=expires_at, **rights)
    return made


def link(connection: Connection, parent: str, name: str, scope: Scope) -> Secret:
    """Store a link that logs in one browser, once, within `LINK_S` seconds.

    `parent` is the id of the token or browser that requests the link, `name` the requester's name,
    and `scope` what the new browser may do. If a browser requests the link, the parent of
    the new browser is the token that the requesting browser logged in with.
    """
    now = time.time()
    unused = (tokens.c.kind == "browser", tokens.c.used_at.is_(None), tokens.c.expires_at <= now)
    connection.execute(sa.delete(tokens).where(*unused))
    made = _new()
    asker = sa.select(tokens.c.parent).where(tokens.c.id == parent, tokens.c.kind == "browser")
    root = connection.execute(asker).scalar()
    origin = {"parent": root or parent, "via": parent if root else None, "created_by": name}
    _add(
        connection, made, kind="browser", name=name, scope=scope, expires_at=now + LINK_S, **origin
    )
    return made


def use_link(connection: Connection, code: str) -> Holder | None:
    """Consume a login link and return the new browser's holder.

    Return None if the link is unknown, used, revoked or expired. If several callers use a link at
    the same time, only one of them gets the holder.
    """
    given = parsed(code)
    if given is None:
        return None
    now = time.time()
    row = connection.execute(
        sa.update(tokens)
        .where(tokens.c.id == given.id, tokens.c.hash == hashed(given.secret), *_valid(now))
        .where(tokens.c.kind == "browser", tokens.c.used_at.is_(None))
        .values(used_at=now, expires_at=now + BROWSER_S)
        .returning(tokens.c.id, tokens.c.name, tokens.c.scope, tokens.c.used_at)
    ).one_or_none()
    return None if row is None else Holder(*row)


def checked(connection: Connection, text: str) -> Holder | None:
    """Return the holder of a token, or None if no such token exists.

    The token of the result may be expired or revoked: see `Holder.refused`.
    """
    given = parsed(text)
    if given is None:
        return None
    query = sa.select(tokens).where(tokens.c.id == given.id, tokens.c.kind == "token")
    row = connection.execute(query).one_or_none()
    if row is None or not hmac.compare_digest(row.hash, hashed(given.secret)):
        return None
    expired = row.expires_at is not None and row.expires_at <= time.time()
    refused: Literal["", "expired", "revoked"] = "expired" if expired else ""
    if row.revoked_at is not None:
        refused = "revoked"
    return Holder(row.id, row.name, row.scope, row.used_at, refused, row.node, row.run)


def enter(connection: Connection, holder: Holder) -> Holder:
    """Store a browser that logs in with the token `holder`; return the browser's own `Holder`."""
    now = time.time()
    over = (tokens.c.kind == "browser", tokens.c.expires_at <= now)
    connection.execute(sa.delete(tokens).where(*over))
    # The browser gets a signed cookie with the id of the row, so the row's secret is never used.
    made = _new()
    rights = {"name": holder.name, "scope": holder.scope, "parent": holder.id}
    until = now + BROWSER_S
    more = {"created_by": holder.name, "used_at": now}
    _add(connection, made, kind="browser", expires_at=until, **rights, **more)
    return Holder(made.id, holder.name, holder.scope, now)


def of_cookie(connection: Connection, identity: str, configured: Iterable[str]) -> Holder | None:
    """Return the holder of the browser that a cookie names; None if its login has ended.

    `configured` has the ids of the tokens that come from the server's configuration.
    """
    query = _still_valid(identity, configured).where(tokens.c.kind == "browser")
    row = connection.execute(query).one_or_none()
    return None if row is None else Holder(*row)


def is_valid(connection: Connection, identity: str, configured: Iterable[str]) -> bool:
    """Return whether a token or browser is neither revoked nor expired; see `of_cookie`."""
    return connection.execute(_still_valid(identity, configured)).first() is not None


def _still_valid(identity: str, configured: Iterable[str]) -> sa.Select[Any]:
    now = time.time()
    parent = tokens.alias()
    parents = sa.select(parent.c.id).where(
        parent.c.id == tokens.c.parent,
        parent.c.kind == "token",
        parent.c.revoked_at.is_(None),
        sa.or_(parent.c.expires_at.is_(None), parent.c.expires_at > now),
    )
    browser = sa.and_(
        tokens.c.used_at.is_not(None),
        sa.or_(tokens.c.parent.in_(list(configured)), sa.exists(parents)),
    )
    holder = (tokens.c.id, tokens.c.name, tokens.c.scope, tokens.c.used_at)
    query = sa.select(*holder).where(tokens.c.id == identity, *_valid(now))
    return query.where(sa.or_(tokens.c.kind == "token", browser))


def touch(store: Store, identity: str) -> None:
    """Record that a token or browser is being used now."""
    with store.write() as connection:
        query = sa.update(tokens).where(tokens.c.id == identity)
        connection.execute(query.values(used_at=time.time()))


def listed(connection: Connection) -> list[Mapping[str, Any]]:
    """Return all tokens and browsers, newest first, without links that were never used."""
    shown = sa.or_(tokens.c.kind == "token", tokens.c.used_at.is_not(None))
    query = sa.select(*_SHOWN).where(shown).order_by(tokens.c.key.desc())
    return [dict(row) for row in connection.execute(query).mappings()]


def get(connection: Connection, identity: str) -> Mapping[str, Any] | None:
    """Return one token or browser, or None if there is none with this id."""
    row = connection.execute(sa.select(*_SHOWN).where(tokens.c.id == identity)).mappings()
    return next((dict(each) for each in row), None)


def revoke(connection: Connection, identity: str) -> bool:
    """Revoke a token or browser; return False if it is unknown.

    With a browser, also revoke the browsers whose login links it requested. With a token, no other
    row changes, because `of_cookie` checks the token that a browser logged in with.
    """
    ended = sa.select(tokens.c.id).where(tokens.c.id == identity).cte("ended", recursive=True)
    let_in = sa.select(tokens.c.id).join(ended, tokens.c.via == ended.c.id)
    query = sa.update(tokens).where(tokens.c.id.in_(sa.select(ended.union(let_in).c.id)))
    first = sa.func.coalesce(tokens.c.revoked_at, time.time())
    return connection.execute(query.values(revoked_at=first)).rowcount > 0


def embedded(store: Store) -> Secret:
    """Return the server's own admin token: the same at each start until an operator revokes it.

    The token's secret is derived from the server's secret, so the database does not contain it.
    """
    master = meta.secret(store)
    with store.write() as connection:
        known = connection.execute(
            sa.select(settings.c.value).where(settings.c.name == _EMBEDDED)
        ).scalar()
        if known is not None:
            made = _derived(master, known)
            holder = checked(connection, str(made))
            if holder is not None and not holder.refused:
                return made
        made = _derived(master, secrets.token_hex(4))
        values = {"name": _EMBEDDED, "value": made.id}
        query = insert(connection, settings).values(values)
        connection.execute(
            query.on_conflict_do_update(index_elements=["name"], set_={"value": made.id})
        )
        rights = {"name": "owner", "scope": "admin", "created_by": "server"}
        _add(connection, made, kind="token", **rights)
        return made


def of_run(store: Store, run: str) -> Secret:
    """Return the token for a run's nodes: the same at each call until an operator revokes it.

    The token's secret is derived from the server's secret. So if a process dies while it submits a
    job with the token, another process can compute the same secret.
    """
    master = meta.secret(store)
    valid = sa.select(tokens.c.id).where(tokens.c.run == run, *_valid(time.time()))
    with store.write() as connection:
        known = connection.execute(valid.order_by(tokens.c.key).limit(1)).scalar()
        made = _derived(master, known or secrets.token_hex(4))
        if known is None:
            rights = {"name": f"run-{run}", "scope": "agent", "created_by": "the control plane"}
            _add(connection, made, kind="token", run=run, **rights)
        return made


def revoke_of_run(connection: Connection, run: str) -> None:
    """Revoke the tokens of a run's nodes."""
    query = sa.update(tokens).where(tokens.c.run == run, tokens.c.revoked_at.is_(None))
    connection.execute(query.values(revoked_at=time.time()))


def revoke_derived(connection: Connection) -> None:
    """Revoke all tokens derived from the server's secret: the server's own, and those of runs."""
    own = sa.select(settings.c.value).where(settings.c.name == _EMBEDDED)
    derived = tokens.c.run.is_not(None) | tokens.c.id.in_(own)
    query = sa.update(tokens).where(derived, tokens.c.revoked_at.is_(None))
    connection.execute(query.values(revoked_at=time.time()))


def _derived(master: bytes, identity: str) -> Secret:
    key = hashlib.blake2b(identity.encode(), key=master, person=b"paceline token", digest_size=24)
    return Secret(identity, key.hexdigest())


def _new() -> Secret:
    return Secret(secrets.token_hex(4), secrets.token_hex(24))


def hashed(secret: str) -> str:
    """Return the hash of a secret, as the database stores it."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def _valid(now: float) -> tuple[sa.ColumnElement[bool], ...]:
    unexpired = sa.or_(tokens.c.expires_at.is_(None), tokens.c.expires_at > now)
    return tokens.c.revoked_at.is_(None), unexpired


def _add(connection: Connection, made: Secret, **values: Any) -> None:
    own = {"id": made.id, "hash": hashed(made.secret), "created_at": time.time()}
    connection.execute(sa.insert(tokens).values({**own, **values}))
