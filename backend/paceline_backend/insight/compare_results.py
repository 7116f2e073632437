"""Comparison of results: model quality, time to a target, and cost.

An evaluation is measured only once, so differences of these rows have no intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline_backend.insight import quality
from paceline_backend.insight.compare import Side
from paceline_backend.insight.costs import SIMULATED
from paceline_backend.server.prices import Price
from paceline_backend.store import Connection, Store, attempts, runs
from paceline_backend.store.history import days
from paceline_backend.store.quality import evaluations
from paceline_backend.store.quality.evaluations import Evaluated

_WANTED = ("metric", "value", "direction")
# These fields describe when a target was met.
_MET = (("after_s", "s"), ("epoch", ""), ("trained", ""))


def rows(store: Store, sides: Sequence[Side], price: Price | None) -> list[dict[str, Any]]:
    """Return rows like those of `compare.differences`, each with its `metric` or `target`.

    Without a price there are no rows about cost.
    """
    of = {name: runs.get(store, name) for name in dict.fromkeys(side.run for side in sides)}
    with store.read() as connection:
        measured = [_evaluations(connection, side, of[side.run]) for side in sides]
        spent = [] if price is None else _costs(connection, sides, of, price)
    targets = [run["target"] for run in of.values() if run["target"] is not None]
    return [*_metrics(measured, targets), *_targets(store, sides, of), *spent]


def _evaluations(connection: Connection, side: Side, run: Mapping[str, Any]) -> list[Evaluated]:
    spans = attempts.spans(connection, side.key, run["attempt"])
    first, last = side.span
    seen = evaluations.read(connection, side.key, spans, since=first if first else -1)
    return quality.between(seen, first or 0, None if last is None else last + 1)


def _metrics(
    measured: Sequence[Sequence[Evaluated]], targets: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    table = []
    for name in sorted({name for seen in measured for each in seen for name in each.metrics}):
        values = [
            [each.metrics[name] for each in seen if name in each.metrics] for seen in measured
        ]
        table.append(_row("last", "", [of[-1] if of else None for of in values], metric=name))
        for kind, choose in quality.choosers(name, targets).items():
            known = [[value for value in of if value is not None] for of in values]
            table.append(_row(kind, "", [choose(of) if of else None for of in known], metric=name))
    return table


def _targets(
    store: Store, sides: Sequence[Side], of: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return when whole runs met targets; the time to a target starts at a run's start."""
    whole = list(dict.fromkeys(side.run for side in sides if side.whole))
    wanted: dict[tuple[Any, ...], dict[str, Any]] = {}
    for own in (of[run]["target"] for run in whole):
        if own is not None:
            named = {name: own[name] for name in (*_WANTED, "source")}
            wanted.setdefault(tuple(named[name] for name in _WANTED), named)
    table = []
    for target in wanted.values():
        reached = {run: _reached(store, of[run], target) for run in whole}
        met = [reached[side.run] if side.whole else None for side in sides]
        for name, unit in _MET:
            values = [None if each is None else each[name] for each in met]
            table.append(_row(name, unit, values, target=target))
    return table


def _reached(
    store: Store, run: Mapping[str, Any], target: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return when values of the target's `source` met it; None if they have not."""
    own = run["target"]
    if own is None or any(own[name] != target[name] for name in _WANTED):
        own = runs.against(store, run["id"], {name: target[name] for name in _WANTED})
    met: dict[str, Any] | None = own["met"] if own["source"] == target["source"] else None
    return met


def _costs(
    connection: Connection,
    sides: Sequence[Side],
    of: Mapping[str, dict[str, Any]],
    price: Price,
) -> list[dict[str, Any]]:
    values: dict[str, list[float | None]] = {"cost": [], "waited_cost": []}
    for side in sides:
        times = days.spent(connection, side.key, side.span)
        known = len(side.steps) > 0 and of[side.run]["backend"] != SIMULATED
        for name, time_s in zip(values, times, strict=True):
            values[name].append(price.of_time(time_s) if known else None)
    return [_row(name, price.currency, of_sides) for name, of_sides in values.items()]


def _row(
    figure: str,
    unit: str,
    values: Sequence[float | None],
    *,
    metric: str | None = None,
    target: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    base, *others = values
    return {
        "figure": figure,
        "unit": unit,
        "metric": metric,
        "target": target,
        "values": list(values),
        "changes": [_change(base, other) for other in others],
    }


def _change(before: float | None, after: float | None) -> dict[str, Any] | None:
    if before is None or after is None:
        return None
    return {
        "value": after - before,
        "low": None,
        "high": None,
        "ratio": after / before - 1 if before else None,
        "known": False,
        "better": None,
    }
