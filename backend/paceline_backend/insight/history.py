"""Totals of runs by day, node, policy, tag and so on: steps, hours, and cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from paceline_backend.insight.costs import SIMULATED
from paceline_backend.server.prices import Price
from paceline_backend.store import Connection
from paceline_backend.store.history import RunFilter, days, labels
from paceline_backend.store.nodes import run_nodes

By = Literal["day", "run", "node", "policy", "tag", "device", "backend"]
_TIMES = ("worker_s", "waited_s")
_SUMS = ("steps", "step_s_sum", "se_sum", "se_count", "waste_sum", "waste_count", *_TIMES)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def aggregates(
    connection: Connection,
    which: RunFilter,
    by: Sequence[By],
    since: float | None = None,
    until: float | None = None,
    price: Price | None = None,
) -> list[dict[str, Any]]:
    """Return sums and means over the steps of runs, by group, in the order of the groups' names.

    If a run has several nodes, each node gets an equal part of its ranks' time. If a run has
    several tags, each tag gets all of its time, so the sum over all tags can exceed the total. A
    step belongs to the policy that planned it. Simulated runs have groups of their own: their hours
    are virtual, and they have no cost.

    `by` names the fields that define a group; if it is empty, all runs are one group. `since` and
    `until` are Unix times; the days of both times are included.
    """
    first, last = (None if at is None else int(at // days.DAY_S) for at in (since, until))
    rows = days.of_runs(connection, which.conditions(connection.dialect.name), first, last)
    keys = sorted({row["key"] for row in rows})
    tags = labels.tags(connection, keys) if "tag" in by else {}
    nodes = run_nodes.of_runs(connection, keys) if "node" in by else {}
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        on = [each.node for each in nodes.get(row["key"], [])] or [row["node"]]
        part = {name: row[name] / (len(on) if "node" in by else 1) for name in _TIMES}
        for group in _names(by, row, tags.get(row["key"], []), on):
            groups[row["backend"] == SIMULATED, *group].append({**row, **part})
    return [
        {
            **dict(zip(("simulated", *by), group, strict=True)),
            **_total(groups[group], None if group[0] else price),
        }
        for group in sorted(groups)
    ]


def _names(
    by: Sequence[By], row: Mapping[str, Any], tags: Sequence[str], nodes: Sequence[str | None]
) -> Iterable[tuple[str, ...]]:
    names: list[tuple[str, ...]] = [()]
    for what in by:
        values: Sequence[str | None]
        if what == "day":
            values = [(_EPOCH + timedelta(days=row["day"])).date().isoformat()]
        elif what == "run":
            values = [row["id"]]
        elif what == "tag":
            values = tags or [""]
        elif what == "node":
            values = nodes
        else:
            values = [row[what]]
        names = [(*name, value or "") for name in names for value in values]
    return names


def _total(rows: Sequence[Mapping[str, Any]], price: Price | None) -> dict[str, Any]:
    figures = days.means({name: sum(row[name] for row in rows) for name in _SUMS})
    worker_s, waited_s = (figures.pop(name) for name in _TIMES)
    return {
        "runs": len({row["id"] for row in rows}),
        **figures,
        "worker_hours": worker_s / 3600,
        "waiting_hours": waited_s / 3600,
        "cost": None if price is None else price.of_time(worker_s),
        "waited_cost": None if price is None else price.of_time(waited_s),
        "currency": None if price is None else price.currency,
    }
