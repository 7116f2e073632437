"""History of nodes over several days, and the cost of waiting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from paceline_backend.insight.costs import SIMULATED
from paceline_backend.server.prices import Price
from paceline_backend.store import Connection, audit, nodes
from paceline_backend.store.fleet import verdicts
from paceline_backend.store.fleet.verdicts import NamedNodes
from paceline_backend.store.history import days as run_days
from paceline_backend.store.history import labels

By = Literal["owner", "tag", "run"]

# At most this many groups are listed individually.
_MOST_GROUPS = 100
_SUMS = ("worker_hours", "waited_hours", "cost", "waited_cost")


def record(
    connection: Connection, days: int, by: By, now: float, price: Price | None = None
) -> dict[str, Any]:
    """Return nodes by day, and the cost of waiting on these days by owner, tag or run.

    The days end with today (UTC). Without a price there are no costs.
    """
    last = int(now // run_days.DAY_S)
    first = last - days + 1
    kept = verdicts.between(connection, first * run_days.DAY_S, now)
    return {
        "first_day": first * run_days.DAY_S,
        "currency": None if price is None else price.currency,
        "groups": _groups(_spent(connection, first, last, price), by),
        "nodes": _nodes(nodes.listed(connection), straggling(kept, first, days), days),
    }


def _spent(
    connection: Connection, first: int, last: int, price: Price | None
) -> list[dict[str, Any]]:
    summed = run_days.of_runs(connection, [], first, last)
    rows = [row for row in summed if row["backend"] != SIMULATED]
    owners = audit.owners(connection, sorted({row["id"] for row in rows}))
    tags = labels.tags(connection, sorted({row["key"] for row in rows}))
    return [
        {
            "run": row["id"],
            "name": row["name"],
            "owner": owners.get(row["id"], ""),
            "tags": tags[row["key"]],
            "worker_hours": row["worker_s"] / 3600,
            "waited_hours": row["waited_s"] / 3600,
            "cost": 0.0 if price is None else price.of_time(row["worker_s"]),
            "waited_cost": 0.0 if price is None else price.of_time(row["waited_s"]),
        }
        for row in rows
    ]


def straggling(kept: Iterable[NamedNodes], first: int, days: int) -> dict[str, list[float]]:
    """Return the hours of each day in which a verdict named a node, by node.

    Time counts once if several runs name a node at once. `first` is a day counted from 1970-01-01.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    for each in kept:
        for node in each.nodes:
            spans.setdefault(node, []).append((each.at, each.until))
    hours = {}
    for node, all_spans in spans.items():
        hours[node] = [0.0] * days
        for begin, end in _merged(all_spans):
            for day in range(days):
                start = (first + day) * run_days.DAY_S
                overlap = min(end, start + run_days.DAY_S) - max(begin, start)
                hours[node][day] += max(overlap, 0.0) / 3600
    return hours


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _groups(rows: Iterable[Mapping[str, Any]], by: By) -> list[dict[str, Any]]:
    """Return groups by waiting time; beyond `_MOST_GROUPS`, a group without a key has the rest."""
    groups: dict[str | None, dict[str, Any]] = {}
    for row in rows:
        for key, name in _named(row, by):
            _add(groups.setdefault(key, _group(key, name)), row, {row["run"]})
    made = sorted(groups.values(), key=lambda group: -group["waited_hours"])
    if len(made) > _MOST_GROUPS:
        rest = _group(None, "")
        for group in made[_MOST_GROUPS - 1 :]:
            _add(rest, group, group["runs"])
        made[_MOST_GROUPS - 1 :] = [rest]
    return [{**group, "runs": len(group["runs"])} for group in made]


def _named(row: Mapping[str, Any], by: By) -> list[tuple[str, str]]:
    if by == "tag":
        return [(tag, tag) for tag in row["tags"]] or [("", "")]
    if by == "owner":
        return [(row["owner"], row["owner"])]
    return [(row["run"], row["name"])]


def _group(key: str | None, name: str) -> dict[str, Any]:
    return {"key": key, "name": name, "runs": set(), **dict.fromkeys(_SUMS, 0.0)}


def _add(group: dict[str, Any], sums: Mapping[str, Any], of_runs: set[str]) -> None:
    group["runs"] |= of_runs
    for name in _SUMS:
        group[name] += sums[name]


def _nodes(
    listed: Iterable[Mapping[str, Any]], hours: Mapping[str, list[float]], days: int
) -> list[dict[str, Any]]:
    none = [0.0] * days
    gone = {"alive": False, "runs": [], "cordoned": None}
    made = {name: {"node": name, **gone} for name in hours}
    for node in listed:
        made[node["id"]] = {"node": node["id"], **{key: node[key] for key in gone}}
    for name, node in made.items():
        node["hours"] = hours.get(name, none)
    return sorted(made.values(), key=lambda node: (-sum(node["hours"]), node["node"]))
