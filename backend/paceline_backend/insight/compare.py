"""Comparison of runs, or parts of runs: figures with 95 % intervals, model quality, and cost.

Each run, or part of a run, is a side (`Side`) of the comparison. The API calls `read` for each
side, then `differences` and `words`. The intervals come from a bootstrap over blocks of steps,
because consecutive steps may depend on each other. `results` compares model quality, the time to a
target, and cost. These values have no intervals, because each is measured only once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core.errors import InputError
from paceline.policies.base import Floats
from paceline_backend.insight import quality
from paceline_backend.insight.costs import SIMULATED
from paceline_backend.insight.effects import FEWEST_STEPS
from paceline_backend.insight.report import WARMUP_STEPS
from paceline_backend.server.prices import Price
from paceline_backend.store import Connection, Store, attempts, records, runs, switches
from paceline_backend.store.history import days
from paceline_backend.store.quality import evaluations
from paceline_backend.store.quality.evaluations import Evaluated

# Maximum number of steps that are read for a side, the newest ones.
MOST_COMPARED_STEPS = 10_000
_BOOTSTRAPS = 1_000
_SIDE = re.compile(r"([A-Za-z0-9_-]{1,100})(?:@(\d{1,9})|:(\d{0,18})-(\d{0,18}))?")
_METRICS = ("step_s", "samples", "waste", "se", "comm_s", "compute_mean", "ett_error", "dif")

TRAINED_POINTS = 200

_WANTED = ("metric", "value", "direction")
# Keys of the result of `_reached`, each with its unit.
_MET = (("after_s", "s"), ("epoch", ""), ("trained", ""))


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a run, or some of its steps."""

    text: str
    run: str
    key: int
    name: str
    policy: str
    version: int
    # First and last step; None: no bound.
    span: tuple[int | None, int | None]
    steps: Floats  # [K]
    # Metrics of each step, by name; NaN: unknown.
    columns: dict[str, Floats]  # [K] each

    @property
    def whole(self) -> bool:
        """Return whether the side is the whole run."""
        return self.span == (None, None)


@dataclass(frozen=True)
class _Figure:
    name: str
    unit: str
    # Column whose sum is the divisor; None: the divisor is the number of steps.
    divisor: str | None = None
    column: str = ""
    less_is_better: bool | None = None


_FIGURES = (
    _Figure("step_s", "s", column="step_s", less_is_better=True),
    _Figure("samples_per_s", "1/s", divisor="step_s", column="samples", less_is_better=False),
    _Figure("waste", "share", column="waste", less_is_better=True),
    _Figure("se", "", column="se", less_is_better=True),
    _Figure("loss", "", column="loss", less_is_better=True),
    _Figure("compute_mean", "s", column="compute_mean"),
    _Figure("comm_s", "s", column="comm_s", less_is_better=True),
    _Figure("ett_error", "share", column="ett_error", less_is_better=True),
    _Figure("dif", "size", column="dif"),
)


def read(connection: Connection, text: str) -> Side:
    """Parse and read a side: ``RUN``, ``RUN:first-last`` or ``RUN@version``.

    Raises:
        InputError: the text is malformed, or this policy version planned no step.
        UnknownRunError: the run does not exist.
    """
    match = _SIDE.fullmatch(text)
    if match is None:
        raise InputError(f"{text}: give RUN, RUN:100-499 for some steps, or RUN@1 for a version")
    run, version, first, last = match.groups()
    key = runs.key_of(connection, run)
    begins = [
        (change.effective_step or 0, change.version, change.policy)
        for change in switches.history(connection, key)
        if change.version == 0 or change.effective_step is not None
    ]
    span: tuple[int | None, int | None]
    span = (int(first) if first else None, int(last) if last else None)
    if version is not None:
        span = _of_version(begins, int(version), text)
    named = (*_METRICS, "loss")
    table = records.newest_steps(connection, key, named, span, MOST_COMPARED_STEPS)
    columns = dict(zip(named, table[:, 2:].T, strict=True))
    end = float(table[-1, 0]) if len(table) else -1.0
    _, number, policy = max([b for b in begins if b[0] <= end] or [(0, 0, "")])
    columns["trained"] = _trained(connection, key, table, columns["samples"])
    name = runs.name_of(connection, key)
    return Side(text, run, key, name, policy, number, span, table[:, 0], columns)


def _of_version(
    begins: Sequence[tuple[int, int, str]], version: int, text: str
) -> tuple[int, int | None]:
    for at, (first, number, _) in enumerate(begins):
        if number == version:
            end = begins[at + 1][0] - 1 if at + 1 < len(begins) else None
            return first + WARMUP_STEPS, end
    raise InputError(f"{text}: no step was planned by version {version} of the policy")


def _trained(connection: Connection, key: int, table: Floats, samples: Floats) -> Floats:
    if not len(table):
        return np.empty(0)
    before = records.samples_before(connection, key, int(table[0, 0]))
    return before + np.cumsum(samples) - samples


def trained_at(side: Side) -> list[tuple[int, int]]:
    """Return pairs of a step and the number of samples trained before it, ascending.

    There are at most `TRAINED_POINTS` pairs, including the pairs of the first and the last known
    step.
    """
    trained = side.columns["trained"]
    known = np.flatnonzero(np.isfinite(trained))
    if not len(known):
        return []
    shown = np.linspace(0, len(known) - 1, min(len(known), TRAINED_POINTS)).round().astype(int)
    return [(int(side.steps[at]), int(trained[at])) for at in known[shown]]


def differences(sides: Sequence[Side]) -> list[dict[str, Any]]:
    """Return a row for each figure: each side's value, and its change from the first side."""
    return [_row(figure, sides) for figure in _FIGURES]


def _row(figure: _Figure, sides: Sequence[Side]) -> dict[str, Any]:
    base, *others = sides
    return {
        "figure": figure.name,
        "unit": figure.unit,
        "values": [_value(figure, side) for side in sides],
        "changes": [_change(figure, base, other) for other in others],
    }


def _parts(figure: _Figure, side: Side, where: Callable[[Side], Any] | None = None) -> Floats:
    """Return a figure's numerator and denominator in the steps in which both are known, [2, K]."""
    above = side.columns[figure.column]
    below = np.ones(len(above)) if figure.divisor is None else side.columns[figure.divisor]
    known = np.isfinite(above) & np.isfinite(below)
    if where is not None:
        known &= where(side)
    return np.stack([above[known], below[known]])


def _value(figure: _Figure, side: Side) -> float | None:
    above, below = _parts(figure, side).sum(axis=1)
    return float(above / below) if below > 0 else None


def _change(figure: _Figure, base: Side, other: Side) -> dict[str, Any] | None:
    where = _as_far(base, other) if figure.name == "loss" else None
    pair = [_parts(figure, side, where) for side in (base, other)]
    if min(parts.shape[1] for parts in pair) < FEWEST_STEPS:
        return None
    before, after = (float(parts[0].sum() / parts[1].sum()) for parts in pair)
    drawn = [_drawn(parts, seed) for seed, parts in enumerate(pair)]
    low, high = np.quantile(drawn[1] - drawn[0], [0.025, 0.975])
    known = bool(low > 0 or high < 0)
    less = after < before
    judged = known and figure.less_is_better is not None
    return {
        "value": after - before,
        "low": float(low),
        "high": float(high),
        "ratio": after / before - 1 if before else None,
        "known": known,
        "better": (less == figure.less_is_better) if judged else None,
    }


def _as_far(base: Side, other: Side) -> Callable[[Side], Any]:
    """Return a filter for steps whose number of trained samples is in the ranges of both sides."""
    ranges = [side.columns["trained"] for side in (base, other)]
    low = max(values.min(initial=np.inf) for values in ranges)
    high = min(values.max(initial=-np.inf) for values in ranges)
    return lambda side: (side.columns["trained"] >= low) & (side.columns["trained"] <= high)


def _drawn(parts: Floats, seed: int) -> Floats:
    """Return bootstrap samples of a figure, [`_BOOTSTRAPS`], from random blocks of steps."""
    count = parts.shape[1]
    # There are at least four blocks, because there are at least `FEWEST_STEPS` steps.
    length = max(2, round(count ** (1 / 3)))
    sums = np.add.reduceat(parts, np.arange(0, count, length), axis=1)
    blocks = sums.shape[1]
    # A fixed seed gives the same result for the same request.
    rng = np.random.default_rng(seed)
    times = rng.multinomial(blocks, np.full(blocks, 1 / blocks), size=_BOOTSTRAPS)
    above, below = times @ sums[0], times @ sums[1]
    return np.asarray(above / below)


def words(sides: Sequence[Side], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each side except the first, about its time per step."""
    changes = next(row for row in rows if row["figure"] == "step_s")["changes"]
    letters = "ABCDEF"
    said = []
    for letter, change in zip(letters[1:], changes, strict=False):
        if change is None or change["ratio"] is None:
            said.append(f"{letter}: too few steps to compare.")
            continue
        base = change["value"] / change["ratio"] if change["ratio"] else None
        half = 50 * (change["high"] - change["low"]) / base if base else 0.0
        percent = 100 * abs(change["ratio"])
        if not change["known"]:
            said.append(f"{letter}: no clear difference in the time per step.")
        else:
            less = "less" if change["value"] < 0 else "more"
            said.append(f"{letter} takes {percent:.1f} % ± {half:.1f} {less} time per step.")
    return said


def results(store: Store, sides: Sequence[Side], price: Price | None) -> list[dict[str, Any]]:
    """Return rows about metrics, targets and cost, in the form of the rows of `differences`.

    Each row also has `metric` and `target`; both are None for a row about cost. Without a price
    there are no rows about cost.
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
        table.append(_result("last", "", [of[-1] if of else None for of in values], metric=name))
        for kind, choose in quality.choosers(name, targets).items():
            known = [[value for value in of if value is not None] for of in values]
            table.append(
                _result(kind, "", [choose(of) if of else None for of in known], metric=name)
            )
    return table


def _targets(
    store: Store, sides: Sequence[Side], of: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return rows about targets; sides that are only a part of a run have no values."""
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
            table.append(_result(name, unit, values, target=target))
    return table


def _reached(
    store: Store, run: Mapping[str, Any], target: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the time, epoch and number of trained samples at which a run met a target, or None.

    The target's `source` says whether evaluations or the training loss must meet it. The result is
    None if the run has not met the target, or has values from the other source only.
    """
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
    return [_result(name, price.currency, of_sides) for name, of_sides in values.items()]


def _result(
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
        "changes": [_change_of(base, other) for other in others],
    }


def _change_of(before: float | None, after: float | None) -> dict[str, Any] | None:
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
