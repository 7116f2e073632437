"""The newest measurements of a run's ranks: what predictors learn from."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import attrgetter

import numpy as np

from paceline.wire import Segment, StepRecord
from paceline_backend.policies import Feedback
from paceline_backend.policies.base import Floats, usable

WINDOW = 64  # A plan may use so many complete steps of feedback.
USABLE = 8  # A rank with samples in fewer of those steps adds older steps, this many in all.
_RECENT = 8  # complete steps whose median is the time of a step
OLDEST = 1024  # No step is older: then the rank's speed counts as unknown, and the rank is tried.

# The fields of a `StepRecord` that are kept of each rank's step.
COLUMNS = (
    *("samples", "load", "compute_s", "squares", "longest", "sync_s", "step_s"),
    "recompiles",
)

_Row = tuple[float, ...]  # values of `COLUMNS`
_VALUES = attrgetter(*COLUMNS)


class Window:
    """The last complete steps' feedback, of one attempt, and of the steps before it.

    A rank that gets few samples, being slow, has few rows that say something about its speed. The
    steps of its last ones stay, so that it is not thought to be as fast as the others.

    Args:
        world: ranks that make a step complete.
        attempt: `add` takes no records of others.
    """

    def __init__(self, world: int, attempt: int) -> None:
        self.world = world
        self.attempt = attempt
        self._rows: dict[int, Floats] = {}  # step → [W, columns]; rows not there yet are NaN
        self._complete: list[int] = []  # ascending, the last `WINDOW`
        self._older: list[int] = []  # ascending, complete, before those
        self._seen = -1  # the latest step of which there was a row
        # The steps, [W, USABLE] with the latest last, in which a rank had samples; -1: fewer.
        self._usable = np.full((world, USABLE), -1)

    def add(self, records: Iterable[StepRecord]) -> None:
        """Takes records in; those seen before change nothing."""
        of_steps: dict[int, dict[int, _Row]] = {}
        for record in records:
            if record.attempt == self.attempt and 0 <= record.rank < self.world:
                of_steps.setdefault(record.step, {}).setdefault(record.rank, _VALUES(record))
        for step, of_ranks in of_steps.items():
            self.put(step, of_ranks)

    def put(self, step: int, of_ranks: Mapping[int, _Row]) -> None:
        """Takes rows of a step in: the values of `COLUMNS` by rank, from 0 to `world` - 1."""
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
        """Takes a whole step in: the values of `COLUMNS`, [W, columns]."""
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
        # Else its other rows are given up.
        return step >= self._seen - 2 * WINDOW or step in self._rows

    def _completed(self, step: int) -> None:
        self._complete = sorted([*self._complete, step])[-WINDOW:]
        samples, load_, compute_s = self._rows[step][:, :3].T
        ranks = usable(samples, load_, compute_s)
        self._usable[ranks, 0] = np.maximum(self._usable[ranks, 0], step)  # over the oldest
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
        """The latest complete step; -1 if there is none."""
        return self._complete[-1] if self._complete else -1

    def step_s(self, segments: Iterable[Segment] = ()) -> float | None:
        """What a step takes at present, in seconds.

        Args:
            segments: the newest, in order. Where ranks shared a segment's batches, its time is
                spread over its steps.
        """
        column = COLUMNS.index("step_s")
        step_s = {s: float(self._rows[s][:, column].mean()) for s in self._complete}
        cut: list[float] = []
        for segment in segments:
            if not segment.pooled:
                continue
            steps = range(segment.first_step, segment.first_step + segment.steps)
            of_segment = [step_s.pop(step) for step in steps if step in step_s]
            # The last step has what ranks took over: without it, or others, the mean is wrong.
            if len(of_segment) == segment.steps:
                step_s.update(dict.fromkeys(steps, statistics.fmean(of_segment)))
            else:
                cut += of_segment
        recent = [step_s[step] for step in sorted(step_s)[-_RECENT:]]
        if recent:
            return statistics.median(recent)
        # The end of a segment and the beginning of the next: about as much as a whole one.
        return statistics.fmean(cut) if cut else None

    def ranges(self) -> list[tuple[int, int]]:
        """The complete steps as half-open ranges, for `Segment.feedback`."""
        merged: list[tuple[int, int]] = []
        for step in [*self._older, *self._complete]:
            if merged and merged[-1][1] == step:
                merged[-1] = (merged[-1][0], step + 1)
            else:
                merged.append((step, step + 1))
        return merged

    def feedback(self) -> Feedback:
        """The rows for the predictor."""
        steps = [*self._older, *self._complete]
        return feedback_of(steps, [self._rows[step] for step in steps])


def feedback_of(steps: list[int], rows: list[Floats]) -> Feedback:
    """Feedback of whole steps, ascending, with the values of `COLUMNS` of each, [W, columns]."""
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
    """Times of whole steps, [F], sorted by (step, rank).

    A step in which a rank compiled code again says nothing about its speed: the rank has no time in
    it. A rank that did so in all of these steps keeps its times.
    """
    compiled = recompiles.reshape(-1, world) > 0
    return np.where((compiled & ~compiled.all(axis=0)).ravel(), 0.0, compute_s)


def single_batches(feedback: Feedback, segments: Iterable[Segment]) -> Feedback:
    """Feedback in which each row with samples is one batch: no row has those of other ranks, too.

    Where ranks share a segment's batches, a rank's last record of a span has all that the rank took
    over. A record of several batches says something else about a rank's speed than a record of one.
    A rank all of whose records in a segment are like this keeps them.

    Nor do wall times of such a segment belong to single steps: each step gets what the work of one
    step takes, by the segment's samples a second. (The feedback may have only some of its records.)

    Args:
        feedback: of complete steps.
        segments: the newest. Rows of other segments stay as they are.
    """
    pooled = [segment for segment in segments if segment.pooled]
    if not pooled:
        return feedback
    keep, step_s = np.ones(len(feedback), bool), feedback.step_s.copy()
    for segment in pooled:
        rows = slice(*np.searchsorted(feedback.step, _range(segment)))
        step, rank = feedback.step[rows] - segment.first_step, feedback.rank[rows]
        counts, samples = np.asarray(segment.counts), feedback.samples[rows]
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


def _range(segment: Segment) -> tuple[int, int]:
    return segment.first_step, segment.first_step + segment.steps
