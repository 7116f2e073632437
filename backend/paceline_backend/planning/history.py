"""What a run has done, from its messages or from the database: all that planning rests on."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import sqlalchemy as sa

from paceline.core.cost import SUM
from paceline.wire import Hello, Segment, StepRecord
from paceline_backend.policies import Batches, Feedback, Plan, Problem
from paceline_backend.policies.base import Floats, Ints, usable
from paceline_backend.store import refusals, runs
from paceline_backend.store.schema import segments, worker_steps

WINDOW = 64  # complete steps of feedback that a plan may use,
USABLE = 8  # and older ones for ranks that had samples in fewer steps than this since,
AHEAD = 4096  # steps beyond the adopted ones that a record may be of: ranks report at once
CHANGED = 0.1  # a rank's share of the load by so much another than when the steps were composed
CURVED = 2.0  # or κ by so many times,
OLDEST = 1024  # up to so old: a rank whose speed is known no more is tried again

# Of a record: what is kept of each rank's step.
COLUMNS = ("samples", "load", "compute_s", "squares", "longest", "step_s")


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
        self.newest: deque[Segment] = deque(maxlen=8)  # the latest that ran
        self.feedback: list[tuple[int, int]] = []  # what the last plan of a controller rested on
        self._remaining = np.ones(len(self.sizes), bool)
        self._remaining[np.frombuffer(hello.used, "<u4")] = False
        self._holder: Ints = np.arange(len(self.sizes), dtype=np.int64) % hello.world
        self._holder_lent = False  # to a problem
        self._epoch_known = True  # what remains of it,
        self._holder_known = np.ones(len(self.sizes), bool)  # and of which samples the holder
        self._placement: Ints | None = None  # what the shuffler returned last,
        self._order: Ints | None = None  # the scheduler's order, without what was used since,
        self._shuffled_for: tuple[int, int] | None = None  # and for which epoch and version
        self._cost = SUM  # of a batch, as believed then
        self._shares: Floats = np.empty(0)  # of the load, as believed then; empty: unknown
        self._memory: tuple[int, dict[str, Any]] = (-1, {})  # version; of its last segment
        self._profiles = [[(n, s) for n, s in rank] for rank in hello.profiles]

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        return self.hello.epochs is not None and self.epoch >= self.hello.epochs

    @property
    def used(self) -> Ints:
        """The samples that the epoch has used so far, ascending."""
        return np.flatnonzero(~self._remaining)

    def must_shuffle(self, version: int) -> bool:
        """Whether the shuffler runs before the next segment (internals.md, "Policies")."""
        return self._shuffled_for != (self.epoch, version)

    def problem(self, steps: int, version: int, *, shuffle: bool) -> Problem:
        """The next segment as a problem.

        Args:
            steps: at most.
            version: of the policy that plans it.
            shuffle: the placement is that which the shuffler starts from, not its last result.
        """
        hello = self.hello
        placed = self._placement is not None and not shuffle
        remaining = np.flatnonzero(self._remaining)
        self._holder_lent = True
        return Problem(
            sizes=self.sizes,
            remaining=remaining,
            order=self._order if placed and self._order is not None else remaining,
            placement=self._placement if placed and self._placement is not None else self._holder,
            epoch=self.epoch,
            first_step=self.step,
            steps=steps,
            global_batch=hello.global_batch,
            world=hello.world,
            seed=hello.seed,
            drop_last=hello.drop_last,
            limits=np.array(hello.limits) if hello.limits else None,
            profiles=self._profiles,
            memory=self.memory(version),
        )

    def memory(self, version: int) -> dict[str, Any]:
        """What a policy version wanted to know when it plans next; empty if it never planned."""
        return self._memory[1] if self._memory[0] == version else {}

    def forget_memory(self) -> None:
        """The policy plans next as if for the first time."""
        self._memory = (-1, {})

    def shuffled(self, version: int, plan: Plan) -> None:
        """Notes that a segment is in force for which the shuffler ran, with what came of it.

        To be called before that segment is adopted.
        """
        self._placement, self._order = plan.placement, plan.order
        self._shares, self._cost = np.array(plan.shares), plan.cost
        self._shuffled_for = (self.epoch, version)

    def outdated(self, plan: Plan) -> bool:
        """Whether the shuffler ran, and steps were composed, for other speeds or another cost."""
        shares, cost, then = plan.shares, plan.cost, self._cost
        low, high = sorted((cost.kappa, then.kappa))
        if cost.padded != then.padded or high > CURVED * low:
            return True
        if not shares or not len(self._shares):
            return len(shares) != len(self._shares)
        change = np.abs(np.array(shares) - self._shares)
        return bool((change > CHANGED * self._shares).any())

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
        self.newest.append(segment)
        samples = np.frombuffer(segment.indices, "<u4").astype(np.int64)
        batches = Batches(np.asarray(segment.counts, np.int64), samples)
        self._remaining[samples] = False
        if self._holder_lent:  # problems made before, and what was planned on them, keep theirs
            self._holder = self._holder.copy()
            self._holder_lent = False
        self._holder[samples] = batches.ranks()
        self._holder_known[samples] = True
        self._use_up(samples)
        if segment.source == "controller":
            self.feedback = segment.feedback
            self._memory = (segment.version, segment.memory)
        self.seq = segment.seq + 1
        self.step = segment.first_step + segment.steps
        if segment.epoch_end:
            self._begin_epoch(segment.epoch + 1)
            self._epoch_known = True
        if self.lost:
            self.lost = not (self._epoch_known and self._holder_known.all())

    def _use_up(self, samples: Ints) -> None:
        """Takes samples out of the order: usually its first ones."""
        if self._order is None:
            return
        first, rest = self._order[: len(samples)], self._order[len(samples) :]
        if np.array_equal(np.sort(first), np.sort(samples)):
            self._order = rest
        else:
            self._order = self._order[self._remaining[self._order]]

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._remaining[:] = True


_Row = tuple[float, ...]  # values of `COLUMNS`


class Window:
    """The last complete steps' feedback, of one attempt.

    A rank that gets few samples, being slow, has few rows that say something about its speed. The
    steps of its last ones stay, so that it is not thought to be as fast as the others.

    Args:
        world: ranks that make a step complete.
        attempt: records of others are not taken.
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
        for record in records:
            if record.attempt == self.attempt:
                values = tuple(getattr(record, name) for name in COLUMNS)
                self.put(record.step, record.rank, values)

    def put(self, step: int, rank: int, values: _Row) -> None:
        """Takes one row in: the values of `COLUMNS`."""
        if not 0 <= rank < self.world or step < 0 or not self._wanted(step):
            return
        rows = self._rows.get(step)
        if rows is None:
            rows = self._rows[step] = np.full((self.world, len(COLUMNS)), np.nan)
        if np.isnan(rows[rank, 0]):
            rows[rank] = values
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
        told = usable(samples, load_, compute_s)
        self._usable[told, 0] = np.maximum(self._usable[told, 0], step)  # over the oldest
        self._usable[told] = np.sort(self._usable[told], axis=1)
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
        found: list[tuple[int, int]] = []
        for step in [*self._older, *self._complete]:
            if found and found[-1][1] == step:
                found[-1] = (found[-1][0], step + 1)
            else:
                found.append((step, step + 1))
        return found

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


def load(connection: sa.Connection, run: int) -> tuple[History, Window] | None:
    """History and feedback of a run's latest attempt; None before its Hello."""
    hello = runs.hello(connection, run)
    if hello is None:
        return None
    history = History(hello)
    for segment in read_segments(connection, run, hello):
        history.adopt(segment)
    window = Window(hello.world, hello.attempt)
    columns = [worker_steps.c[name] for name in ("step", "rank", *COLUMNS)]
    # Twice the window: the latest steps may be incomplete, and some may lack a rank's record. Older
    # ones as the last plan had them.
    step = worker_steps.c.step
    query = sa.select(*columns).where(
        worker_steps.c.run == run,
        worker_steps.c.attempt == hello.attempt,
        step < history.step + AHEAD,
        sa.or_(
            step >= history.step - 2 * WINDOW,
            *(step.between(start, end - 1) for start, end in history.feedback),
        ),
    )
    for at, rank, *values in connection.execute(query.order_by(*columns[:2])):
        window.put(at, rank, tuple(values))
    return history, window


def read_segments(connection: sa.Connection, run: int, hello: Hello) -> Iterable[Segment]:
    """The segments of an attempt, as they ran. Those that do not fit its Hello are left out."""
    samples = len(hello.sizes) // 8
    query = (
        sa.select(segments.c.body)
        .where(segments.c.run == run, segments.c.attempt == hello.attempt)
        .order_by(segments.c.seq)
        .execution_options(yield_per=500)
    )
    for body in connection.scalars(query):
        if segment := refusals.stored_segment(body, hello.world, samples):
            yield segment
