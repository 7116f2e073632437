"""Node replacements of a run: step times before and after, and the forecast of the time after."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from paceline.wire import ENDED
from paceline_backend.insight.report import WARMUP_STEPS
from paceline_backend.insight.whatif.answer import NodeForecast, kept
from paceline_backend.store import Connection, attempts, audit, jobs, runs
from paceline_backend.store.nodes import run_nodes
from paceline_backend.store.outcomes import forecasts

# Maximum number of steps over which the step time before and after a replacement is averaged.
REPLACEMENT_STEPS = 100  # steps
# Number of the newest forecasts that are searched for one about the replaced node.
_FORECASTS = 5


def forecast_of(connection: Connection, run: int, node: str, since: int) -> NodeForecast | None:
    """Return the newest forecast about the slow node `node`; None if there is none.

    It forecasts the step time that the run would have if the node were as fast as the others. A
    forecast is ignored if the newest step that it uses is before the step `since`.
    """
    for made in reversed(kept(forecasts.bodies(connection, run, _FORECASTS))):
        slow = made.slow_node
        if slow is not None and slow.node == node and (made.step or 0) >= since:
            return slow
    return None


def before(connection: Connection, run: int, node: str) -> dict[str, Any]:
    """Return a run's state before `node` is replaced, for the audit log."""
    newest = forecasts.newest_step(connection, run)
    placed = attempts.placement(connection, run)
    attempt, since = (-1, 0) if placed is None else (placed.attempt, placed.since)
    first = min(max(since + WARMUP_STEPS, newest - REPLACEMENT_STEPS + 1), max(newest, 0))
    before_s, _ = attempts.mean_time(connection, run, first, newest + 1, REPLACEMENT_STEPS)
    forecast = forecast_of(connection, run, node, since)
    return {
        "attempt": attempt,
        "step": newest,
        "before_s": before_s,
        "forecast_s": None if forecast is None else forecast.step_time_s,
    }


def listed(connection: Connection, run: str) -> list[dict[str, Any]]:
    """Return the node replacements of a run, oldest first, with the step times before and after."""
    key = runs.key_of(connection, run)
    changes, _ = audit.page(connection, audit.ChangeFilter(run, action="run.replace"), limit=500)
    rows = {row["node"]: row for row in run_nodes.listed(connection, key)}
    awaited = jobs.awaited(connection, run)
    listed: list[dict[str, Any]] = []
    # Time of the next replacement of the same node.
    again: dict[str, float] = {}  # Unix time, by node
    for change in changes:
        node = change["details"]["node"]
        made = _replacement(connection, key, change, rows, awaited, again.get(node))
        again[node] = change["at"]
        listed.insert(0, made)
    return listed


def _replacement(
    connection: Connection,
    run: int,
    change: dict[str, Any],
    rows: dict[str, Any],
    awaited: Collection[str],
    again: float | None,
) -> dict[str, Any]:
    details = change["details"]
    node = details["node"]
    other = details["other"] or _given(rows, node, change["at"], again or math.inf)
    later = attempts.placements(connection, run, details["attempt"])
    place = next((k for k, (*_, on) in enumerate(later) if other in on and node not in on), None)
    after_s, after_steps, first = None, 0, None
    if place is not None:
        first = later[place][1]
        end = later[place + 1][1] if place + 1 < len(later) else None
        at = first + WARMUP_STEPS
        after_s, after_steps = attempts.mean_time(connection, run, at, end, REPLACEMENT_STEPS)
    if other is None:
        waits = again is None and node in awaited and rows[node]["state"] not in ENDED
    else:
        waits = other in rows and rows[other]["state"] not in ENDED
    return {
        **{name: change[name] for name in ("at", "who", "why")},
        **{name: details[name] for name in ("node", "step", "before_s", "forecast_s")},
        "other": other,
        "state": "done" if first is not None else "waiting" if waits else "failed",
        "first_step": first,
        "after_s": after_s,
        "after_steps": after_steps,
    }


def _given(rows: dict[str, Any], node: str, since: float, until: float) -> str | None:
    """Return the node that Slurm, Ray or Kubernetes started to replace `node`, or None."""
    mine = [row for row in rows.values() if row["replaces"] == node]
    mine = [row for row in mine if since <= row["launched_at"] < until]
    newest = max(mine, key=lambda row: row["launched_at"], default=None)
    return None if newest is None else str(newest["node"])
