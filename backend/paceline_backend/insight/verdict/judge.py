"""The verdict over a range of steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline_backend.insight.verdict.data import data_of
from paceline_backend.insight.verdict.findings import Account, TimeLoss
from paceline_backend.insight.verdict.observed import ObservedSteps, Times
from paceline_backend.insight.verdict.slowness import findings_of, model_of
from paceline_backend.insight.verdict.waits import between_of, input_of, network_of, planning_of
from paceline_backend.policies.base import Floats

FEW = 4  # with fewer steps nothing can be told
# Share of the wall time that a cause must cost alone: between 0.5 %, below which nothing is named,
# and 2 %, from which on everything is.
LEAST = 0.0125
WAITING = 0.05  # share of the ranks' time from which on they are said to wait for each other


@dataclass(frozen=True)
class Verdict:
    """Who holds a run up, why, since when, and what it costs.

    Args:
        steps: how many steps with at least two ranks it rests on.
        wall_s: their wall time.
        waste: share of the ranks' time, all of `wall_s`, that waits for slower ranks.
        noise: relative standard deviation of a usual step.
        cost_s: what all causes cost together.
        causes: what goes on first; steps are indices into `seen.step`.
        seen: what it rests on.
        part: what each batch costs ÷ the mean batch of its step, [K, W]; None: too few steps.
    """

    steps: int
    wall_s: float
    waste: float
    noise: float
    cost_s: float
    causes: list[TimeLoss]
    seen: ObservedSteps
    part: Floats | None = None

    def waste_since(self, at: int) -> float:
        """Share of the ranks' time since a step that waits for slower ranks."""
        times = Times.of(self.seen, self.seen.took_part)
        wall_s = float(times.steps_s[at:].sum())
        return float(times.waits_s(self.seen.took_part)[at:].sum()) / wall_s if wall_s else 0.0


def judge(seen: ObservedSteps) -> Verdict:
    """Finds the causes of lost time."""
    seen = seen.of(seen.took_part.sum(axis=1) >= 2)
    took_part = seen.took_part
    count = len(seen.step)
    if count < FEW:
        return Verdict(count, 0.0, 0.0, 0.0, 0.0, [], seen)
    times = Times.of(seen, took_part)
    unit_s = float(np.median(times.steps_s))
    planning = planning_of(seen, times, took_part, unit_s) if seen.planned else []
    model = model_of(seen, took_part)
    slow = findings_of(model)
    findings = [
        *planning,
        *input_of(Account(times, planning).without(range(len(planning))), took_part, unit_s),
        *network_of(times, unit_s),
        *between_of(times, unit_s),
        *slow,
        *data_of(model, slow, seen.apart),
    ]
    part = np.where(took_part, model.part, 0.0)
    causes = Account(times, findings, part).counting(LEAST)
    without_s = Account(times, causes, part).without(range(len(causes))).wall_s
    return Verdict(
        count,
        times.wall_s,
        float(times.waits_s(took_part).sum()) / times.wall_s,
        float(np.median(model.noise)),
        max(times.wall_s - without_s, 0.0),
        causes,
        seen,
        part,
    )
