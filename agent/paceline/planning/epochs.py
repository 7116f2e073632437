"""Reports of a run's epochs, made by rank 0's planning process from what the ranks measured.

`process` passes each adopted segment to `Epochs.adopt` and the ranks' records to `Epochs.add`, and
then calls `Epochs.finished`. An epoch is finished when the records of its last step have arrived.
If the script left it early, it is finished when a step of a later epoch is complete, or at `close`.

Each report compares the epoch with equal batches (`bsp`). For each step, the batches that `bsp`
would have dealt are known: the epoch's order is `DistributedSampler`'s. The longest compute time
that was measured in the step is multiplied by a ratio of fitted times: the longest of the equal
batches, divided by the longest of the batches that were trained. The rest of the step, such as the
communication, stays as measured. The waiting with equal batches is the measured waiting plus a
difference: the waiting that fitted times give for equal batches, minus the waiting that they give
for the batches that were trained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np

from paceline import policies
from paceline.core.batch_limits.shapes import raised
from paceline.core.cost import Features, features
from paceline.core.dealing import dealt, equal_counts
from paceline.core.epoch_report import EpochReport, Estimate
from paceline.planning.feedback import Window
from paceline.planning.history import History
from paceline.planning.offer import YOUNG_STEPS
from paceline.policies import Models
from paceline.policies.base import Floats, Ints, usable
from paceline.policies.solve.order import remaining_in_order
from paceline.wire import ALLREDUCE, Hello, Plan, StepRecord

# Policy whose predictor fits the ranks' speeds, whichever policy the run has.
_FITTING = "paceline"
# Number of complete steps that are collected before speeds are fitted and the steps are added to
# the epoch's sums.
_FITTED_STEPS = 256

_COLUMNS = (
    *("samples", "load", "squares", "longest"),
    *("data_s", "compute_s", "sync_s", "step_s", "ended_at", "recompiles"),
)
_VALUES = attrgetter(*_COLUMNS)
_NONE: Ints = np.empty(0, np.int64)


@dataclass
class _Epoch:
    """Sums over the complete steps of an epoch."""

    epoch: int
    first_step: int
    whole: bool
    # Samples that `bsp` would deal in the epoch's next steps, in order; None: unknown.
    order: Ints | None
    # True until something makes a comparison of times unfair, or impossible.
    comparable: bool = True
    # True if no more segments follow.
    ended: bool = False
    # For each adopted step that is not complete: the ranks' rows.
    open: dict[int, dict[int, tuple[float, ...]]] = field(default_factory=dict)
    # For the same steps and those in `complete`: features of equal batches, [W] each.
    equal: dict[int, Features] = field(default_factory=dict)
    # Complete steps that are not in the sums yet: the step, and its rows, [W, columns].
    complete: list[tuple[int, Floats]] = field(default_factory=list)
    steps: int = 0
    epoch_s: float = 0.0
    # Rank-seconds of waiting, and of the steps.
    waited_s: float = 0.0
    ranks_s: float = 0.0
    se: float = 0.0
    ended_at: float = 0.0
    # Sum of the longest compute time of each step; and the same with equal batches.
    longest_s: float = 0.0
    equal_s: float = 0.0
    # Mean time that a rank waits with equal batches, minus that with the batches that were trained,
    # both according to the fitted times.
    more_waiting_s: float = 0.0


class Epochs:
    """Maker of the reports of an attempt's epochs. Not thread-safe.

    Args:
        hello: description of the attempt.
        history: the attempt's history when the first segment is adopted here.
        window: the newest feedback, which the caller keeps up to date.
        policy: name of the run's policy, for the reports.
    """

    def __init__(self, hello: Hello, history: History, window: Window, policy: str) -> None:
        self._hello = hello
        self._sizes = history.sizes
        self._window = window
        self._policy = policy
        self._predictor = policies.make(_FITTING).predictor
        # The epoch in which this object was made, and the samples that the epoch had used before.
        self._started = history.epoch, history.used
        # Epochs that are not reported yet, oldest first.
        self._epochs: deque[_Epoch] = deque()
        self._closed = False

    def adopt(self, plan: Plan) -> None:
        """Add the next segment that the leader has adopted."""
        if not self._epochs or self._epochs[-1].epoch != plan.epoch:
            self._epochs.append(self._begun(plan))
        epoch = self._epochs[-1]
        epoch.ended = plan.epoch_end
        # Under relaxed synchronisation, steps differ from those of `bsp` in more than their
        # batches; and numbers of threads change how long a batch takes.
        if plan.synchroniser != ALLREDUCE or plan.threads:
            epoch.comparable = False
        epoch.open |= {step: {} for step in range(plan.first_step, plan.first_step + plan.steps)}
        if epoch.comparable and epoch.order is not None:
            epoch.equal |= self._equal(epoch, plan)

    def _begun(self, plan: Plan) -> _Epoch:
        at_start, used = self._started
        if plan.epoch != at_start:
            used = _NONE
        order = None if self._hello.stream else self._order(plan.epoch, used)
        whole = not len(used)
        return _Epoch(plan.epoch, plan.first_step, whole, order, order is not None)

    def _order(self, epoch: int, used: Ints) -> Ints:
        samples = len(self._sizes)
        remaining = np.delete(np.arange(samples), used)
        return remaining_in_order(samples, self._hello.seed, epoch, remaining)

    def _equal(self, epoch: _Epoch, plan: Plan) -> dict[int, Features]:
        """Return the features of the batches that `bsp` would have dealt in a segment's steps."""
        assert epoch.order is not None
        counts, samples, start = [], [], 0
        for size in plan.assignment.counts.sum(axis=1).tolist():
            most = np.array(self._hello.limits or [size] * self._hello.world)
            counts.append(equal_counts(size, most))
            samples.append(epoch.order[start : start + size][dealt(counts[-1])])
            start += size
        epoch.order = epoch.order[start:]
        of_all = features(self._sizes[np.concatenate(samples)], np.array(counts))
        return {plan.first_step + k: Features(*(x[k] for x in of_all)) for k in range(plan.steps)}

    def add(self, records: Iterable[StepRecord]) -> None:
        """Add records of ranks.

        Before, the caller must pass the records' segments to `adopt`, and the records to `window`.
        Records of steps that were adopted before this object was made are ignored.
        """
        for record in records:
            epoch = next((each for each in self._epochs if record.step in each.open), None)
            if epoch is None or record.attempt != self._hello.attempt:
                continue
            rows = epoch.open[record.step]
            rows[record.rank] = _VALUES(record)
            if len(rows) == self._hello.world:
                del epoch.open[record.step]
                table = np.array([rows[rank] for rank in range(self._hello.world)], np.float64)
                epoch.complete.append((record.step, table))
        for epoch in self._epochs:
            if len(epoch.complete) >= _FITTED_STEPS:
                self._sum(epoch)

    def close(self) -> None:
        """Treat the newest epoch as left: no more segments and records follow."""
        self._closed = True

    def finished(self) -> Iterator[EpochReport]:
        """Yield a report of each epoch that has finished since the last call."""
        while self._epochs and self._is_over():
            epoch = self._epochs.popleft()
            self._sum(epoch)
            if epoch.steps:
                yield self._report(epoch)

    def _is_over(self) -> bool:
        first, *later = self._epochs
        complete = first.ended and not first.open
        return complete or self._closed or any(each.steps or each.complete for each in later)

    def _sum(self, epoch: _Epoch) -> None:
        """Add the complete steps to the epoch's sums."""
        if not epoch.complete:
            return
        steps = [step for step, _ in epoch.complete]
        table = np.stack([rows for _, rows in epoch.complete])
        epoch.complete = []
        of = dict(zip(_COLUMNS, np.moveaxis(table, -1, 0), strict=True))
        compute_s, sync_s, step_s = of["compute_s"], of["sync_s"], of["step_s"]
        # The time of a step includes the loading of the next batch, but not of its own.
        if not epoch.steps:
            first = of["data_s"][np.argmin(steps)]
            epoch.epoch_s += float(first.mean())
            epoch.ranks_s += float(first.sum())
        epoch.steps += len(steps)
        epoch.epoch_s += float(step_s.mean(axis=1).sum())
        epoch.ranks_s += float(step_s.sum())
        epoch.waited_s += float((sync_s - sync_s.min(axis=1, keepdims=True)).sum())
        mean = compute_s.mean(axis=1)
        spread = compute_s.max(axis=1) - compute_s.min(axis=1)
        epoch.se += float((spread / np.where(mean > 0, mean, 1.0)).sum())
        epoch.ended_at = max(epoch.ended_at, float(of["ended_at"].max()))
        # A step in which a rank compiled code is not slow because of its batch.
        longest_s = np.where(of["recompiles"].any(axis=1), 0.0, compute_s.max(axis=1))
        epoch.longest_s += float(longest_s.sum())
        if not epoch.equal:
            return
        equal = [epoch.equal.pop(step) for step in steps if step in epoch.equal]
        models = self._models()
        if models is None or len(equal) < len(steps):
            epoch.comparable = False
            return
        samples = of["samples"].astype(np.int64)
        trained = Features(samples, of["load"], of["squares"], of["longest"])
        dealt_ = Features(*(np.stack(arrays) for arrays in zip(*equal, strict=True)))
        before, after = models.ett(trained), models.ett(dealt_)
        # With a negative fitted cost per sample, a time may not be above 0.
        fits = (before > 0) | (trained.samples == 0), (after > 0) | (dealt_.samples == 0)
        if not np.all(fits):
            epoch.comparable = False
            return
        equal_s = longest_s * after.max(axis=1) / before.max(axis=1)
        epoch.equal_s += float(equal_s.sum())
        waiting_s = equal_s * _idle(after) - longest_s * _idle(before)
        epoch.more_waiting_s += float(waiting_s.sum())

    def _models(self) -> Models | None:
        """Return the ranks' speeds; None: they are not known well yet."""
        feedback, grid = self._window.feedback(), self._hello.length_grid
        if len(feedback) < YOUNG_STEPS * self._hello.world:
            return None
        feedback = replace(feedback, longest=raised(feedback.longest, grid))
        models = self._predictor.fit(feedback, self._hello.world)
        return models.padded_to(grid) if models.known else None

    def _report(self, epoch: _Epoch) -> EpochReport:
        shares, speeds = self._speeds()
        waiting = epoch.waited_s / epoch.ranks_s if epoch.ranks_s > 0 else 0.0
        return EpochReport(
            epoch.epoch,
            epoch.first_step,
            epoch.steps,
            epoch.whole,
            self._policy,
            epoch.epoch_s,
            waiting,
            epoch.se / epoch.steps,
            shares,
            speeds,
            epoch.ended_at,
            self._estimate(epoch),
        )

    def _estimate(self, epoch: _Epoch) -> Estimate | None:
        epoch_s = epoch.epoch_s - epoch.longest_s + epoch.equal_s
        if not (epoch.comparable and epoch.equal_s > 0 and epoch_s > 0):
            return None
        waited_s = epoch.waited_s / self._hello.world + epoch.more_waiting_s
        return Estimate(epoch_s, max(0.0, waited_s) / epoch_s)

    def _speeds(self) -> tuple[list[float], list[float]]:
        """Return each rank's share of the load and its speed in the newest steps."""
        rows = self._window.feedback().by_step(self._hello.world)
        load = rows.load.sum(axis=0)
        known = usable(rows.samples, rows.load, rows.compute_s)
        compute_s = np.where(known, rows.compute_s, 0.0).sum(axis=0)
        trained = np.where(known, rows.load, 0.0).sum(axis=0)
        speeds = trained / np.where(compute_s > 0, compute_s, 1.0)
        return _rounded(load / (load.sum() or 1.0)), _rounded(speeds)


def _rounded(values: Floats) -> list[float]:
    # Four digits, so that the line of a run of a thousand ranks stays short.
    return [float(f"{value:.4g}") for value in values]


def _idle(ett_s: Floats) -> Floats:
    """Return the fraction of each step in which the ranks wait for the slowest, on average, [S].

    `ett_s` has the ranks' compute times, [S, W].
    """
    idle: Floats = 1.0 - ett_s.mean(axis=1) / ett_s.max(axis=1)
    return idle
