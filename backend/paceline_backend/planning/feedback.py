"""The newest measurements of a run's ranks: what predictors learn from."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from operator import attrgetter

import numpy as np

from paceline.wire import StepRecord
from paceline_backend.policies import Feedback
from paceline_backend.policies.base import Floats, usable

WINDOW = 64  # A plan may use so many complete steps of feedback.
USABLE = 8  # A rank with samples in fewer of those steps adds older steps, this many in all.
OLDEST = 1024  # No step is older: then the rank's speed counts as unknown, and the rank is tried.

# The fields of a `StepRecord` that are kept of each rank's step.
COLUMNS = ("samples", "load", "compute_s", "squares", "longest", "step_s")

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

    def step_s(self) -> float | None:
        """What a step takes at present, in seconds."""
        column = COLUMNS.index("step_s")
        recent = [float(self._rows[s][:, column].mean()) for s in self._complete[-8:]]
        return statistics.median(recent) if recent else None

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
        compute_s=table["compute_s"],
        squares=table["squares"],
        longest=table["longest"],
    )
