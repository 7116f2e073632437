"""What an hour of each type of node costs, and since when.

A type's price holds from its moment until the type's next price. All prices of a database, and the
default of `paceline server --hour-price`, are in one currency: amounts of several cannot be summed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from paceline_backend.server.prices import Price, PriceError
from paceline_backend.store.database import insert, now
from paceline_backend.store.fleet.tables import node_prices


def listed(connection: sa.Connection) -> list[dict[str, Any]]:
    """All prices, by type; of a type the newest first."""
    c = node_prices.c
    rows = connection.execute(sa.select(node_prices).order_by(c.type, c.since.desc()))
    return [dict(row) for row in rows.mappings()]


def put(
    connection: sa.Connection,
    node_type: str,
    since: float | None,
    price: Price,
    by: str,
    default: Price | None,
) -> tuple[dict[str, Any], bool]:
    """Notes that nodes of a type cost so much from a moment on; the row, and whether it is new.

    What they cost already need not be noted again: whoever looks at spot prices may tell each, and
    a program may tell the same prices of the past each time that it runs.

    Args:
        connection: to write with.
        node_type: of the nodes.
        since: Unix time, in place of a price from the same time on; None: now, in whole seconds,
            so that people can name the moment when they put the price right.
        price: of an hour.
        by: who asks.
        default: price of types that have none.

    Raises:
        PriceError: others, or the default, are in another currency.
    """
    _lock(connection)
    at = now(connection)
    held = _row(connection, node_type, at if since is None else since)
    there = held is not None and since in (None, held["since"])
    if held is not None and there and _price(held) == price:
        return held, False
    if since is None:  # but not before the price that it ends
        since = max(float(math.floor(at)), 0.0 if held is None else held["since"])
    key = {"type": node_type, "since": since}
    others = [row for row in listed(connection) if {name: row[name] for name in key} != key]
    for currency in sorted({row["currency"] for row in others}):
        if currency != price.currency:
            raise PriceError(
                f"currency is {price.currency}: the other prices are in {currency}. Give this one "
                f"in {currency}, or delete the others first"
            )
    check_default(default, price.currency)
    values = {"amount": price.amount, "currency": price.currency, "per": price.per}
    values |= {"set_at": at, "set_by": by}
    rows = insert(connection, node_prices).values(**key, **values)
    connection.execute(rows.on_conflict_do_update(index_elements=["type", "since"], set_=values))
    return key | values, True


def check_default(default: Price | None, currency: str | None) -> None:
    """Refuses a default price in another currency than the types' prices have.

    Raises:
        PriceError: it is.
    """
    if default is not None and currency is not None and default.currency != currency:
        raise PriceError(
            f"--hour-price {default.text}: prices of types of nodes are in {currency}. Start the "
            f"server with a default in {currency} or without one, or delete the prices of types"
        )


def remove(connection: sa.Connection, node_type: str, since: float | None) -> list[dict[str, Any]]:
    """Forgets a type's price from a moment on, or (None) all of its prices; those that were."""
    c = node_prices.c
    where = [c.type == node_type] + ([] if since is None else [c.since == since])
    columns = (c.since, c.amount, c.currency, c.per)
    removed = connection.execute(sa.delete(node_prices).where(*where).returning(*columns))
    return sorted((dict(row) for row in removed.mappings()), key=lambda row: row["since"])


def currency(connection: sa.Connection) -> str | None:
    """The currency of the types' prices; None: no type has one."""
    known = connection.execute(sa.select(node_prices.c.currency).limit(1)).scalar()
    return None if known is None else str(known)


def in_force(
    connection: sa.Connection, node_type: str, at: float, default: Price | None
) -> Price | None:
    """What nodes of a type cost at a moment; None: unknown."""
    row = _row(connection, node_type, at)
    return default if row is None else _price(row)


def _row(connection: sa.Connection, node_type: str, at: float) -> dict[str, Any] | None:
    """The row of a type's price that holds at a moment; None: there is none."""
    c = node_prices.c
    query = sa.select(node_prices).where(c.type == node_type, c.since <= at)
    row = connection.execute(query.order_by(c.since.desc()).limit(1)).mappings().one_or_none()
    return None if row is None else dict(row)


def _price(row: Mapping[str, Any]) -> Price:
    return Price(row["amount"], row["currency"], row["per"])


def _lock(connection: sa.Connection) -> None:
    """Whoever else sets a price waits until the transaction ends.

    (SQLite has one writer anyway.)
    """
    if connection.dialect.name == "postgresql":
        key = sa.func.hashtext("node prices")
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(key)))
