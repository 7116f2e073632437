"""Newest measurements of a run's ranks, from which predictors learn.

Planners, `store.planning.load` and the simulator put records into a `Window`.
`planning.offer` passes the feedback of the window's complete steps to the policy.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import attrgetter

import numpy as np

from paceline.policies import Feedback
from paceline.policies.base import Floats, usable
from paceline.wire import Plan, StepRecord

# Maximum number of complete steps whose feedback a plan uses.
WINDOW = 64
# For each rank, the window keeps this many steps in which the rank had samples, if there are so
# many. If a rank had samples in fewer of the newest `WINDOW` complete steps, older steps are kept
# in addition.
USABLE = 8
# `Window.step_s` is the median over this many of the newest complete steps.
_RECENT_STEPS = 8
# Maximum age of a step in the window. If all steps in which a rank had samples are older, its speed
# counts as unknown, so that the rank gets samples again.
OLDEST = 1024  # steps

# The fields of a `StepRecord` that the window keeps for each rank's step.
COLUMNS = (
    *("samples", "load", "compute_s", "squares", "longest", "sync_s", "step_s"),
    "recompiles",
)

# Values of a rank's step, in the order of `COLUMNS`.
_Row = tuple[float, ...]
_VALUES = attrgetter(*COLUMNS)


class Window:
    """Feedback of an attempt: its last complete steps, and older steps of ranks with few samples.

    A slow rank that gets few samples has few rows that show its speed. The window keeps the last
    steps in which the rank had samples, so that a predictor can still estimate its speed. A step is
    complete when the records of all `world` ranks have arrived. `add` accepts only records of
    `attempt`.
    """

    def __init__(self, world: int, attempt: int) -> None:
        self.world = world
        self.attempt = attempt
        # Rows of each step, [ranks, columns]; NaN for ranks whose row has not arrived.
        self._rows: dict[int, Floats] = {}
        # The last `WINDOW` complete steps, ascending.
        self._complete: list[int] = []
        # Older complete steps, which are kept for ranks with few samples, ascending.
        self._older: list[int] = []
        # The latest step for which a row arrived.
        self._seen = -1
        # The last steps in which each rank had samples, [ranks, USABLE], ascending; -1: there are
        # fewer than `USABLE` steps.
        self._usable = np.full((world, USABLE), -1)

    def add(self, records: Iterable[StepRecord]) -> None:
        """Add the records of `attempt`. Records that the window already has are ignored."""
        of_steps: dict[int, dict[int, _Row]] = {}
        for record in records:
            if record.attempt == self.attempt and 0 <= record.rank < self.world:
                of_steps.setdefault(record.step, {}).setdefault(record.rank, _VALUES(record))
        for step, of_ranks in of_steps.items():
            self.put(step, of_ranks)

    def put(self, step: int, of_ranks: Mapping[int, _Row]) -> None:
        """Add rows of a step; `of_ranks` has the values of `COLUMNS` by rank, 0 to `world` - 1."""
        if step < 0 or not self._wanted(step):
            return
        rows = self._rows.get(step)
        if rows is None:
            rows = self._rows[step] = np.full((self.world, len(COLUMNS)), np.nan)
        ranks = np.fromiter(of_ranks, np.int64, len(of_ranks))
        new = np.isnan(rows[ranks, 0])
        if new.any():
            rows[ranks[new]] = np.array(list(of_ranks.values()))[new]
            if not np.isnan(rows[:, 0]).any():
                self._completed(step)

    def put_step(self, step: int, rows: Floats) -> None:
        """Add a complete step; `rows` has each rank's values of `COLUMNS`, [ranks, columns]."""
        if self._wanted(step) and step not in self._complete:
            self._rows[step] = rows
            self._completed(step)

    def _wanted(self, step: int) -> bool:
        if len(self._complete) == WINDOW and step < self._complete[0]:
            return False
        if step > self._seen:
            self._seen = step
            self._forget()
            return True
        # Rows of much older steps are accepted only if the window still keeps the step.
        return step >= self._seen - 2 * WINDOW or step in self._rows

    def _completed(self, step: int) -> None:
        self._complete = sorted([*self._complete, step])[-WINDOW:]
        samples, load_, compute_s = self._rows[step][:, :3].T
        ranks = usable(samples, load_, compute_s)
        # `step` replaces the oldest usable step of each of `ranks`, unless `step` is older.
        self._usable[ranks, 0] = np.maximum(self._usable[ranks, 0], step)
        self._usable[ranks] = np.sort(self._usable[ranks], axis=1)
        self._forget()

    def _forget(self) -> None:
        first = self._complete[0] if self._complete else 0
        oldest, since = self.newest - OLDEST, self._seen - 2 * WINDOW
        if len(self._complete) == WINDOW:
            since = max(since, first)
        kept = self._usable[(self._usable > oldest) & (self._usable < first)]
        self._older = np.unique(kept[kept >= 0]).tolist()
        keep = {*self._older, *self._complete}
        if any(s not in keep and s < since for s in self._rows):
            self._rows = {s: r for s, r in self._rows.items() if s in keep or s >= since}

    @property
    def newest(self) -> int:
        """The latest complete step; -1 if no step is complete."""
        return self._complete[-1] if self._complete else -1

    def step_s(self, segments: Iterable[Plan] = ()) -> float | None:
        """Return the present duration of a step in seconds; None before the first complete step.

        `segments` are the newest segments, ascending. Where ranks shared a segment's batches, the
        segment's time is spread evenly over its steps.
        """
        column = COLUMNS.index("step_s")
        step_s = {s: float(self._rows[s][:, column].mean()) for s in self._complete}
        cut: list[float] = []
        for plan in segments:
            if not plan.pooled:
                continue
            steps = range(plan.first_step, plan.first_step + plan.steps)
            of_segment = [step_s.pop(step) for step in steps if step in step_s]
            # The last step's record includes all batches that ranks took over from each other, so
            # the mean is right only if all steps of the segment have arrived.
            if len(of_segment) == plan.steps:
                step_s.update(dict.fromkeys(steps, statistics.fmean(of_segment)))
            else:
                cut += of_segment
        recent = [step_s[step] for step in sorted(step_s)[-_RECENT_STEPS:]]
        if recent:
            return statistics.median(recent)
        # For no segment have all steps arrived. The end of one segment and the start of the next
        # together take about as long as a whole segment, so use the mean over their steps.
        return statistics.fmean(cut) if cut else None

    def ranges(self) -> list[tuple[int, int]]:
        """Return the steps of the feedback as half-open ranges, for `Plan.feedback`."""
        merged: list[tuple[int, int]] = []
        for step in [*self._older, *self._complete]:
            if merged and merged[-1][1] == step:
                merged[-1] = (merged[-1][0], step + 1)
            else:
                merged.append((step, step + 1))
        return merged

    def feedback(self) -> Feedback:
        """Return the rows of all complete steps in the window, from which predictors learn."""
        steps = [*self._older, *self._complete]
        return feedback_of(steps, [self._rows[step] for step in steps])


def feedback_of(steps: list[int], rows: list[Floats]) -> Feedback:
    """Build feedback from steps, ascending, and the rows of each step.

    The rows of a step are the values of `COLUMNS` of each rank, [ranks, columns].
    """
    if not steps:
        return Feedback.empty()
    world = len(rows[0])
    table = dict(zip(COLUMNS, np.concatenate(rows).T, strict=True))
    return Feedback(
        step=np.repeat(np.array(steps, np.int64), world),
        rank=np.tile(np.arange(world), len(steps)),
        samples=table["samples"].astype(np.int64),
        load=table["load"],
        compute_s=without_recompiles(table["compute_s"], table["recompiles"], world),
        squares=table["squares"],
        longest=table["longest"],
        sync_s=table["sync_s"],
        step_s=table["step_s"],
    )


def without_recompiles(compute_s: Floats, recompiles: Floats, world: int) -> Floats:
    """Return the compute times in seconds, with 0 for the steps in which a rank recompiled.

    A step in which a rank compiled code again shows nothing about the rank's speed. A rank that
    recompiled in all given steps keeps its times. `compute_s` and `recompiles`, the number of
    recompilations, have a value for each step and each of its `world` ranks, in this order.
    """
    compiled = recompiles.reshape(-1, world) > 0
    return np.where((compiled & ~compiled.all(axis=0)).ravel(), 0.0, compute_s)


def single_batches(feedback: Feedback, segments: Iterable[Plan]) -> Feedback:
    """Return feedback without rows that mix a rank's batch with batches of other ranks.

    Where ranks share a segment's batches, a rank reports all batches that it took over in one
    record: its last record before the ranks exchange data. A record of several batches measures
    another speed than a record of one batch, so this function drops it. If a rank has only records
    of several batches in a segment, the rank keeps them.

    The wall times of a segment whose batches are shared do not belong to single steps either. So
    each step gets the segment's mean time per step, computed from its rate in samples per second,
    even if the feedback has only some of the segment's records. Rows of segments that are not in
    `segments` stay as they are.
    """
    pooled = [plan for plan in segments if plan.pooled]
    if not pooled:
        return feedback
    keep, step_s = np.ones(len(feedback), bool), feedback.step_s.copy()
    for plan in pooled:
        rows = slice(*np.searchsorted(feedback.step, _range(plan)))
        step, rank = feedback.step[rows] - plan.first_step, feedback.rank[rows]
        counts, samples = np.asarray(plan.counts), feedback.samples[rows]
        single = samples == counts[step, rank]
        trained = rank[single & (samples > 0)]
        keep[rows] = single | ~np.isin(rank, trained)
        if of_all := samples.sum():
            step_s[rows] = step_s[rows].sum() / of_all * counts.mean()
        else:
            step_s[rows] = np.nan
    return replace(
        feedback,
        samples=np.where(keep, feedback.samples, 0),
        load=np.where(keep, feedback.load, 0.0),
        compute_s=np.where(keep, feedback.compute_s, 0.0),
        squares=np.where(keep, feedback.squares, 0.0),
        longest=np.where(keep, feedback.longest, 0.0),
        step_s=step_s,
    )


def _range(plan: Plan) -> tuple[int, int]:
    return plan.first_step, plan.first_step + plan.steps
