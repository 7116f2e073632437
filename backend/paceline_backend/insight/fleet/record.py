"""What is known of nodes over days, and what waiting cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from paceline_backend.server.prices import Price
from paceline_backend.store import Connection, nodes
from paceline_backend.store.fleet import costs, verdicts
from paceline_backend.store.fleet.costs import Spent
from paceline_backend.store.fleet.verdicts import NamedNodes
from paceline_backend.store.fleet.waiting import DAY_S

By = Literal["owner", "tag", "run"]

_MOST_GROUPS = 100  # told one by one
_SUMS = ("worker_hours", "waited_hours", "cost", "waited_cost")
_BY_DAY = {"waited_by_day": "waited_hours", "waited_cost_by_day": "waited_cost"}


def record(
    connection: Connection, days: int, by: By, now: float, default: Price | None = None
) -> dict[str, Any]:
    """Nodes by day, and the cost of waiting by day and by owner, tag or run.

    Args:
        connection: to read from.
        days: how many, until today (UTC).
        by: what the cost is added up by.
        now: Unix time.
        default: price of nodes whose type has none.
    """
    last = int(now // DAY_S)
    first = last - days + 1
    kept = verdicts.between(connection, first * DAY_S, now)
    hours = straggling(kept, first, days)
    rows = costs.days(connection, first, last, default)
    spent = costs.of_nodes(connection, first, last, default)
    return {
        "first_day": first * DAY_S,
        "currency": costs.currency(connection, default),
        "unpriced_hours": sum(row["unpriced_s"] for row in rows) / 3600,
        "days": _days(rows, first, days),
        "groups": _groups(rows, by, first, days),
        "nodes": _nodes(nodes.listed(connection), hours, spent, days),
    }


def straggling(kept: Iterable[NamedNodes], first: int, days: int) -> dict[str, list[float]]:
    """By node, the hours of each day in which a verdict named it.

    Args:
        kept: verdicts of all runs. Of a node that several runs name at once, time counts once.
        first: day, since 1970-01-01.
        days: how many.
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
                start = (first + day) * DAY_S
                overlap = min(end, start + DAY_S) - max(begin, start)
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


def _days(rows: Iterable[Mapping[str, Any]], first: int, days: int) -> list[dict[str, float]]:
    sums = [dict.fromkeys(_SUMS, 0.0) for _ in range(days)]
    for row in rows:
        for name, value in _sums(row).items():
            sums[row["day"] - first][name] += value
    return sums


def _sums(row: Mapping[str, Any]) -> dict[str, float]:
    """Hours and money of a row of `store.fleet.costs`."""
    hours = {"worker_hours": row["worker_s"] / 3600, "waited_hours": row["waited_s"] / 3600}
    return {**hours, "cost": row["cost"], "waited_cost": row["waited_cost"]}


def _groups(
    rows: Iterable[Mapping[str, Any]], by: By, first: int, days: int
) -> list[dict[str, Any]]:
    """What waited most first; beyond `_MOST_GROUPS` one group, whose key is None, has the rest."""
    groups: dict[str | None, dict[str, Any]] = {}
    for row in rows:
        for key, name in _named(row, by):
            _add(groups.setdefault(key, _group(key, name, days)), row, row["day"] - first)
    made = sorted(groups.values(), key=lambda group: -group["waited_hours"])
    if len(made) > _MOST_GROUPS:
        made[_MOST_GROUPS - 1 :] = [_together(made[_MOST_GROUPS - 1 :], days)]
    return [{**group, "runs": len(group["runs"])} for group in made]


def _named(row: Mapping[str, Any], by: By) -> list[tuple[str, str]]:
    """Keys and names of the groups that a run's day counts for; an empty key: unknown."""
    if by == "tag":
        return [(tag, tag) for tag in row["tags"]] or [("", "")]
    if by == "owner":
        return [(row["owner"] or "", row["owner"] or "")]
    return [(row["run"], row["name"] or row["run"])]


def _group(key: str | None, name: str, days: int) -> dict[str, Any]:
    by_day: dict[str, list[float]] = {name: [0.0] * days for name in _BY_DAY}
    return {"key": key, "name": name, "runs": set(), **dict.fromkeys(_SUMS, 0.0), **by_day}


def _add(group: dict[str, Any], row: Mapping[str, Any], day: int) -> None:
    group["runs"].add(row["run"])
    sums = _sums(row)
    for name in _SUMS:
        group[name] += sums[name]
    for name, of in _BY_DAY.items():
        group[name][day] += sums[of]


def _together(groups: Iterable[Mapping[str, Any]], days: int) -> dict[str, Any]:
    """Some groups as one."""
    whole = _group(None, "", days)
    for group in groups:
        whole["runs"] |= group["runs"]
        for name in _SUMS:
            whole[name] += group[name]
        for name in _BY_DAY:
            pairs = zip(whole[name], group[name], strict=True)
            whole[name] = [mine + more for mine, more in pairs]
    return whole


def _nodes(
    listed: Iterable[Mapping[str, Any]],
    hours: Mapping[str, list[float]],
    spent: Mapping[str, Spent],
    days: int,
) -> list[dict[str, Any]]:
    """Nodes that are listed, that verdicts named, or that ranks trained on.

    What held runs up most comes first.
    """
    none = [0.0] * days
    gone = {"type": "", "alive": False, "runs": [], "cordoned": None}
    made = {name: {"node": name, **gone} for name in {*hours, *spent} - {""}}
    for node in listed:
        made[node["id"]] = {"node": node["id"], **{key: node[key] for key in gone}}
    for name, node in made.items():
        node["hours"] = hours.get(name, none)
        node |= _sums(vars(spent.get(name, Spent())))
    return sorted(made.values(), key=lambda node: (-sum(node["hours"]), node["node"]))
