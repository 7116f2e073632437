"""Changes that admins made to the default alert rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.database import insert, now
from paceline_backend.store.schema import alert_rules


def changed(connection: sa.Connection) -> dict[str, dict[str, Any]]:
    """Return the rules that an admin changed: name → the other columns."""
    rows = [dict(row) for row in connection.execute(sa.select(alert_rules)).mappings()]
    return {row.pop("name"): row for row in rows}


def lock(connection: sa.Connection, name: str) -> None:
    """Lock a rule by name until the transaction ends.

    A rule with default values has no row that could be locked, so Postgres takes an advisory lock.
    SQLite has only one writer anyway.
    """
    if connection.dialect.name == "postgresql":
        key = sa.func.hashtext(f"alert rule {name}")
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(key)))


def change(connection: sa.Connection, name: str, by: str, values: Mapping[str, Any]) -> None:
    """Change a rule on behalf of `by`.

    `values` has `enabled`, `threshold`, `raise_after_s`, `resolve_after_s` and `severity`.
    """
    row = {**values, "changed_at": now(connection), "changed_by": by}
    rows = insert(connection, alert_rules).values(name=name, **row)
    connection.execute(rows.on_conflict_do_update(index_elements=["name"], set_=row))


def restore(connection: sa.Connection, name: str) -> None:
    """Restore the defaults of a rule."""
    connection.execute(sa.delete(alert_rules).where(alert_rules.c.name == name))
