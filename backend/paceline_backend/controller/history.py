"""What a run has done, from its messages or from the database: all that planning rests on."""

from __future__ import annotations

import statistics
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import sqlalchemy as sa

from paceline.wire import Hello, Segment, StepRecord
from paceline_backend.policies import Feedback, Problem
from paceline_backend.policies._base import Ints, usable
from paceline_backend.store import runs
from paceline_backend.store.schema import segments, worker_steps

WINDOW = 64  # complete steps of feedback that a plan may use,
USABLE = 8  # and older ones for ranks that had samples in fewer steps than this since,
OLDEST = 1024  # up to so old: a rank whose speed is known no more is tried again

_FEEDBACK = ("step", "rank", "samples", "load", "compute_s", "step_s")


class History:
    """The state of an attempt: what is left of its epoch, and who holds which sample.

    Segments are adopted in the order of their seq. After a gap (`lost`) it is unknown what remains
    of the epoch, until one ends, and who used a sample last, until each was used again: nothing may
    be planned on less, since the gap may be filled later, and replay then knows more.

    Args:
        hello: of the attempt.
    """

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.sizes = hello.sizes_array()
        self.epoch = hello.epoch
        self.seq = 0  # of the next segment
        self.step = hello.step  # its first
        self.lost = False
        self.feedback: list[tuple[int, int]] = []  # what the last plan of a controller rested on
        self._remaining = np.ones(len(self.sizes), bool)
        self._remaining[np.frombuffer(hello.used, "<u4")] = False
        self._holder: Ints = np.arange(len(self.sizes), dtype=np.int64) % hello.world
        self._epoch_known = True  # what remains of it,
        self._holder_known = np.ones(len(self.sizes), bool)  # and of which samples the holder
        self._placement: Ints | None = None  # what the shuffler returned last
        self._shuffled_for: tuple[int, int] | None = None  # epoch and policy version of that

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        return self.hello.epochs is not None and self.epoch >= self.hello.epochs

    def must_shuffle(self, version: int) -> bool:
        """Whether the shuffler runs before the next segment (internals.md, "Policies")."""
        return self._shuffled_for != (self.epoch, version)

    def problem(self, steps: int, *, shuffle: bool) -> Problem:
        """The next segment as a problem.

        Args:
            steps: at most.
            shuffle: the placement is that which the shuffler starts from, not its last result.
        """
        placement = self._holder if shuffle or self._placement is None else self._placement
        return Problem(
            sizes=self.sizes,
            remaining=np.flatnonzero(self._remaining),
            placement=placement.copy(),
            epoch=self.epoch,
            first_step=self.step,
            steps=steps,
            global_batch=self.hello.global_batch,
            world=self.hello.world,
            seed=self.hello.seed,
            drop_last=self.hello.drop_last,
        )

    def shuffled(self, version: int, placement: Ints) -> None:
        """Notes that a segment is in force for which the shuffler ran, with what it returned."""
        self._placement = placement
        self._shuffled_for = (self.epoch, version)

    def forget_placement(self) -> None:
        """The shuffler must run again: what another controller shuffled is not known here."""
        self._shuffled_for = None

    def adopt(self, segment: Segment) -> None:
        """Takes in the next segment that ran."""
        if segment.seq != self.seq:
            self.lost = True
            self._epoch_known = False
            self._holder_known[:] = False
        if segment.epoch != self.epoch:  # the script left an epoch early, or a gap hid its end
            self._begin_epoch(segment.epoch)
        for step in segment.assignments():
            for rank, samples in enumerate(step):
                self._remaining[samples] = False
                self._holder[samples] = rank
                self._holder_known[samples] = True
        if segment.source == "controller":
            self.feedback = segment.feedback
        self.seq = segment.seq + 1
        self.step = segment.first_step + segment.steps
        if segment.epoch_end:
            self._begin_epoch(segment.epoch + 1)
            self._epoch_known = True
        if self.lost:
            self.lost = not (self._epoch_known and self._holder_known.all())

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._remaining[:] = True


@dataclass
class Window:
    """The last complete steps' feedback, of one attempt.

    A rank that gets few samples, being slow, has few rows that say something about its speed. The
    steps of its last ones stay, so that it is not thought to be as fast as the others.

    Args:
        world: ranks that make a step complete.
        attempt: records of others are not taken.
    """

    world: int
    attempt: int
    _rows: dict[int, dict[int, tuple[int, float, float, float]]] = field(default_factory=dict)
    _complete: list[int] = field(default_factory=list)  # ascending, the last `WINDOW`
    _older: list[int] = field(default_factory=list)  # ascending, complete, before those
    _seen: int = -1  # the latest step of which there was a row
    _usable: dict[int, list[int]] = field(default_factory=dict)  # by rank: its last `USABLE` steps

    def add(self, records: Iterable[StepRecord]) -> None:
        """Takes records in; those seen before change nothing."""
        for record in records:
            if record.attempt == self.attempt:
                self.put(
                    record.step,
                    record.rank,
                    (record.samples, record.load, record.compute_s, record.step_s),
                )

    def put(self, step: int, rank: int, values: tuple[int, float, float, float]) -> None:
        """Takes one row in: samples, load, compute_s, step_s."""
        if len(self._complete) == WINDOW and step < self._complete[0]:
            return
        if step > self._seen:
            self._seen = step
            self._forget()
        elif step < self._seen - 2 * WINDOW and step not in self._rows:
            return  # its other rows are given up
        ranks = self._rows.setdefault(step, {})
        if rank in ranks:
            return
        ranks[rank] = values
        if len(ranks) == self.world:
            self._complete = sorted([*self._complete, step])[-WINDOW:]
            self._note_usable(step)
            self._forget()

    def _note_usable(self, step: int) -> None:
        for rank, (samples, load_, compute_s, _) in self._rows[step].items():
            if usable(samples, load_, compute_s):
                steps = self._usable.setdefault(rank, [])
                insort(steps, step)
                del steps[:-USABLE]

    def _forget(self) -> None:
        first = self._complete[0] if self._complete else 0
        oldest, since = self.newest - OLDEST, self._seen - 2 * WINDOW
        if len(self._complete) == WINDOW:
            since = max(since, first)
        older = {s for steps in self._usable.values() for s in steps if oldest < s < first}
        self._older = sorted(older)
        keep = older.union(self._complete)
        self._rows = {s: r for s, r in self._rows.items() if s in keep or s >= since}

    @property
    def newest(self) -> int:
        """The latest complete step; -1 if there is none."""
        return self._complete[-1] if self._complete else -1

    def step_s(self) -> float | None:
        """What a step takes at present, in seconds."""
        recent = [
            statistics.fmean(r[3] for r in self._rows[s].values()) for s in self._complete[-8:]
        ]
        return statistics.median(recent) if recent else None

    def ranges(self) -> list[tuple[int, int]]:
        """The complete steps as half-open ranges, for `Segment.feedback`."""
        found: list[tuple[int, int]] = []
        for step in [*self._older, *self._complete]:
            if found and found[-1][1] == step:
                found[-1] = (found[-1][0], step + 1)
            else:
                found.append((step, step + 1))
        return found

    def feedback(self) -> Feedback:
        """The rows for the predictor."""
        return feedback_of(
            [
                (step, rank, *self._rows[step][rank][:3])
                for step in [*self._older, *self._complete]
                for rank in sorted(self._rows[step])
            ]
        )


def feedback_of(rows: list[tuple[int, int, int, float, float]]) -> Feedback:
    """Feedback of rows (step, rank, samples, load, compute_s) that are sorted."""
    if not rows:
        return Feedback.empty()
    step, rank, samples, load, compute_s = zip(*rows, strict=True)
    return Feedback(
        np.array(step, np.int64),
        np.array(rank, np.int64),
        np.array(samples, np.int64),
        np.array(load, np.float64),
        np.array(compute_s, np.float64),
    )


def load(connection: sa.Connection, run: int) -> tuple[History, Window] | None:
    """History and feedback of a run's latest attempt; None before its Hello."""
    hello = runs.hello(connection, run)
    if hello is None:
        return None
    history = History(hello)
    for segment in read_segments(connection, run, hello.attempt):
        history.adopt(segment)
    window = Window(hello.world, hello.attempt)
    columns = [worker_steps.c[name] for name in _FEEDBACK]
    # Twice the window: the latest steps may be incomplete, and some may lack a rank's record. Older
    # ones as the last plan had them.
    step = worker_steps.c.step
    query = sa.select(*columns).where(
        worker_steps.c.run == run,
        worker_steps.c.attempt == hello.attempt,
        sa.or_(
            step >= history.step - 2 * WINDOW,
            *(step.between(start, end - 1) for start, end in history.feedback),
        ),
    )
    for at, rank, *values in connection.execute(query.order_by(*columns[:2])):
        samples, load_, compute_s, step_s = values
        window.put(at, rank, (samples, load_, compute_s, step_s))
    return history, window


def read_segments(connection: sa.Connection, run: int, attempt: int) -> Iterable[Segment]:
    """The segments of an attempt, as they ran."""
    query = (
        sa.select(segments.c.body)
        .where(segments.c.run == run, segments.c.attempt == attempt)
        .order_by(segments.c.seq)
        .execution_options(yield_per=500)
    )
    for body in connection.scalars(query):
        yield msgspec.msgpack.decode(body, type=Segment)
