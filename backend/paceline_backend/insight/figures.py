"""Figures of each active run for monitoring, computed by the same functions as for REST.

A process creates one `Figures` object, because the object caches results of `store.coverage`::

    figures = Figures(store)
    for run in figures.active(): …
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.wire import PLANNED
from paceline.wire.states import UNDER_WAY
from paceline_backend.insight import hangs, workers
from paceline_backend.store import Connection, Store, coverage, reads
from paceline_backend.store import runs as runs_store
from paceline_backend.store.fleet import verdicts
from paceline_backend.store.history import RunFilter

# At most this many active runs are reported, the newest ones, because each run adds about a dozen
# time series to the monitoring system.
MOST_RUNS = 100
_ACTIVE = RunFilter(states=UNDER_WAY)
MEAN_STEPS = 50
# Number of the newest segments that `plan_s` and `coasting` cover.
_SEGMENTS = 8
# Seconds for which a run's `store.coverage.coverage` is cached, because it reads the whole run.
_COVERAGE_S = 60.0
# A request calls `coverage` for at most this many runs; the next requests handle the other runs.
_COVERAGES = 3


@dataclass(frozen=True)
class CauseCost:
    """Cost of all causes of the same kind, over a run's newest steps."""

    kind: str
    # Share of the wall time that the causes cost, summed over the causes.
    share: float
    # Number of ranks that the causes name.
    culprits: int
    # Largest slowdown factor of the causes; None: no cause of this kind slows computing down.
    factor: float | None


@dataclass(frozen=True)
class MonitoredRun:
    """Figures of an active run; a figure is None while it is not known."""

    run: str
    backend: str
    # Totals over all complete steps; see `store.history.days.figures`.
    totals: Mapping[str, Any] | None
    step: int | None
    epoch: int | None
    records_lost: int
    # Means over the last `MEAN_STEPS` steps.
    step_s: float | None
    se: float | None
    waste: float | None
    # Rank that was most often the slowest in computing, and the share of steps in which it was the
    # slowest.
    slowest_rank: int | None
    slowest_share: float | None
    # Mean time that controllers took to plan one of the newest segments.
    plan_s: float | None
    # Share of the newest segments that the leader planned itself.
    coasting: float | None
    # Time for which ranks have waited for ranks that make no progress; 0: no hang.
    hung_s: float
    # True if each sample of each epoch has been used exactly once so far.
    coverage_exact: bool | None
    samples_dropped: int | None
    # Costs by kind of cause, from the newest stored verdict.
    costs: tuple[CauseCost, ...]


class Figures:
    """Reader of the figures of active runs. Thread-safe."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        # Time and result of the last call of `store.coverage.coverage`, by run.
        self._coverage: dict[str, tuple[float, dict[str, Any]]] = {}

    def active(self) -> list[MonitoredRun]:
        """Return the figures of the newest active runs."""
        rows, _ = runs_store.page(self._store, _ACTIVE, limit=MOST_RUNS)
        names = [row["id"] for row in rows]
        with self._lock, self._store.read() as connection:
            self._refresh(connection, names)
            judged = verdicts.newest(connection, names)
            return [self._figures(connection, row, judged.get(row["id"])) for row in rows]

    def _refresh(self, connection: Connection, names: Sequence[str]) -> None:
        known = self._coverage = {run: read for run, read in self._coverage.items() if run in names}
        at = {run: known[run][0] if run in known else float("-inf") for run in names}
        due = (run for run in names if at[run] <= self._clock() - _COVERAGE_S)
        for run in sorted(due, key=lambda run: at[run])[:_COVERAGES]:
            key = runs_store.key_of(connection, run)
            known[run] = (self._clock(), coverage.coverage(connection, key))

    def _figures(
        self, connection: Connection, row: dict[str, Any], judged: verdicts.Kept | None
    ) -> MonitoredRun:
        key = runs_store.key_of(connection, row["id"])
        last = row["step"]
        span = (0, -1) if last is None else (max(0, last - MEAN_STEPS + 1), last)
        steps = reads.step_columns(connection, key, span, MEAN_STEPS)
        ranks = workers.summary(connection, key, MEAN_STEPS, None)
        slowest = max(ranks, key=lambda rank: rank["slowest_share"], default=None)
        segments = reads.segment_rows(connection, key, (None, None), _SEGMENTS)
        hang = hangs.look(connection, key)
        covered = self._coverage.get(row["id"], (0.0, {}))[1]
        return MonitoredRun(
            run=row["id"],
            backend=row["backend"],
            totals=row["figures"],
            step=last,
            epoch=row["epoch"],
            records_lost=row["dropped"],
            step_s=_mean(steps["step_s"]),
            se=_mean(steps["se"]),
            waste=_mean(steps["waste"]),
            slowest_rank=slowest["rank"] if slowest else None,
            slowest_share=slowest["slowest_share"] if slowest else None,
            plan_s=_mean([each["plan_s"] for each in segments if each["source"] in PLANNED]),
            coasting=_mean([float(each["source"] == "coast") for each in segments]),
            hung_s=hang.since_s if hang.hung else 0.0,
            coverage_exact=covered["exact"] if covered.get("epochs") else None,
            samples_dropped=covered.get("dropped"),
            costs=costs(judged.body) if judged else (),
        )


def costs(facts: Mapping[str, Any]) -> tuple[CauseCost, ...]:
    """Return the costs of a verdict's active causes by kind; `facts` come from `facts_of`."""
    going = [cause for cause in facts["causes"] if cause["until"] is None]
    made = []
    for kind in sorted({cause["kind"] for cause in going}):
        alike = [cause for cause in going if cause["kind"] == kind]
        culprits = {rank for cause in alike for rank in cause["ranks"]}
        factors = [cause["factor"] for cause in alike if cause["factor"] is not None]
        share = sum(cause["share"] for cause in alike)
        made.append(CauseCost(kind, share, len(culprits), max(factors, default=None)))
    return tuple(made)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
