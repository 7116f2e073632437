"""What the sides of a comparison came to: their models' quality, time to a target, and money.

An evaluation is measured once, so differences of these rows have no intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline_backend.insight import quality
from paceline_backend.insight.compare import Side
from paceline_backend.server.prices import Price
from paceline_backend.store import Connection, Store, attempts, runs
from paceline_backend.store.fleet import costs
from paceline_backend.store.fleet.costs import Spent
from paceline_backend.store.quality import evaluations
from paceline_backend.store.quality.evaluations import Evaluated

_WANTED = ("metric", "value", "direction")
_MET = (("after_s", "s"), ("epoch", ""), ("trained", ""))  # fields of when a target was met
_MOST_ROWS = 1_000_000  # ranks' steps of a part of a run, whose cost is added up when it is asked


def rows(store: Store, sides: Sequence[Side], default: Price | None) -> list[dict[str, Any]]:
    """Rows as those of `compare.differences`, each with the `metric` or the `target` it is about.

    Args:
        store: the database.
        sides: of the comparison.
        default: price of nodes whose type has none.

    Raises:
        UnknownRunError: a run is gone.
        StoreError: the database does not answer.
    """
    of = {name: runs.get(store, name) for name in dict.fromkeys(side.run for side in sides)}
    with store.read() as connection:
        measured = [_evaluations(connection, side, of[side.run]) for side in sides]
        spent = _costs(connection, sides, of, default)
    targets = [run["target"] for run in of.values() if run["target"] is not None]
    return [*_metrics(measured, targets), *_targets(store, sides, of), *spent]


def _evaluations(connection: Connection, side: Side, run: Mapping[str, Any]) -> list[Evaluated]:
    """Those after steps of a side, oldest first."""
    spans = attempts.spans(connection, side.key, run["attempt"])
    first, last = side.span
    seen = evaluations.read(connection, side.key, spans, since=first if first else -1)
    return quality.between(seen, first or 0, None if last is None else last + 1)


def _metrics(
    measured: Sequence[Sequence[Evaluated]], targets: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The last value of each metric, and its best one, or its least and greatest one."""
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
    """When each whole run met the targets of all whole runs: the time goes from a run's begin."""
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
    """When a run met a target by the same kind of values; None: it has not, or has none of them."""
    own = run["target"]
    if own is None or any(own[name] != target[name] for name in _WANTED):
        own = runs.against(store, run["id"], {name: target[name] for name in _WANTED})
    met: dict[str, Any] | None = own["met"] if own["source"] == target["source"] else None
    return met


def _costs(
    connection: Connection,
    sides: Sequence[Side],
    of: Mapping[str, dict[str, Any]],
    default: Price | None,
) -> list[dict[str, Any]]:
    """What the steps of each side cost; a side with time that has no price is left out."""
    currency = costs.currency(connection, default)
    if currency is None:
        return []
    whole = costs.of_runs(connection, {side.run for side in sides if side.whole}, default)
    spent = [
        whole.get(side.run, Spent()) if side.whole else _of_part(connection, side, of, default)
        for side in sides
    ]
    priced = [each if each.worker_s > 0 and not each.unpriced_s else None for each in spent]
    return [
        _row(name, currency, [None if each is None else getattr(each, name) for each in priced])
        for name in ("cost", "waited_cost")
    ]


def _of_part(
    connection: Connection, side: Side, of: Mapping[str, dict[str, Any]], default: Price | None
) -> Spent:
    ranks = of[side.run]["world"] or 1
    if not len(side.steps) or len(side.steps) * ranks > _MOST_ROWS:
        return Spent()
    first, last = int(side.steps[0]), int(side.steps[-1])
    return costs.of_steps(connection, side.key, first, last, default)


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
    """A difference that nobody knows the interval of."""
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
