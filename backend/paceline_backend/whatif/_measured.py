"""What a run's last steps measured, as a forecast needs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from paceline.cost import Features
from paceline.wire import Hello
from paceline_backend.controller import history
from paceline_backend.controller.history import History, Window
from paceline_backend.policies._base import Feedback, Floats, Ints
from paceline_backend.report import WARMUP_STEPS
from paceline_backend.store import runs
from paceline_backend.store.schema import segments, switches, worker_steps

_FEWEST = 16  # steady steps that say what the policy in force takes
_BLOCK = 8  # steps whose median tells the speed of a rank
_CHANGED = 0.15  # off by more, and by more than chance explains: another speed
_BY_CHANCE = 0.001  # how often chance alone shall look like another speed
_SIGMA = 1.4826  # σ of a normal distribution ÷ its median absolute deviation

_COLUMNS = ("samples", "load", "squares", "longest", "compute_s", "data_s", "step_s")


@dataclass(frozen=True)
class Measured:
    """The last complete steps of the latest attempt: S steps of W ranks."""

    step: Ints  # [S]
    features: Features  # [S, W]
    compute_s: Floats  # [S, W]
    data_s: Floats  # [S, W]
    step_s: Floats  # [S] mean over ranks
    load: Floats  # [S] of the global batch

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
    def remainder_s(self) -> Floats:
        """What a step takes beyond its slowest rank's loading and computing, [S].

        Communication, the optimizer, the loop: all that comes after the last gradient.
        """
        return np.asarray(self.step_s - (self.data_s + self.compute_s).max(axis=1))

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
            step_s=self.step_s[first:],
            load=self.load[first:],
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


def read(connection: sa.Connection, run: int, steps: int, cells: int) -> State:
    """A run's state and the newest complete steps of its latest attempt.

    Args:
        connection: to read from.
        run: key of the run.
        steps: so many,
        cells: but no more than so many ranks' steps.
    """
    version, policy, parameters, effective = connection.execute(
        sa.select(
            switches.c.version,
            switches.c.policy,
            switches.c.parameters,
            switches.c.effective_step,
        )
        .where(switches.c.run == run)
        .order_by(switches.c.version.desc())
        .limit(1)
    ).one()
    state = State(version, policy, parameters)
    hello = runs.hello(connection, run)
    loaded = history.load(connection, run)
    if hello is None or loaded is None:
        return state
    steps = max(_FEWEST, min(steps, cells // hello.world))
    measured = _read_steps(connection, run, hello, loaded[0].step, steps)
    steady = _planned(connection, run, hello.attempt, version, measured.step)
    if effective is not None:
        steady &= measured.step >= effective + WARMUP_STEPS
    return replace(state, history=loaded[0], window=loaded[1], measured=measured, steady=steady)


def _read_steps(
    connection: sa.Connection, run: int, hello: Hello, upto: int, steps: int
) -> Measured:
    """Incomplete steps do not count: some of the newest always are."""
    c, world = worker_steps.c, hello.world
    found = connection.execute(
        sa.select(c.step, c.rank, *(c[name] for name in _COLUMNS))
        .where(
            c.run == run, c.attempt == hello.attempt, c.step >= upto - 2 * steps - hello.lookahead
        )
        .order_by(c.step, c.rank)
    ).all()
    table = np.array([tuple(row) for row in found], np.float64).reshape(-1, 2 + len(_COLUMNS))
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
        step_s=column["step_s"].mean(axis=1),
        load=column["load"].sum(axis=1),
    )


def _planned(
    connection: sa.Connection, run: int, attempt: int, version: int, step: Ints
) -> npt.NDArray[np.bool_]:
    """Which steps a controller planned by this version of the policy, [S]."""
    mine = np.zeros(len(step), bool)
    if not len(step):
        return mine
    c = segments.c
    rows = connection.execute(
        sa.select(c.first_step, c.steps).where(
            c.run == run,
            c.attempt == attempt,
            c.version == version,
            c.source == "controller",
            c.first_step + c.steps > int(step[0]),
        )
    )
    for first, steps in rows:
        mine |= (step >= first) & (step < first + steps)
    return mine


def steady_time(measured: Measured, steady: npt.NDArray[np.bool_]) -> tuple[float | None, int]:
    """Seconds per unit of load under the policy in force, and in how many steps; None: too few."""
    count = int(steady.sum())
    if count < _FEWEST:
        return None, count
    return float(measured.step_s[steady].sum() / measured.load[steady].sum()), count


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
