"""What ranks' time, and what they waited of it, cost: `waiting_days` with the prices of then.

The time of simulated runs is virtual: it is not counted, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline_backend.server.prices import Price
from paceline_backend.store.fleet import prices, waiting
from paceline_backend.store.fleet.tables import node_prices, waiting_days
from paceline_backend.store.history import labels
from paceline_backend.store.schema import audit, runs

SUMS = ("worker_s", "waited_s", "cost", "waited_cost", "unpriced_s")
COSTS = ("cost", "waited_cost")  # of `SUMS`, what is money


@dataclass(frozen=True)
class Spent:
    """Time and money.

    Args:
        worker_s: time of all ranks,
        waited_s: and what they waited of it.
        cost: of the time; in the currency of `currency`.
        waited_cost: of the waiting.
        unpriced_s: part of `worker_s` on nodes of which nobody knows the price.
    """

    worker_s: float = 0.0
    waited_s: float = 0.0
    cost: float = 0.0
    waited_cost: float = 0.0
    unpriced_s: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        """Both together."""
        return Spent(*(getattr(self, name) + getattr(other, name) for name in SUMS))

    @property
    def priced(self) -> bool:
        """Whether some of the time has a price."""
        return self.worker_s > self.unpriced_s

    @classmethod
    def of(cls, row: Any) -> Spent:
        """Of a row that has the columns."""
        return cls(*(getattr(row, name) for name in SUMS))


def currency(connection: sa.Connection, default: Price | None) -> str | None:
    """The currency of all costs; None: nothing has a price."""
    known = prices.currency(connection)
    return default.currency if known is None and default is not None else known


def days(
    connection: sa.Connection, first: int, last: int, default: Price | None
) -> list[dict[str, Any]]:
    """Of a range of days, what each run's ranks spent and waited, and what that cost.

    Each row has the run's `name`, its `owner` (who started it; None: nobody knows) and its `tags`.
    A run that was pruned has neither name nor tags.

    Args:
        connection: to read from.
        first: day, since 1970-01-01, UTC,
        last: and the last one.
        default: price of types that have none.
    """
    c, a = waiting_days.c, audit.c
    sums = _sums(default, [c.day, c.run], c.day.between(first, last)).subquery()
    owners = sa.select(a.run, sa.func.min(a.who).label("owner"))
    shown = sa.select(c.run).where(c.day.between(first, last))
    of = owners.where(a.action == "run.create", a.run.in_(shown)).group_by(a.run).subquery()
    query = (
        sa.select(sums, runs.c.name, runs.c.key, of.c.owner)
        .outerjoin(of, of.c.run == sums.c.run)
        .outerjoin(runs, runs.c.id == sums.c.run)
        .order_by(sums.c.day, sums.c.run)
    )
    rows = [dict(row) for row in connection.execute(query).mappings()]
    tags = labels.tags(connection, sorted({row["key"] for row in rows} - {None}))
    return [{**row, "tags": tags[row["key"]]} for row in rows]


def of_runs(
    connection: sa.Connection, names: Collection[str], default: Price | None
) -> dict[str, Spent]:
    """What some runs spent so far, by public id; runs of which nothing is counted are left out."""
    c = waiting_days.c
    return {
        row.run: Spent.of(row)
        for row in connection.execute(_sums(default, [c.run], c.run.in_(list(names))))
    }


def by_run(default: Price | None) -> dict[str, sa.ColumnElement[Any]]:
    """What a run of the table `runs` spent so far, to sort by; NULL: none of its time has a price.

    Args:
        default: price of types that have none.
    """
    values = _values(default)
    priced = sa.func.sum(values["worker_s"]) > sa.func.sum(values["unpriced_s"])
    query = sa.select().select_from(waiting_days.outerjoin(node_prices, _HELD))
    query = query.where(waiting_days.c.run == runs.c.id).correlate(runs)
    return {
        name: query.add_columns(sa.case((priced, sa.func.sum(values[name])))).scalar_subquery()
        for name in COSTS
    }


def by_day(
    connection: sa.Connection,
    where: Sequence[sa.ColumnElement[bool]],
    first: int | None,
    last: int | None,
    default: Price | None,
) -> list[dict[str, Any]]:
    """What runs spent by day, run and node, and what runs are grouped by; ordered by day.

    Args:
        connection: to read from.
        where: which runs, as `RunFilter.conditions`.
        first: day, since 1970-01-01, UTC; None: the first,
        last: and the last one; None: the last.
        default: price of types that have none.
    """
    c, w = runs.c, waiting_days.c
    of_run = (c.key, c.id, c.policy, c.device, c.backend)
    counted = [c.pruned_at.is_(None), *where]
    counted += [] if first is None else [w.day >= first]
    counted += [] if last is None else [w.day <= last]
    query = _sums(default, [*of_run, w.day, w.node], *counted).join(runs, c.id == w.run)
    rows = connection.execute(query.order_by(w.day, c.key, w.node)).mappings()
    return [{str(name): value for name, value in row.items()} for row in rows]


def of_run_nodes(connection: sa.Connection, run: str, default: Price | None) -> dict[str, Spent]:
    """What a run spent on each node so far; an empty name: unknown."""
    c = waiting_days.c
    return {
        row.node: Spent.of(row)
        for row in connection.execute(_sums(default, [c.node], c.run == run).order_by(c.node))
    }


def of_nodes(
    connection: sa.Connection, first: int, last: int, default: Price | None
) -> dict[str, Spent]:
    """What was spent on each node in a range of days; an empty name: unknown."""
    c = waiting_days.c
    return {
        row.node: Spent.of(row)
        for row in connection.execute(_sums(default, [c.node], c.day.between(first, last)))
    }


def of_steps(
    connection: sa.Connection, run: int, first: int, last: int, default: Price | None
) -> Spent:
    """What a range of a run's complete steps cost, its last step included; nothing if simulated.

    Args:
        connection: to read from.
        run: key of the run.
        first: step,
        last: and the last one.
        default: price of types that have none.
    """
    backend = connection.execute(sa.select(runs.c.backend).where(runs.c.key == run)).scalar()
    if backend == "simulated":
        return Spent()
    spans = waiting.spans_of(connection, run, first, last)
    return sum((priced(connection, span, default) for span in spans), Spent())


def priced(connection: sa.Connection, span: Mapping[str, Any], default: Price | None) -> Spent:
    """What a row of `waiting_days` cost."""
    times = span["worker_s"], span["waited_s"]
    price = prices.in_force(connection, span["type"], span["since"], default)
    if price is None:
        return Spent(*times, unpriced_s=span["worker_s"])
    hours = (span["node_s"], span["node_waited_s"]) if price.per == "node" else times
    return Spent(*times, *(price.amount * s / 3600 for s in hours))


def _sums(
    default: Price | None,
    by: Sequence[sa.ColumnElement[Any]],
    *where: sa.ColumnElement[bool],
) -> sa.Select[Any]:
    """The sums of `Spent` over rows of `waiting_days`, each with the price that held then."""
    sums = [sa.func.sum(value).label(name) for name, value in _values(default).items()]
    return (
        sa.select(*by, *sums)
        .select_from(waiting_days.outerjoin(node_prices, _HELD))
        .where(*where)
        .group_by(*by)
    )


def _held() -> sa.ColumnElement[bool]:
    """The condition that a price held at the begin of a row's span."""
    w, p, earlier = waiting_days.c, node_prices.c, node_prices.alias().c
    newest = (
        sa.select(sa.func.max(earlier.since))
        .where(earlier.type == w.type, earlier.since <= w.since)
        .correlate(waiting_days)
        .scalar_subquery()
    )
    return sa.and_(p.type == w.type, p.since == newest)


_HELD = _held()


def _values(default: Price | None) -> dict[str, sa.ColumnElement[Any]]:
    """The columns of `Spent` of a row of `waiting_days` joined with its price."""
    w, p = waiting_days.c, node_prices.c

    def cost(of_workers: Any, of_node: Any) -> sa.ColumnElement[Any]:
        own = p.amount * sa.case((p.per == "node", of_node), else_=of_workers)
        usual = (0.0 if default is None else default.amount) * of_workers
        return sa.case((p.amount.is_not(None), own), else_=usual) / 3600.0

    unknown = p.amount.is_(None) if default is None else sa.false()
    return {
        "worker_s": w.worker_s,
        "waited_s": w.waited_s,
        "cost": cost(w.worker_s, w.node_s),
        "waited_cost": cost(w.waited_s, w.node_waited_s),
        "unpriced_s": sa.case((unknown, w.worker_s), else_=0.0),
    }
