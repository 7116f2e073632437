"""Overview of all active runs, from their stored verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline_backend.insight import costs, hangs
from paceline_backend.server.prices import Price
from paceline_backend.store import Connection, reads
from paceline_backend.store.fleet import progress, verdicts
from paceline_backend.store.fleet.progress import Running
from paceline_backend.store.fleet.verdicts import Kept
from paceline_backend.store.history import days


def overview(connection: Connection, price: Price | None = None) -> dict[str, Any]:
    """Return active runs by lost time, what they wait for, and the nodes that slow them down.

    The data comes from verdicts that one worker process stores, so a run has none in its first
    seconds. Without a price there are no costs.
    """
    running = progress.running(connection)
    keys = [run.key for run in running]
    kept = verdicts.newest(connection, [run.id for run in running])
    figures, hung = days.figures(connection, keys), hangs.hung_s(connection, keys)
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
    lost = f"{made['lost_workers']:.1f} workers are lost to waiting and slow ranks"
    costliest = held[0]["name"]
    verb = "is" if len(held) == 1 else "are"
    return f"{len(held)} of {total} {verb} slowed down; {lost}. The costliest run is {costliest}."


def _to_watch(runs: Sequence[Mapping[str, Any]]) -> str:
    levels = [run["level"] for run in runs]
    watch, unknown = levels.count("watch"), levels.count("unknown")
    words = f"; {watch} {'has' if watch == 1 else 'have'} a warning" if watch else ""
    return words + (f"; {unknown} without a verdict yet" if unknown else "")
