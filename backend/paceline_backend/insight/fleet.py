"""Verdicts over all runs: the runs that lose most time, the causes, and the slow nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from paceline_backend.insight import costs, hangs
from paceline_backend.insight.verdict import facts_of, judge, read_observed
from paceline_backend.server.prices import Price
from paceline_backend.store import Connection, Store, attempts, audit, nodes, reads
from paceline_backend.store.fleet import progress, verdicts
from paceline_backend.store.fleet.progress import Running
from paceline_backend.store.fleet.verdicts import Kept, NamedNodes
from paceline_backend.store.history import days as run_days
from paceline_backend.store.history import labels

# Kinds of causes that originate on a node.
OF_NODES = ("node", "transient", "periodic", "input")

By = Literal["owner", "tag", "run"]

_MOST_GROUPS = 100
_SUMS = ("worker_hours", "waited_hours", "cost", "waited_cost")


def overview(connection: Connection, price: Price | None = None) -> dict[str, Any]:
    """Return the active runs, the causes of their waits, and the nodes that slow them down.

    Runs and nodes are sorted by the time that is lost, most first. The verdicts are read from the
    database, where a worker process stores them every few seconds, so a run has no verdict in its
    first seconds.
    """
    running = progress.running(connection)
    keys = [run.key for run in running]
    kept = verdicts.newest(connection, [run.id for run in running])
    figures, hung = run_days.figures(connection, keys), hangs.hung_s(connection, keys)
    runs = [
        _run(run, kept.get(run.id), figures.get(run.key), price)
        | {"hung_s": hung.get(run.key, 0.0), "coasting": _coasts(connection, run)}
        for run in running
    ]
    runs.sort(key=lambda run: -run["lost_workers"])
    going = {run["run"]: [c for c in run["causes"] if c["until"] is None] for run in runs}
    made = {
        "runs": runs,
        "waits": _waits(runs, going),
        "nodes": _nodes(kept.values()),
        "workers": sum(run["workers"] for run in runs),
        "waiting_workers": sum(run["waste"] * run["workers"] for run in runs),
        "lost_workers": sum(run["lost_workers"] for run in runs),
        "waited_hours": sum(run["waited_hours"] for run in runs),
        "waited_cost": sum(run["waited_cost"] for run in runs),
        "currency": None if price is None else price.currency,
    }
    return made | {"words": _words(made)}


def _run(
    run: Running, kept: Kept | None, figures: Mapping[str, Any] | None, price: Price | None
) -> dict[str, Any]:
    facts: Mapping[str, Any] = {} if kept is None else kept.body
    cost = costs.of_run(figures, run.backend, price) or {"amount": 0.0, "waited": 0.0}
    waited_s = 0.0 if figures is None or run.backend == costs.SIMULATED else figures["waited_s"]
    workers = run.world or 0
    lost = facts.get("lost_now", 0.0)
    return {
        "run": run.id,
        "name": run.name,
        "policy": run.policy,
        "step": None if run.step < 0 else run.step,
        "workers": workers,
        "at": None if kept is None else kept.until,
        "level": facts.get("level", "unknown"),
        "what": facts.get("what", ""),
        "waste": facts.get("waste_now", 0.0),
        "share": lost,
        "lost_workers": lost * workers,
        "waited_hours": waited_s / 3600,
        "cost": cost["amount"],
        "waited_cost": cost["waited"],
        "causes": list(facts.get("causes", ())),
    }


def _coasts(connection: Connection, run: Running) -> bool:
    newest = reads.segment_rows(connection, run.key, (None, None), 1)
    return run.backend != "simulated" and any(row["source"] == "coast" for row in newest)


def _waits(
    runs: Sequence[Mapping[str, Any]], going: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    waits: dict[str, dict[str, Any]] = {}
    for run in runs:
        for cause in going[run["run"]]:
            empty = {"kind": cause["kind"], "runs": [], "lost_workers": 0.0}
            kind = waits.setdefault(cause["kind"], empty)
            kind["runs"] = sorted({*kind["runs"], run["run"]})
            kind["lost_workers"] += cause["share"] * run["workers"]
    return sorted(waits.values(), key=lambda kind: -kind["lost_workers"])


def _nodes(kept: Iterable[Kept]) -> list[dict[str, Any]]:
    nodes: dict[str, dict[str, Any]] = {}
    for each in kept:
        for name, held in each.nodes.items():
            node = nodes.setdefault(name, {"node": name, "lost_workers": 0.0, "runs": []})
            node["lost_workers"] += held["share"] * each.workers
            facts = {key: held[key] for key in ("ranks", "kinds", "factor")}
            node["runs"].append({"run": each.run, **facts})
    return sorted(nodes.values(), key=lambda node: -node["lost_workers"])


def _words(made: Mapping[str, Any]) -> str:
    runs = made["runs"]
    if not runs:
        return "No run is training."
    held = [run for run in runs if run["level"] == "held-up"]
    total = f"{len(runs)} run{'s' * (len(runs) > 1)} on {made['workers']:,} workers"
    hung = [run for run in runs if run["hung_s"]]
    if hung:
        verb = "hangs" if len(hung) == 1 else "hang"
        also = f" {len(held)} {'is' if len(held) == 1 else 'are'} slowed down." if held else ""
        return f"{len(hung)} of {total} {verb}: {', '.join(r['name'] for r in hung[:3])}.{also}"
    if not held:
        return f"Nothing slows down {total}{_to_watch(runs)}."
    lost = f"waiting and slow ranks cost the time of {made['lost_workers']:.1f} workers"
    costliest = held[0]["name"]
    verb = "is" if len(held) == 1 else "are"
    return f"{len(held)} of {total} {verb} slowed down; {lost}. The costliest run is {costliest}."


def _to_watch(runs: Sequence[Mapping[str, Any]]) -> str:
    levels = [run["level"] for run in runs]
    watch, unknown = levels.count("watch"), levels.count("unknown")
    words = f"; {watch} {'has' if watch == 1 else 'have'} a warning" if watch else ""
    return words + (f"; {unknown} without a verdict yet" if unknown else "")


def judged(store: Store, run: Running, at: float) -> Kept | None:
    """Return the verdict over a run's newest steps; None if there are too few steps.

    No database connection is held while the verdict is computed. `at` is the current time of the
    database's clock.
    """
    with store.read() as connection:
        placement = attempts.placement(connection, run.key)
        seen = read_observed(connection, run.key, (None, None), placement)
    facts = facts_of(judge(seen))
    if facts["from"] is None or not facts["wall_s"]:
        return None
    going = [cause for cause in facts["causes"] if cause["until"] is None]
    return Kept(
        run=run.id,
        at=at,
        until=at,
        workers=seen.compute_s.shape[1],
        nodes=_by_node(going, seen.nodes or [run.node or ""] * seen.compute_s.shape[1]),
        body=facts,
    )


def _by_node(going: list[dict[str, Any]], placement: Sequence[str]) -> dict[str, dict[str, Any]]:
    held: dict[str, dict[str, Any]] = {}
    for cause in going:
        if cause["kind"] not in OF_NODES:
            continue
        for node in sorted({placement[rank] for rank in cause["ranks"]} - {""}):
            here = held.setdefault(node, {"ranks": [], "kinds": [], "share": 0.0, "factor": None})
            ranks = [rank for rank in cause["ranks"] if placement[rank] == node]
            here["ranks"] = sorted({*here["ranks"], *ranks})
            here["kinds"] = sorted({*here["kinds"], cause["kind"]})
            here["share"] += cause["share"] * len(ranks) / len(cause["ranks"])
            factors = [here["factor"], cause["factor"]]
            here["factor"] = max((each for each in factors if each is not None), default=None)
    return held


def record(
    connection: Connection, days: int, by: By, now: float, price: Price | None = None
) -> dict[str, Any]:
    """Return each node's slow hours by day, and the cost of waiting in the last `days` by group.

    A node's slow hours are those in which a verdict named the node. `by` is the kind of group:
    owner, tag or run. The last of the `days` is today (UTC).
    """
    last = int(now // run_days.DAY_S)
    first = last - days + 1
    kept = verdicts.between(connection, first * run_days.DAY_S, now)
    return {
        "first_day": first * run_days.DAY_S,
        "currency": None if price is None else price.currency,
        "groups": _groups(_spent(connection, first, last, price), by),
        "nodes": _nodes_by_day(nodes.listed(connection), straggling(kept, first, days), days),
    }


def _spent(
    connection: Connection, first: int, last: int, price: Price | None
) -> list[dict[str, Any]]:
    summed = run_days.of_runs(connection, [], first, last)
    rows = [row for row in summed if row["backend"] != costs.SIMULATED]
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
    """Return, by node, the number of hours on each day in which a verdict named the node.

    Time in which the verdicts of several runs name a node counts only once. `first` is the first
    day, counted from 1970-01-01, and `days` is the number of days.
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
    """Sum rows up by group, and return the groups, the group with the most waiting hours first.

    At most `_MOST_GROUPS` groups are returned. If there are more, the last returned group, with the
    key None, combines all groups that are not returned.
    """
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


def _nodes_by_day(
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
