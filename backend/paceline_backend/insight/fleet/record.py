"""What is known of nodes over days, and what waiting cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from paceline_backend.store import Connection, nodes
from paceline_backend.store.fleet import verdicts, waiting
from paceline_backend.store.fleet.verdicts import Named
from paceline_backend.store.fleet.waiting import DAY_S

By = Literal["owner", "tag", "run"]

_MOST_GROUPS = 100  # told one by one


def record(connection: Connection, days: int, by: By, now: float) -> dict[str, Any]:
    """Nodes by day, and the cost of waiting by day and by owner, tag or run.

    Args:
        connection: to read from.
        days: how many, until today (UTC).
        by: what the cost is added up by.
        now: Unix time.
    """
    last = int(now // DAY_S)
    first = last - days + 1
    kept = verdicts.between(connection, first * DAY_S, now)
    hours = straggling(kept, first, days)
    rows = waiting.days(connection, first, last)
    return {
        "first_day": first * DAY_S,
        "days": _days(rows, first, days),
        "groups": _groups(rows, by, first, days),
        "nodes": _nodes(nodes.listed(connection), hours, days),
    }


def straggling(kept: Iterable[Named], first: int, days: int) -> dict[str, list[float]]:
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
    sums = [{"worker_hours": 0.0, "waited_hours": 0.0} for _ in range(days)]
    for row in rows:
        day = sums[row["day"] - first]
        day["worker_hours"] += row["worker_s"] / 3600
        day["waited_hours"] += row["waited_s"] / 3600
    return sums


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
    hours = {"worker_hours": 0.0, "waited_hours": 0.0, "waited_by_day": [0.0] * days}
    return {"key": key, "name": name, "runs": set(), **hours}


def _add(group: dict[str, Any], row: Mapping[str, Any], day: int) -> None:
    group["runs"].add(row["run"])
    group["worker_hours"] += row["worker_s"] / 3600
    group["waited_hours"] += row["waited_s"] / 3600
    group["waited_by_day"][day] += row["waited_s"] / 3600


def _together(groups: Iterable[Mapping[str, Any]], days: int) -> dict[str, Any]:
    """Some groups as one."""
    whole = _group(None, "", days)
    for group in groups:
        whole["runs"] |= group["runs"]
        for hours in ("worker_hours", "waited_hours"):
            whole[hours] += group[hours]
        pairs = zip(whole["waited_by_day"], group["waited_by_day"], strict=True)
        whole["waited_by_day"] = [mine + more for mine, more in pairs]
    return whole


def _nodes(
    listed: Iterable[Mapping[str, Any]], hours: Mapping[str, list[float]], days: int
) -> list[dict[str, Any]]:
    """Nodes that are listed, and those that verdicts named; what held runs up most first."""
    none = [0.0] * days
    made = {
        name: {"node": name, "alive": False, "runs": [], "cordoned": None, "hours": of}
        for name, of in hours.items()
    }
    for node in listed:
        known = {key: node[key] for key in ("alive", "runs", "cordoned")}
        made[node["id"]] = {"node": node["id"], **known, "hours": hours.get(node["id"], none)}
    return sorted(made.values(), key=lambda node: (-sum(node["hours"]), node["node"]))
