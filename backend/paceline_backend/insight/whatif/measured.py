"""Measurements of a run's newest steps, in the form that a forecast needs.

`with_spans` adds the segments in which ranks did not wait for each other in each step, because the
duration of their steps is computed differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.core.cost import Features
from paceline.planning.feedback import single_batches
from paceline.policies.base import Feedback, Floats, Ints
from paceline.wire import Plan
from paceline.wire.synchronisation import (
    Averaging,
    Hierarchical,
    Pairwise,
    Partial,
    Synchronisation,
)
from paceline_backend.insight.whatif.thresholds import THRESHOLDS
from paceline_backend.simulator import sync as sync_models
from paceline_backend.simulator.sync import Costs


@dataclass(frozen=True)
class RelaxedSpan:
    """Rows of one segment with relaxed synchronisation."""

    # First row, and one past the last row.
    first: int
    end: int
    synchroniser: Synchronisation
    seq: int
    # Number of steps of the segment, including those without a row.
    steps: int
    # True if the segment's last step has a row.
    whole: bool
    epoch_end: bool
    # True if ranks share the segment's batches; see `paceline.core.pool`.
    pooled: bool

    @property
    def goes_on(self) -> bool:
        """Return whether ranks synchronise at the segment's end only if the epoch ends there."""
        return sync_models.goes_on(self.synchroniser)

    @property
    def ends_epoch(self) -> bool:
        """Return whether the epoch ends with the span's last row."""
        return self.whole and self.epoch_end

    @property
    def rows(self) -> slice:
        """Return the span's rows."""
        return slice(self.first, self.end)

    @property
    def judged(self) -> bool:
        """Return whether the rows are complete enough to show the duration of the segment."""
        return self.whole and (not self.pooled or self.end - self.first == self.steps)


@dataclass(frozen=True)
class MeasuredSteps:
    """Newest complete steps of the latest attempt: S steps of W ranks."""

    step: Ints  # [S]
    features: Features  # [S, W]
    compute_s: Floats  # [S, W]
    data_s: Floats  # [S, W]
    sync_s: Floats  # [S, W]
    rank_step_s: Floats  # [S, W]
    # Load of each step's global batch, summed over the ranks.
    load: Floats  # [S]
    # Relaxed spans, ascending. All rows outside of these spans end with an all-reduce.
    relaxed_spans: tuple[RelaxedSpan, ...] = ()
    # Duration of an all-reduce, estimated from the median of the newest reduction rounds; None:
    # there are no rounds.
    reported_round_s: float | None = None
    # Reason why the ranks fell back to an all-reduce in the newest relaxed segment; empty: they did
    # not fall back.
    fallback: str = ""
    # Mask of records that cover several batches; None: there are no such records.
    several: npt.NDArray[np.bool_] | None = None  # [S, W]
    # Size of all gradients of a rank; None: unknown.
    gradient_bytes: int | None = None

    @property
    def single(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the records of exactly one batch, [S, W]."""
        single = self.features.samples > 0
        return np.asarray(single if self.several is None else single & ~self.several, bool)

    @property
    def loading_s(self) -> Floats:
        """Return each rank's mean time to load a batch, [W]; 0 if no record shows it.

        If ranks share the batches of a segment, a rank that has finished the segment waits for the
        next plan, and its next record counts this wait as loading. Such records are left out.
        """
        known = self.single.copy()
        known[[span.first for span in self.relaxed_spans if span.pooled]] = False
        total_s = np.where(known, self.data_s, 0.0).sum(axis=0)
        return np.asarray(total_s / np.maximum(known.sum(axis=0), 1))

    @property
    def feedback(self) -> Feedback:
        """Return the records of single batches for a predictor; other records have 0 samples."""
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

    def of_segments(self, segments: list[Plan]) -> MeasuredSteps:
        """Return a copy in which `several` is set according to the plans of these segments."""
        trained = self.features.samples > 0
        left = single_batches(self._feedback(trained), segments).samples.reshape(trained.shape)
        return replace(self, several=trained & (left == 0))

    @property
    def step_s(self) -> Floats:
        """Return the time of each step, as the mean over ranks, [S]."""
        return np.asarray(self.rank_step_s.mean(axis=1))

    @property
    def evened_s(self) -> Floats:
        """Return the duration of each step, [S], even if ranks are in different steps.

        If ranks share a segment's batches, the segment's time is spread evenly over its steps,
        because ranks train the batches of a step at different times. If ranks do not share the
        batches, and all ranks synchronise at the segment's end, the wait at the end is spread over
        the segment's steps. If ranks do not synchronise there, the durations are those of the
        slowest rank, because all ranks wait for that rank when the epoch ends.
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
            if stretch[-1].ends_epoch:
                own_s[-1] -= self.sync_s[end - 1] - self.sync_s[end - 1].min()
            step_s[first:end] = own_s[:, own_s.sum(axis=0).argmax()]
        return step_s

    def _stretches(self) -> list[list[RelaxedSpan]]:
        """Return groups of consecutive segments between which ranks did not synchronise."""
        stretches: list[list[RelaxedSpan]] = []
        for span in self.relaxed_spans:
            before = stretches[-1][-1] if stretches else None
            if span.pooled or not span.goes_on:
                continue
            if (
                before is None
                or before.ends_epoch
                or (before.end, before.synchroniser) != (span.first, span.synchroniser)
            ):
                stretches.append([])
            stretches[-1].append(span)
        return stretches

    @property
    def evened_load(self) -> Floats:
        """Return the load of each step, [S], spread in the same way as the time in `evened_s`."""
        load = self.load.copy()
        for span in self.relaxed_spans:
            if span.pooled:
                load[span.rows] = load[span.rows].mean()
        return load

    @property
    def together(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the steps that ended with an all-reduce, [S]."""
        together = np.ones(len(self), bool)
        for span in self.relaxed_spans:
            together[span.first : span.end] = False
        return together

    @property
    def remainder_s(self) -> Floats:
        """Return the duration of each step minus its slowest rank's loading and computing, [S].

        The remainder is the time of communication, the optimizer and the loop. For relaxed steps it
        is estimated as the time of an all-reduce plus the mean of `rest_s`.
        """
        remainder_s = self.step_s - (self.data_s + self.compute_s).max(axis=1)
        return np.asarray(np.where(self.together, remainder_s, self.round_s + self.rest_s.mean()))

    @property
    def rest_s(self) -> Floats:
        """Return each rank's time of a step beyond loading, computing and waiting, [W]."""
        alike = self.together == self.together[-1]
        single = self.single[alike]
        sync_s = np.where(single, self.sync_s[alike], np.nan)
        ranks = single.any(axis=0)
        rest_s = np.zeros(single.shape[1])
        # The median ignores the steps in which replicas are averaged.
        beyond_s = (self._beyond_s[alike] - sync_s)[:, ranks]
        rest_s[ranks] = np.maximum(np.nanmedian(beyond_s, axis=0), 0.0)
        if self.together[-1] or not ranks.any():
            return np.asarray(rest_s)
        # In the time `sync_s`, a rank not only waits, but also applies arrived gradients. This work
        # is estimated from the rank that waits least.
        own_s = float(np.nanquantile(sync_s[:, ranks], THRESHOLDS.undisturbed, axis=0).min())
        synchroniser = self.relaxed_spans[-1].synchroniser
        if isinstance(synchroniser, Partial | Hierarchical) and synchroniser.parameters.waits:
            own_s = max(own_s - self.round_s, 0.0)
        return np.asarray(rest_s + own_s)

    @property
    def round_s(self) -> float:
        """Return the duration of a reduction among all ranks, after the last rank has arrived."""
        together = self.together
        if together.any():
            return float(np.median(self.sync_s[together].min(axis=1)))
        means = np.zeros(len(self), bool)
        for span in self.relaxed_spans:
            synchroniser = span.synchroniser
            rules = synchroniser.parameters if isinstance(synchroniser, Averaging) else None
            every = rules.every if rules is not None else None
            # Without overlap, ranks average their replicas after each `every`-th step.
            if every and rules is not None and not rules.overlap:
                rows = slice(span.first, span.end)
                means[rows] = (self.step[rows] + 1) % every == 0
        if means.any() and self.single[~means].any():
            usual_s = np.median(self._beyond_s[~means][self.single[~means]])
            return float(max(np.median(self._beyond_s[means].min(axis=1)) - usual_s, 0.0))
        return self.reported_round_s or 0.0

    def costs(self, own_s: Floats | float = 0.0) -> Costs:
        """Return the durations of exchanges of relaxed synchronisation; for `own_s` see `Costs`."""
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
        return self.rank_step_s - self.data_s - self.compute_s

    def since(self, first: int) -> MeasuredSteps:
        """Return the rows from `first` on."""
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
    relaxed: Sequence[Plan],
    reduced_s: Callable[[list[int]], Sequence[float]],
) -> MeasuredSteps:
    """Return `measured`, with the ranges of steps that ran under relaxed synchronisation.

    `relaxed` are the plans of these steps, ascending by `seq`. `reduced_s` takes segment numbers,
    and returns the durations of their newest reduction rounds.
    """
    candidates = [relaxed_span(measured.step, segment) for segment in relaxed]
    spans = tuple(span for span in candidates if span.end > span.first)
    if not spans:
        return measured
    measured = replace(measured.of_segments(list(relaxed)), relaxed_spans=spans)
    # "averaging" is left out, because its records include the time that a rank waits for others.
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
    """Cost of an exchange, independent of the network.

    `messages` is the number of messages that are sent one after the other. `vectors` is the number
    of bytes sent ÷ the size of all gradients.
    """

    messages: float
    vectors: float


# Each of the two ranks sends its gradients to the other.
_PAIR = _Exchange(2, 2)


def _all_reduce(ranks: int) -> _Exchange:
    """Return the cost of a ring all-reduce of `ranks` ranks; see `simulator.scenario`."""
    return _Exchange(2 * (ranks - 1), 2 * (ranks - 1) / ranks)


def _reported(synchroniser: Synchronisation, world: int) -> _Exchange:
    """Return the cost of the exchange that round records of this synchronisation measure."""
    if isinstance(synchroniser, Pairwise):
        # The recorded duration covers only one of the pair's two messages, the answer.
        return _Exchange(1, 1)
    if isinstance(synchroniser, Hierarchical):
        largest = max(map(len, synchroniser.parameters.groups))
        # A group of one rank reduces nothing, so count at least two ranks.
        return _all_reduce(max(largest, 2))
    return _all_reduce(world)


def _scaled(seconds: float, of: _Exchange, to: _Exchange, gradient_bytes: int | None) -> float:
    """Return the duration of exchange `to`, given that exchange `of` takes `seconds`.

    The time that a slow network needs to send the bytes of exchange `of` scales with the bytes sent
    (`vectors`). The rest of `seconds` scales with the number of messages. An exchange of a pair
    therefore takes 1/(W − 1) of the time of an all-reduce if the gradients are small, and W/(W − 1)
    if they are large. Gradients of unknown size (`gradient_bytes` None) count as large.
    """
    # A single rank reduces nothing.
    if not of.messages:
        return seconds
    moving_s = seconds
    if gradient_bytes is not None:
        moving_s = min(seconds, of.vectors * gradient_bytes / THRESHOLDS.slow_network)
    messages_s = seconds - moving_s
    return messages_s * to.messages / of.messages + moving_s * to.vectors / of.vectors


def relaxed_span(step: Ints, plan: Plan) -> RelaxedSpan:
    """Return the rows that belong to a segment; `step` holds the step of each row, [S]."""
    end = plan.first_step + plan.steps
    first, after = np.searchsorted(step, [plan.first_step, end]).tolist()
    whole = after > first and int(step[after - 1]) == end - 1
    return RelaxedSpan(
        first,
        after,
        plan.synchroniser,
        plan.seq,
        plan.steps,
        whole,
        plan.epoch_end,
        plan.pooled,
    )


def steady_time(measured: MeasuredSteps, steady: npt.NDArray[np.bool_]) -> tuple[float | None, int]:
    """Return the seconds per unit of load in the steps of the mask `steady`, and the step count.

    The seconds are None if there are too few steps.
    """
    steady = steady.copy()
    for span in measured.relaxed_spans:
        if not span.judged:
            steady[span.rows] = False
    count = int(steady.sum())
    if count < THRESHOLDS.steady_steps:
        return None, count
    return float(measured.evened_s[steady].sum() / measured.evened_load[steady].sum()), count
