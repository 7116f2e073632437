"""The measurements of a run's newest steps, in the form that a forecast needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.core.cost import Features
from paceline.wire import Segment
from paceline.wire.synchronisation import (
    Averaging,
    Hierarchical,
    Pairwise,
    Partial,
    Synchronisation,
)
from paceline_backend.planning.feedback import single_batches
from paceline_backend.policies.base import Feedback, Floats, Ints
from paceline_backend.simulator import sync as synchronisers
from paceline_backend.simulator.sync import Costs

_FEWEST = 16  # steady steps that are needed to measure the policy in force

_UNDISTURBED = 0.1  # in at least this share of a rank's steps, the rank waits for no other


@dataclass(frozen=True)
class RelaxedSpan:
    """Rows of one segment in which ranks did not wait for each other in each step."""

    first: int  # first row
    end: int  # row after the last
    synchroniser: Synchronisation
    seq: int  # number of the segment
    steps: int  # steps of the segment, also those without a row
    whole: bool  # the segment's last step has a row
    epoch_end: bool  # the epoch ends with the segment
    pooled: bool  # ranks share the segment's batches; see `paceline.core.pool`

    @property
    def goes_on(self) -> bool:
        """Whether ranks do not meet at the segment's end, unless the epoch ends."""
        return synchronisers.goes_on(self.synchroniser)

    @property
    def over(self) -> bool:
        """Whether the epoch ends with the last row."""
        return self.whole and self.epoch_end

    @property
    def rows(self) -> slice:
        """The span's rows."""
        return slice(self.first, self.end)

    @property
    def judged(self) -> bool:
        """Whether the rows say what the segment took: all that belongs together is there."""
        return self.whole and (not self.pooled or self.end - self.first == self.steps)


@dataclass(frozen=True)
class MeasuredSteps:
    """The last complete steps of the latest attempt: S steps of W ranks."""

    step: Ints  # [S]
    features: Features  # [S, W]
    compute_s: Floats  # [S, W]
    data_s: Floats  # [S, W]
    sync_s: Floats  # [S, W]
    rank_step_s: Floats  # [S, W]
    load: Floats  # [S] of the global batch
    relaxed_spans: tuple[RelaxedSpan, ...] = ()  # in order; all other rows are of all-reduces
    reported_round_s: float | None = None  # median of the newest rounds' records; None: no rounds
    fallback: str = ""  # why the newest relaxed segment was all-reduced; empty: it was not
    several: npt.NDArray[np.bool_] | None = None  # [S, W] records of several batches; None: none
    gradient_bytes: int | None = None  # of all gradients of a rank; None: unknown

    @property
    def single(self) -> npt.NDArray[np.bool_]:
        """Which records are of one batch, [S, W]: not of none, and not of several."""
        single = self.features.samples > 0
        return np.asarray(single if self.several is None else single & ~self.several, bool)

    @property
    def loading_s(self) -> Floats:
        """What loading a batch takes each rank, in the mean, [W]; 0 for a rank without any.

        Where ranks share batches, one that is through with a segment waits for the next plan. Its
        next record says so as loading.
        """
        known = self.single.copy()
        known[[span.first for span in self.relaxed_spans if span.pooled]] = False
        total_s = np.where(known, self.data_s, 0.0).sum(axis=0)
        return np.asarray(total_s / np.maximum(known.sum(axis=0), 1))

    @property
    def feedback(self) -> Feedback:
        """The records of single batches as a predictor takes them; others are empty."""
        return self._feedback(self.single)

    def _feedback(self, keep: npt.NDArray[np.bool_]) -> Feedback:
        steps, world = self.compute_s.shape
        of = self.features
        return Feedback(
            step=np.repeat(self.step, world),
            rank=np.tile(np.arange(world), steps),
            samples=np.where(keep, of.samples, 0).ravel(),
            load=np.where(keep, of.load, 0.0).ravel(),
            compute_s=np.where(keep, self.compute_s, 0.0).ravel(),
            squares=np.where(keep, of.squares, 0.0).ravel(),
            longest=np.where(keep, of.longest, 0.0).ravel(),
        )

    def of_segments(self, segments: list[Segment]) -> MeasuredSteps:
        """With what these segments' plans say of the records: which are of several batches."""
        trained = self.features.samples > 0
        left = single_batches(self._feedback(trained), segments).samples.reshape(trained.shape)
        return replace(self, several=trained & (left == 0))

    @property
    def step_s(self) -> Floats:
        """The time of each step, as the mean over ranks, [S]."""
        return np.asarray(self.rank_step_s.mean(axis=1))

    @property
    def evened_s(self) -> Floats:
        """How long each step took, [S], also where ranks are in different steps.

        Where ranks share a segment's batches, time is spread evenly over its steps, because ranks
        train the batches of a step at different times. In other relaxed segments at whose end all
        ranks meet, the wait for each other is spread. Where ranks do not meet at the end, the
        slowest rank's steps count, because all wait for that rank when the epoch ends.
        """
        step_s = self.step_s
        for span in self.relaxed_spans:
            if span.pooled:
                step_s[span.rows] = step_s[span.rows].mean()
            elif span.whole and not span.goes_on:
                met_s = float(self.sync_s[span.end - 1].mean())
                step_s[span.end - 1] -= met_s
                step_s[span.rows] += met_s / span.steps
        for stretch in self._stretches():
            first, end = stretch[0].first, stretch[-1].end
            own_s = self.rank_step_s[first:end].copy()
            if stretch[-1].over:
                own_s[-1] -= self.sync_s[end - 1] - self.sync_s[end - 1].min()
            step_s[first:end] = own_s[:, own_s.sum(axis=0).argmax()]
        return step_s

    def _stretches(self) -> list[list[RelaxedSpan]]:
        """Runs of segments of equal steps between which ranks did not meet."""
        stretches: list[list[RelaxedSpan]] = []
        for span in self.relaxed_spans:
            before = stretches[-1][-1] if stretches else None
            if span.pooled or not span.goes_on:
                continue
            if (
                before is None
                or before.over
                or (before.end, before.synchroniser) != (span.first, span.synchroniser)
            ):
                stretches.append([])
            stretches[-1].append(span)
        return stretches

    @property
    def evened_load(self) -> Floats:
        """The load of each step, [S], spread over the steps as `evened_s` spreads their time."""
        load = self.load.copy()
        for span in self.relaxed_spans:
            if span.pooled:
                load[span.rows] = load[span.rows].mean()
        return load

    @property
    def together(self) -> npt.NDArray[np.bool_]:
        """Which steps ended with an all-reduce, [S]."""
        together = np.ones(len(self), bool)
        for span in self.relaxed_spans:
            together[span.first : span.end] = False
        return together

    @property
    def remainder_s(self) -> Floats:
        """Time of a step beyond its slowest rank's loading and computing, [S].

        This is communication, the optimizer and the loop: all that comes after the last gradient.
        For relaxed steps it is an estimate of what an all-reduce would take.
        """
        remainder_s = self.step_s - (self.data_s + self.compute_s).max(axis=1)
        return np.asarray(np.where(self.together, remainder_s, self.round_s + self.rest_s.mean()))

    @property
    def rest_s(self) -> Floats:
        """Time of a rank's step beyond loading, computing and waiting, [W]."""
        alike = self.together == self.together[-1]
        single = self.single[alike]
        sync_s = np.where(single, self.sync_s[alike], np.nan)
        ranks = single.any(axis=0)
        rest_s = np.zeros(single.shape[1])
        # The median leaves out the steps in which replicas are averaged.
        beyond_s = (self._beyond_s[alike] - sync_s)[:, ranks]
        rest_s[ranks] = np.maximum(np.nanmedian(beyond_s, axis=0), 0.0)
        if self.together[-1] or not ranks.any():
            return np.asarray(rest_s)
        # A rank applies arrived gradients while it waits. This part of `sync_s` is its own work:
        # take the value of the rank that waits least.
        own_s = float(np.nanquantile(sync_s[:, ranks], _UNDISTURBED, axis=0).min())
        synchroniser = self.relaxed_spans[-1].synchroniser
        if isinstance(synchroniser, Partial | Hierarchical) and synchroniser.parameters.waits:
            own_s = max(own_s - self.round_s, 0.0)
        return np.asarray(rest_s + own_s)

    @property
    def round_s(self) -> float:
        """Time of a reduction among all ranks, seen by the last rank, which waits for no other."""
        together = self.together
        if together.any():
            return float(np.median(self.sync_s[together].min(axis=1)))
        means = np.zeros(len(self), bool)
        for span in self.relaxed_spans:
            synchroniser = span.synchroniser
            rules = synchroniser.parameters if isinstance(synchroniser, Averaging) else None
            every = rules.every if rules is not None else None
            if every and rules is not None and not rules.overlap:  # ranks wait after these steps
                rows = slice(span.first, span.end)
                means[rows] = (self.step[rows] + 1) % every == 0
        if means.any() and self.single[~means].any():
            usual_s = np.median(self._beyond_s[~means][self.single[~means]])
            return float(max(np.median(self._beyond_s[means].min(axis=1)) - usual_s, 0.0))
        return self.reported_round_s or 0.0

    def costs(self, own_s: Floats | float = 0.0) -> Costs:
        """What exchanges of relaxed synchronisers take.

        Args:
            own_s: see `Costs`.
        """
        round_s, whole = self.round_s, _all_reduce(self.compute_s.shape[1])

        def takes_s(exchange: _Exchange) -> float:
            return _scaled(round_s, whole, exchange, self.gradient_bytes)

        return Costs(
            round_s,
            own_s=own_s,
            pair_s=takes_s(_PAIR),
            group_s=lambda ranks: takes_s(_all_reduce(ranks)),
        )

    @property
    def _beyond_s(self) -> Floats:
        """Time of steps beyond loading and computing, [S, W]."""
        return self.rank_step_s - self.data_s - self.compute_s

    def since(self, first: int) -> MeasuredSteps:
        """The rows from `first` on."""
        return replace(
            self,
            step=self.step[first:],
            features=Features(
                samples=self.features.samples[first:],
                load=self.features.load[first:],
                squares=self.features.squares[first:],
                longest=self.features.longest[first:],
            ),
            compute_s=self.compute_s[first:],
            data_s=self.data_s[first:],
            sync_s=self.sync_s[first:],
            rank_step_s=self.rank_step_s[first:],
            load=self.load[first:],
            several=None if self.several is None else self.several[first:],
            relaxed_spans=tuple(
                replace(span, first=max(span.first - first, 0), end=span.end - first)
                for span in self.relaxed_spans
                if span.end > first
            ),
        )

    def __len__(self) -> int:
        return len(self.step)


def with_spans(
    measured: MeasuredSteps,
    relaxed: Sequence[Segment],
    reduced_s: Callable[[list[int]], Sequence[float]],
) -> MeasuredSteps:
    """`measured` with the spans of its relaxed segments.

    Args:
        measured: the newest steps.
        relaxed: segments with a relaxed synchroniser, in order.
        reduced_s: seconds that the newest rounds took, by the numbers of their segments.
    """
    candidates = [relaxed_span(measured.step, segment) for segment in relaxed]
    spans = tuple(span for span in candidates if span.end > span.first)
    if not spans:
        return measured
    measured = replace(measured.of_segments(list(relaxed)), relaxed_spans=spans)
    # "averaging" is left out: its records include the time that a rank waits for others.
    counted = [span for span in spans if not isinstance(span.synchroniser, Averaging)]
    newest = counted[-1].synchroniser if counted else None
    alike = [span.seq for span in counted if isinstance(span.synchroniser, type(newest))]
    reported = reduced_s(alike)
    if newest is None or not reported:
        return measured
    world, reported_s = measured.compute_s.shape[1], float(np.median(reported))
    whole, reports = _all_reduce(world), _reported(newest, world)
    round_s = _scaled(reported_s, reports, whole, measured.gradient_bytes)
    return replace(measured, reported_round_s=round_s)


class _Exchange(NamedTuple):
    """Messages that follow each other in an exchange, and how often one holds all gradients."""

    messages: float
    vectors: float


_PAIR = _Exchange(2, 2)  # a vector to another rank, and one back
_SLOW = 1.25e8  # bytes a second: 1 Gbit/s, the slowest network that is expected


def _all_reduce(ranks: int) -> _Exchange:
    """A ring's; see `paceline_backend.simulator.communication`."""
    return _Exchange(2 * (ranks - 1), 2 * (ranks - 1) / ranks)


def _reported(synchroniser: Synchronisation, world: int) -> _Exchange:
    """What the time in its records is of."""
    if isinstance(synchroniser, Pairwise):
        return _Exchange(1, 1)  # the answer only
    if isinstance(synchroniser, Hierarchical):
        largest = max(map(len, synchroniser.parameters.groups))
        return _all_reduce(max(largest, 2))  # a rank alone reduces nothing
    return _all_reduce(world)


def _scaled(seconds: float, of: _Exchange, to: _Exchange, gradient_bytes: int | None) -> float:
    """How long an exchange takes, as another one takes `seconds`.

    Gradients count as moving for as long as a slow network would take for them. The rest of the
    time is that of messages, however short these are. So a pair takes 1/(W − 1) of an all-reduce if
    the model is small, and W/(W − 1) if it is large. If its size is unknown, it counts as large.
    """
    if not of.messages:  # one rank, which reduces nothing
        return seconds
    moving_s = seconds
    if gradient_bytes is not None:
        moving_s = min(seconds, of.vectors * gradient_bytes / _SLOW)
    messages_s = seconds - moving_s
    return messages_s * to.messages / of.messages + moving_s * to.vectors / of.vectors


def relaxed_span(step: Ints, segment: Segment) -> RelaxedSpan:
    """Which of these steps, [S], belong to a segment."""
    end = segment.first_step + segment.steps
    first, after = np.searchsorted(step, [segment.first_step, end]).tolist()
    whole = after > first and int(step[after - 1]) == end - 1
    return RelaxedSpan(
        first,
        after,
        segment.synchroniser,
        segment.seq,
        segment.steps,
        whole,
        segment.epoch_end,
        segment.pooled,
    )


def steady_time(measured: MeasuredSteps, steady: npt.NDArray[np.bool_]) -> tuple[float | None, int]:
    """Seconds per unit of load under the policy in force, and in how many steps; None: too few."""
    steady = steady.copy()
    for span in measured.relaxed_spans:
        if not span.judged:
            steady[span.rows] = False
    count = int(steady.sum())
    if count < _FEWEST:
        return None, count
    return float(measured.evened_s[steady].sum() / measured.evened_load[steady].sum()), count
