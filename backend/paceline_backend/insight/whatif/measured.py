"""What a run's last steps measured, as a forecast needs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.cost import Features
from paceline.wire import Hello, Segment
from paceline.wire.synchronisation import Averaging, Hierarchical, Partial, Synchronisation
from paceline_backend.insight.report import WARMUP_STEPS
from paceline_backend.planning.feedback import Window
from paceline_backend.planning.history import History
from paceline_backend.planning.load import load
from paceline_backend.policies.base import Feedback, Floats, Ints
from paceline_backend.simulator import sync as synchronisers
from paceline_backend.store import Connection, records, rounds, runs, segments, switches

_FEWEST = 16  # steady steps that say what the policy in force takes
_BLOCK = 8  # steps whose median tells the speed of a rank
_CHANGED = 0.15  # off by more, and by more than chance explains: another speed
_BY_CHANCE = 0.001  # how often chance alone shall look like another speed
_SIGMA = 1.4826  # σ of a normal distribution ÷ its median absolute deviation

_COLUMNS = ("samples", "load", "squares", "longest", "compute_s", "data_s", "sync_s", "step_s")
_ROUNDS = 256  # newest ones that say what a round takes
_UNDISTURBED = 0.1  # share of a rank's steps in which it waits for nobody, at least


@dataclass(frozen=True)
class Apart:
    """Rows in which ranks went their own ways: of one segment."""

    first: int  # row
    end: int
    what: Synchronisation
    seq: int  # of the segment,
    steps: int  # and how many it has
    whole: bool  # its last step is among them,
    epoch_end: bool  # and the epoch's

    @property
    def goes_on(self) -> bool:
        """Whether ranks do not meet at the segment's end, unless the epoch ends."""
        return synchronisers.goes_on(self.what)

    @property
    def over(self) -> bool:
        """Whether the epoch ends with the last row."""
        return self.whole and self.epoch_end


@dataclass(frozen=True)
class Measured:
    """The last complete steps of the latest attempt: S steps of W ranks."""

    step: Ints  # [S]
    features: Features  # [S, W]
    compute_s: Floats  # [S, W]
    data_s: Floats  # [S, W]
    sync_s: Floats  # [S, W]
    rank_step_s: Floats  # [S, W]
    load: Floats  # [S] of the global batch
    apart: tuple[Apart, ...] = ()  # in order; all other rows are of all-reduces
    told_round_s: float | None = (
        None  # what a round takes, as the newest tell; None: there are none
    )

    @property
    def feedback(self) -> Feedback:
        """The same for a predictor."""
        steps, world = self.compute_s.shape
        of = self.features
        return Feedback(
            step=np.repeat(self.step, world),
            rank=np.tile(np.arange(world), steps),
            samples=of.samples.ravel(),
            load=of.load.ravel(),
            compute_s=self.compute_s.ravel(),
            squares=of.squares.ravel(),
            longest=of.longest.ravel(),
        )

    @property
    def step_s(self) -> Floats:
        """Of each step, the mean over ranks, [S]."""
        return np.asarray(self.rank_step_s.mean(axis=1))

    @property
    def evened_s(self) -> Floats:
        """How long each step took, [S], however far ranks are apart.

        `step_s` with the wait for all at a relaxed segment's end spread over its steps; where ranks
        do not meet there, the steps of the slowest one, for which all wait when the epoch ends.
        """
        times_s = self.step_s
        for span in self.apart:
            if span.whole and not span.goes_on:
                met_s = float(self.sync_s[span.end - 1].mean())
                times_s[span.end - 1] -= met_s
                times_s[span.first : span.end] += met_s / span.steps
        for stretch in self._stretches():
            first, end = stretch[0].first, stretch[-1].end
            own_s = self.rank_step_s[first:end].copy()
            if stretch[-1].over:
                own_s[-1] -= self.sync_s[end - 1] - self.sync_s[end - 1].min()
            times_s[first:end] = own_s[:, own_s.sum(axis=0).argmax()]
        return times_s

    @property
    def together(self) -> npt.NDArray[np.bool_]:
        """Which steps ended with an all-reduce, [S]."""
        together = np.ones(len(self), bool)
        for span in self.apart:
            together[span.first : span.end] = False
        return together

    @property
    def remainder_s(self) -> Floats:
        """What a step takes, or would, beyond its slowest rank's loading and computing, [S].

        Communication, the optimizer, the loop: all that comes after the last gradient.
        """
        beyond_s = self.step_s - (self.data_s + self.compute_s).max(axis=1)
        return np.asarray(np.where(self.together, beyond_s, self.round_s + self.rest_s.mean()))

    @property
    def rest_s(self) -> Floats:
        """What a rank's step takes beyond loading, computing and what it waits for, [W]."""
        alike = self.together == self.together[-1]
        sync_s = self.sync_s[alike]
        # Where replicas become their mean is no step like the others.
        rest_s = np.maximum(np.median(self._beyond_s[alike] - sync_s, axis=0), 0.0)
        if self.together[-1]:
            return np.asarray(rest_s)
        # A rank applies what has come where it also waits: what is left in the steps of the rank
        # that waits least.
        own_s = float(np.quantile(sync_s, _UNDISTURBED, axis=0).min())
        what = self.apart[-1].what
        if isinstance(what, Partial | Hierarchical) and what.parameters.waits:
            own_s = max(own_s - self.round_s, 0.0)
        return np.asarray(rest_s + own_s)

    @property
    def round_s(self) -> float:
        """What a reduction among all ranks takes: for the last to come, who waits for nobody."""
        together = self.together
        if together.any():
            return float(np.median(self.sync_s[together].min(axis=1)))
        means = np.zeros(len(self), bool)
        for span in self.apart:
            every = span.what.parameters.every if isinstance(span.what, Averaging) else None
            if every:
                rows = slice(span.first, span.end)
                means[rows] = (self.step[rows] + 1) % every == 0
        if means.any() and not means.all():
            usual_s = np.median(self._beyond_s[~means])
            return float(max(np.median(self._beyond_s[means].min(axis=1)) - usual_s, 0.0))
        return self.told_round_s or 0.0

    @property
    def _beyond_s(self) -> Floats:
        """What steps take beyond loading and computing, [S, W]."""
        return self.rank_step_s - self.data_s - self.compute_s

    def _stretches(self) -> list[list[Apart]]:
        """Segments one after the other between which ranks did not meet."""
        stretches: list[list[Apart]] = []
        for span in self.apart:
            before = stretches[-1][-1] if stretches else None
            if not span.goes_on:
                continue
            if (
                before is None
                or before.over
                or (before.end, before.what) != (span.first, span.what)
            ):
                stretches.append([])
            stretches[-1].append(span)
        return stretches

    def since(self, first: int) -> Measured:
        """From its row `first` on."""
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
            apart=tuple(
                replace(span, first=max(span.first - first, 0), end=span.end - first)
                for span in self.apart
                if span.end > first
            ),
        )

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class State:
    """Where a run stands: what the next segment would be planned from."""

    version: int
    policy: str
    parameters: dict[str, Any]
    history: History | None = None  # None: no Hello yet
    window: Window | None = None
    measured: Measured | None = None
    steady: npt.NDArray[np.bool_] | None = None  # [S] planned by the policy in force, warmed up


def read(connection: Connection, run: int, steps: int, cells: int) -> State:
    """A run's state and the newest complete steps of its latest attempt.

    Args:
        connection: to read from.
        run: key of the run.
        steps: so many,
        cells: but no more than so many ranks' steps.
    """
    switch = switches.latest(connection, run)
    state = State(switch.version, switch.policy, switch.parameters)
    hello = runs.hello(connection, run)
    loaded = load(connection, run)
    if hello is None or loaded is None:
        return state
    steps = max(_FEWEST, min(steps, cells // hello.world))
    measured = _read_steps(connection, run, hello, loaded[0].step, steps)
    measured = _with_segments(connection, run, hello, measured)
    steady = _planned(connection, run, hello.attempt, switch.version, measured.step)
    if switch.effective_step is not None:
        steady &= measured.step >= switch.effective_step + WARMUP_STEPS
    return replace(state, history=loaded[0], window=loaded[1], measured=measured, steady=steady)


def _read_steps(connection: Connection, run: int, hello: Hello, upto: int, steps: int) -> Measured:
    """Incomplete steps do not count: some of the newest always are."""
    world = hello.world
    first = upto - 2 * steps - hello.lookahead
    table = records.since(connection, run, hello.attempt, world, _COLUMNS, first)
    at, count = np.unique(table[:, 0], return_counts=True)
    newest = at[count == world][-steps:]
    rows = table[np.isin(table[:, 0], newest)].reshape(len(newest), world, table.shape[1])
    column = dict(zip(_COLUMNS, np.moveaxis(rows[:, :, 2:], 2, 0), strict=True))
    return Measured(
        step=newest.astype(np.int64),
        features=Features(
            column["samples"].astype(np.int64),
            column["load"],
            column["squares"],
            column["longest"],
        ),
        compute_s=column["compute_s"],
        data_s=column["data_s"],
        sync_s=column["sync_s"],
        rank_step_s=column["step_s"],
        load=column["load"].sum(axis=1),
    )


def _with_segments(connection: Connection, run: int, hello: Hello, measured: Measured) -> Measured:
    """The same, with the rows in which ranks went their own ways."""
    if not len(measured):
        return measured
    kept: list[Segment] = []
    for end, segment in segments.relaxed(connection, run, hello, int(measured.step[0])):
        if segment is not None and _simulated(segment.synchroniser, hello.world):
            kept.append(segment)
            continue
        # What these steps took says nothing about others: only later steps count.
        kept, measured = [], measured.since(int(np.searchsorted(measured.step, end)))
    candidates = [apart(measured.step, segment) for segment in kept]
    spans = tuple(span for span in candidates if span.end > span.first)
    if not spans:
        return measured
    # Of a mean of all replicas, the time that a rank waits for others is part.
    names = [span.what.name for span in spans if span.what.name != "averaging"]
    seqs = [span.seq for span in spans if span.what.name in names[-1:]]
    reduced_s = rounds.newest_reduced_s(connection, run, hello.attempt, seqs, _ROUNDS)
    ways = 2 if names[-1:] == ["pairwise"] else 1  # the answer's is told: there were two
    told_round_s = ways * float(np.median(reduced_s)) if reduced_s else None
    return replace(measured, apart=spans, told_round_s=told_round_s)


def _simulated(what: Synchronisation, world: int) -> bool:
    """Whether there is a model of a synchroniser: older releases stored any parameters."""
    try:
        synchronisers.make(what, world, 0)
    except (LookupError, TypeError, ValueError):
        return False
    return True


def apart(step: Ints, segment: Segment) -> Apart:
    """Which of some steps, [S], are of a segment."""
    end = segment.first_step + segment.steps
    first, after = np.searchsorted(step, [segment.first_step, end]).tolist()
    whole = after > first and int(step[after - 1]) == end - 1
    return Apart(
        first,
        after,
        segment.synchroniser,
        segment.seq,
        segment.steps,
        whole,
        segment.epoch_end,
    )


def _planned(
    connection: Connection, run: int, attempt: int, version: int, step: Ints
) -> npt.NDArray[np.bool_]:
    """Which steps a controller planned by this version of the policy, [S]."""
    planned = np.zeros(len(step), bool)
    if not len(step):
        return planned
    for first, steps in segments.planned(connection, run, attempt, version, int(step[0])):
        planned |= (step >= first) & (step < first + steps)
    return planned


def steady_time(measured: Measured, steady: npt.NDArray[np.bool_]) -> tuple[float | None, int]:
    """Seconds per unit of load under the policy in force, and in how many steps; None: too few."""
    steady = steady.copy()
    for span in measured.apart:
        if not span.whole:  # what the others wait for is still to come
            steady[span.first : span.end] = False
    count = int(steady.sum())
    if count < _FEWEST:
        return None, count
    return float(measured.evened_s[steady].sum() / measured.load[steady].sum()), count


def same_speeds(ratio: Floats) -> int:
    """The first row from which on all ranks keep the speeds that they have at the end.

    Passing slowdowns stay in: what is left out lies before every block of steps in which each
    rank was as fast as now.

    Args:
        ratio: measured over modelled compute time by a model of the present speeds, [S, W]; NaN
            where a rank had no samples.
    """
    first = len(ratio) % _BLOCK
    blocks = np.log(np.maximum(ratio[first:], 1e-9)).reshape(-1, _BLOCK, ratio.shape[1])
    known = np.asarray(~np.isnan(blocks).all(axis=1), bool)  # [blocks, W]
    median = np.nanmedian(np.where(known[:, None], blocks, 0.0), axis=1)
    alike = np.flatnonzero((np.abs(median) <= _by_chance(blocks, median, known)).all(axis=1))
    if not len(alike):
        return max(0, len(ratio) - _BLOCK)
    return 0 if alike[0] == 0 else first + _BLOCK * int(alike[0])


def _by_chance(blocks: Floats, median: Floats, known: npt.NDArray[np.bool_]) -> Floats:
    """How far off a block's median may be that means no other speed, [W].

    Each rank's spread is that within blocks, which a lasting change of speed does not widen.
    """
    within = np.abs(np.where(known[:, None], blocks - median[:, None], np.nan))
    sigma = np.zeros(blocks.shape[2])
    ever = known.any(axis=0)
    sigma[ever] = _SIGMA * np.nanmedian(within[:, :, ever], axis=(0, 1))
    z = NormalDist().inv_cdf(1 - _BY_CHANCE / 2 / median.size)
    # 1.25: a median's standard deviation over a mean's.
    return np.asarray(np.maximum(np.log(1 + _CHANGED), z * 1.25 * sigma / np.sqrt(_BLOCK)))
