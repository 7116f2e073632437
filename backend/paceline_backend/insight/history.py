"""What runs came to by day, node, policy, tag and so on: steps, hours, and what they cost.

`requests` of a page and `paceline runs` ask by the same filters as the list of runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from paceline_backend.server.prices import Price
from paceline_backend.store import Connection
from paceline_backend.store.fleet import costs
from paceline_backend.store.fleet.costs import Spent
from paceline_backend.store.history import RunFilter, days, labels
from paceline_backend.store.nodes import run_nodes

By = Literal["day", "run", "node", "policy", "tag", "device", "backend"]
_SUMS = ("steps", "step_s_sum", "se_sum", "se_count", "waste_sum", "waste_count")
SIMULATED = "simulated"  # backend of runs without processes
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def aggregates(
    connection: Connection,
    which: RunFilter,
    by: Sequence[By],
    since: float | None = None,
    until: float | None = None,
    default: Price | None = None,
) -> list[dict[str, Any]]:
    """Sums and means over the steps of runs, by group; groups in the order of their names.

    A run on several nodes counts for each with the ranks there, and a run with several tags for
    each: then the sums over all groups are more than the whole. Costs are those of each node, and
    count steps that were trained again, as that time was spent again. A step belongs to the policy
    that planned it, and a day's costs of a run to its policies in proportion to their time.
    Simulated runs have groups of their own: their hours are virtual.

    Args:
        connection: to read from.
        which: runs.
        by: what makes a group; empty: all is one group.
        since: only days from that of this Unix time on,
        until: and up to that of this one.
        default: price of nodes whose type has none.
    """
    first, last = (None if at is None else int(at // days.DAY_S) for at in (since, until))
    where = which.conditions(connection.dialect.name)
    rows = days.of_runs(connection, where, first, last)
    spent = costs.by_day(connection, where, first, last, default)
    keys = sorted({row["key"] for row in (*rows, *spent)})
    tags = labels.tags(connection, keys) if "tag" in by else {}
    nodes = run_nodes.of_runs(connection, keys) if "node" in by else {}
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        on = [each.node for each in nodes.get(row["key"], [])] or [row["node"]]
        ranks = row["ranks"] / len(on) if "node" in by else row["ranks"]
        for group in _names(by, row, tags.get(row["key"], []), on):
            groups[row["backend"] == SIMULATED, *group].append({**row, "ranks": ranks})
    paid: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    divided: Iterable[Mapping[str, Any]] = _by_policy(spent, rows) if "policy" in by else spent
    for part in divided:
        for group in _names(by, part, tags.get(part["key"], []), [part["node"]]):
            paid[False, *group].append(part)
    currency = costs.currency(connection, default)
    return [
        {
            **dict(zip(("simulated", *by), group, strict=True)),
            **_total(groups[group], paid[group]),
            **_cost(paid[group], currency),
        }
        for group in sorted({*groups, *paid})
    ]


def _by_policy(
    spent: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> Iterable[Mapping[str, Any]]:
    """What runs cost in a day, divided among the policies of the day's steps by their time."""
    times: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        times[row["key"], row["day"]][row["policy"]] += row["step_s_sum"]
    for row in spent:
        of_policies = times.get((row["key"], row["day"]), {})
        whole = sum(of_policies.values())
        if not whole:
            yield row
        for policy, time_s in of_policies.items() if whole else ():
            part = {name: row[name] * time_s / whole for name in costs.SUMS}
            yield {**row, **part, "policy": policy}


def _names(
    by: Sequence[By], row: Mapping[str, Any], tags: Sequence[str], nodes: Sequence[str | None]
) -> Iterable[tuple[str, ...]]:
    """The groups that a run counts for in a day; what is not known is an empty text."""
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


def _total(rows: Sequence[Mapping[str, Any]], paid: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sums = {name: sum(row[name] for row in rows) for name in _SUMS}
    worker_s = sum(row["ranks"] * row["step_s_sum"] for row in rows)
    waited_s = sum(row["ranks"] * row["waited_s_sum"] for row in rows)
    return {
        "runs": len({row["id"] for row in (*rows, *paid)}),
        **days.means(sums),
        "worker_hours": worker_s / 3600,
        "waiting_hours": waited_s / 3600,
    }


def _cost(paid: Sequence[Mapping[str, Any]], currency: str | None) -> dict[str, Any]:
    spent = Spent()
    for row in paid:
        spent += Spent(*(row[name] for name in costs.SUMS))
    known = currency is not None and spent.priced
    return {
        "cost": spent.cost if known else None,
        "waited_cost": spent.waited_cost if known else None,
        "currency": currency,
        "unpriced_hours": spent.unpriced_s / 3600,
    }
