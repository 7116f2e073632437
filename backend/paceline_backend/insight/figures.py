"""What monitoring wants to know of each run, from the same reads as REST.

figures = Figures(store)       # one for a process: it remembers coverage
for run in figures.active(): …
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline_backend.insight import hangs, workers
from paceline_backend.store import Connection, Store, coverage, reads
from paceline_backend.store import runs as runs_store
from paceline_backend.store.fleet import verdicts
from paceline_backend.store.history import RunFilter

MOST_RUNS = 100  # the newest active ones: each has about a dozen series in the monitoring
_ACTIVE = RunFilter(states=("starting", "running"))
STEPS = 50  # means are of the last so many complete steps
_SEGMENTS = 8  # that planning times are a mean of
_COVERAGE_S = 60.0  # coverage reads the whole run, and so is remembered for a while
_COVERAGES = 3  # that are computed for one answer; other runs' are computed for the next ones


@dataclass(frozen=True)
class CauseCost:
    """What the causes of one kind cost a run, of its newest steps."""

    kind: str
    share: float  # of the wall time, the sum over the causes of the kind
    culprits: int  # ranks that they name
    factor: float | None  # the greatest of these ranks; None: no rank is slower


@dataclass(frozen=True)
class MonitoredRun:
    """An active run; None is what is not known yet."""

    run: str
    backend: str
    totals: Mapping[str, Any] | None  # over all complete steps; `store.history.days.figures`
    step: int | None  # last complete one
    epoch: int | None
    records_lost: int
    step_s: float | None  # means over the last `STEPS`
    se: float | None
    waste: float | None
    slowest_rank: int | None  # most often the last to finish a step's computing
    slowest_share: float | None  # of the steps it was the last in
    plan_s: float | None  # that controllers took to plan a segment
    coasting: float | None  # share of the newest segments that the leader planned itself
    hung_s: float  # so long ranks wait for ranks that do nothing; 0: they do not
    coverage_exact: bool | None  # each sample of each epoch was used once so far
    samples_dropped: int | None
    costs: tuple[CauseCost, ...]  # by kind of cause, as the newest kept verdict has them


class Figures:
    """Reads the figures of all active runs. Thread-safe.

    Args:
        store: the database.
        clock: monotonic time in seconds.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._coverage: dict[str, tuple[float, dict[str, Any]]] = {}  # run → when read, and what

    def active(self) -> list[MonitoredRun]:
        """The newest active runs.

        Raises:
            StoreError: the database did not answer.
        """
        rows, _ = runs_store.page(self._store, _ACTIVE, limit=MOST_RUNS)
        names = [row["id"] for row in rows]
        with self._lock, self._store.read() as connection:
            self._refresh(connection, names)
            judged = verdicts.newest(connection, names)
            return [self._figures(connection, row, judged.get(row["id"])) for row in rows]

    def _refresh(self, connection: Connection, names: Sequence[str]) -> None:
        """Computes the coverage of some runs again: those whose figures are oldest."""
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
        span = (0, -1) if last is None else (max(0, last - STEPS + 1), last)
        steps = reads.step_columns(connection, key, span, STEPS)
        ranks = workers.summary(connection, key, STEPS, None)
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
            plan_s=_mean([each["plan_s"] for each in segments if each["source"] == "controller"]),
            coasting=_mean([float(each["source"] == "coast") for each in segments]),
            hung_s=hang.since_s if hang.hung else 0.0,
            coverage_exact=covered["exact"] if covered.get("epochs") else None,
            samples_dropped=covered.get("dropped"),
            costs=costs(judged.body) if judged else (),
        )


def costs(facts: Mapping[str, Any]) -> tuple[CauseCost, ...]:
    """What causes that go on cost, by kind in order; what has passed does not count.

    Args:
        facts: a verdict as `insight.verdict.facts_of` gives it.
    """
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
