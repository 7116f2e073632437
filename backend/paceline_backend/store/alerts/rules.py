"""Changes that admins made to the default alert rules: settings in the table `meta`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.database import insert, now
from paceline_backend.store.schema import meta

_PREFIX = "alert rule "


def changed(connection: sa.Connection) -> dict[str, dict[str, Any]]:
    """Return the changed rules: name → the values of `change`, `changed_by` and `changed_at`."""
    query = sa.select(meta.c.name, meta.c.value).where(meta.c.name.startswith(_PREFIX))
    rows = connection.execute(query.order_by(meta.c.name))
    return {row.name.removeprefix(_PREFIX): json.loads(row.value) for row in rows}


def lock(connection: sa.Connection, name: str) -> None:
    """Lock a rule by name until the transaction ends.

    A rule with default values has no row that could be locked, so Postgres takes an advisory lock.
    SQLite needs no lock, because it has only one writer at a time.
    """
    if connection.dialect.name == "postgresql":
        key = sa.func.hashtext(f"alert rule {name}")
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(key)))


def change(connection: sa.Connection, name: str, by: str, values: Mapping[str, Any]) -> None:
    """Change a rule on behalf of `by`.

    `values` has `enabled`, `threshold`, `raise_after_s`, `resolve_after_s` and `severity`.
    """
    value = json.dumps({**values, "changed_at": now(connection), "changed_by": by})
    made = insert(connection, meta).values(name=_PREFIX + name, value=value)
    connection.execute(
        made.on_conflict_do_update(index_elements=["name"], set_={"value": made.excluded.value})
    )


def restore(connection: sa.Connection, name: str) -> None:
    """Restore the defaults of a rule."""
    connection.execute(sa.delete(meta).where(meta.c.name == _PREFIX + name))
