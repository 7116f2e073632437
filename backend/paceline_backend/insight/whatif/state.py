"""State of a run for a forecast, read from the database: history, feedback and newest steps.

An observed run, whose script divides its batches itself, reports for each step the number of
samples and the computing time of each rank, but no sizes. The forecast therefore assumes that all
samples have the same size (`ASSUMES`), and treats differences between batches as noise. It shows
only the effect of the ranks' speeds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.cost import Features
from paceline.planning.feedback import Window
from paceline.planning.history import History
from paceline.policies.base import Ints
from paceline.wire import OBSERVED, Hello, Plan
from paceline_backend.insight.report import WARMUP_STEPS
from paceline_backend.insight.whatif.answer import FEWEST_FORECAST_STEPS
from paceline_backend.insight.whatif.measured import MeasuredSteps, with_spans
from paceline_backend.insight.whatif.thresholds import THRESHOLDS
from paceline_backend.store import Connection, attempts, records, rounds, runs, segments, switches
from paceline_backend.store.planning import load

_COLUMNS = ("samples", "load", "squares", "longest", "compute_s", "data_s", "sync_s", "step_s")

# The script of an observed run divides its batches like this preset.
PLAIN = "bsp"
ASSUMES = (
    "all samples count the same, because an observed script reports no sizes: if sizes differ, a "
    "managed run can save more; if the time does not depend on the samples, less"
)


@dataclass(frozen=True)
class PlanningState:
    """State from which the next segment of a run would be planned."""

    version: int
    policy: str
    parameters: dict[str, Any]
    # None if the run has no Hello yet, because its ranks have not started.
    history: History | None = None
    window: Window | None = None
    measured: MeasuredSteps | None = None
    # Mask of the steps that the policy in force planned, without its warm-up steps.
    steady: npt.NDArray[np.bool_] | None = None  # [S]
    # True if the script divides its batches itself; `policy` is then the preset that divides them
    # in the same way.
    observed: bool = False


def read(connection: Connection, run: int, steps: int, cells: int) -> PlanningState:
    """Read a run's state and at most `steps` of its newest complete steps.

    If there are many ranks, fewer steps are read, so that steps × ranks is at most `cells`. The
    limit is never below `FEWEST_FORECAST_STEPS` steps.
    """
    switch = switches.latest(connection, run)
    observed = switch.policy == OBSERVED
    policy = PLAIN if observed else switch.policy
    state = PlanningState(switch.version, policy, switch.parameters, observed=observed)
    hello = runs.hello(connection, run)
    loaded = load(connection, run)
    if hello is None or loaded is None:
        return state
    steps = max(FEWEST_FORECAST_STEPS, min(steps, cells // hello.world))
    upto = _newest_complete(connection, run, hello) + 1 if observed else loaded[0].step
    measured = _read_steps(connection, run, hello, upto, steps)
    if observed:
        features = _counted(measured.features)
        measured = replace(measured, features=features, load=features.load.sum(axis=1))
    measured = _with_segments(connection, run, hello, measured)
    steady = _planned(connection, run, hello.attempt, switch.version, measured.step)
    if switch.effective_step is not None:
        steady &= measured.step >= switch.effective_step + WARMUP_STEPS
    return replace(state, history=loaded[0], window=loaded[1], measured=measured, steady=steady)


def _read_steps(
    connection: Connection, run: int, hello: Hello, upto: int, steps: int
) -> MeasuredSteps:
    world = hello.world
    first = upto - 2 * steps - hello.lookahead
    table = records.since(connection, run, hello.attempt, world, _COLUMNS, first)
    step, count = np.unique(table[:, 0], return_counts=True)
    newest = step[count == world][-steps:]
    rows = table[np.isin(table[:, 0], newest)].reshape(len(newest), world, table.shape[1])
    column = dict(zip(_COLUMNS, np.moveaxis(rows[:, :, 2:], 2, 0), strict=True))
    return MeasuredSteps(
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
        gradient_bytes=hello.gradient_bytes,
    )


def _with_segments(
    connection: Connection, run: int, hello: Hello, measured: MeasuredSteps
) -> MeasuredSteps:
    if not len(measured):
        return measured
    kept: list[Plan] = []
    fallback = segments.newest_fallback(connection, run, hello.attempt, int(measured.step[-1]))
    measured = replace(measured, fallback=fallback)
    for relaxed in segments.relaxed(connection, run, hello, int(measured.step[0])):
        segment = relaxed.plan
        if relaxed.fallback:
            continue
        if segment is not None:
            kept.append(segment)
            continue
        # The synchronisation of this segment is unknown, so only the steps after it can be used.
        kept, measured = [], measured.since(int(np.searchsorted(measured.step, relaxed.end)))
    return with_spans(
        measured,
        kept,
        lambda seqs: rounds.newest_reduced_s(
            connection, run, hello.attempt, seqs, THRESHOLDS.newest_rounds
        ),
    )


def _planned(
    connection: Connection, run: int, attempt: int, version: int, step: Ints
) -> npt.NDArray[np.bool_]:
    planned = np.zeros(len(step), bool)
    if not len(step):
        return planned
    for first, steps in segments.planned(connection, run, attempt, version, int(step[0])):
        planned |= (step >= first) & (step < first + steps)
    return planned


def _newest_complete(connection: Connection, run: int, hello: Hello) -> int:
    """Return the newest complete step that no restart discarded; -1 if there is none."""
    spans = attempts.spans(connection, run, hello.attempt)
    row = attempts.newest_complete(connection, run, spans)
    return -1 if row is None else int(row.step)


def _counted(of: Features) -> Features:
    """Return the batches as if each sample had size 1; numbers of samples stay unchanged."""
    load = of.samples.astype(np.float64)
    return Features(of.samples, load, load, np.minimum(load, 1.0))
