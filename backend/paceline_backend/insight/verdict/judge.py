"""Computation of a verdict from the observed steps of a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline_backend.insight.verdict.data import data_of
from paceline_backend.insight.verdict.findings import Account, TimeLoss
from paceline_backend.insight.verdict.observed import ObservedSteps, Times
from paceline_backend.insight.verdict.slowness import findings_of, model_of
from paceline_backend.insight.verdict.waits import between_of, input_of, network_of, planning_of
from paceline_backend.policies.base import Floats

# Fewer steps are too few for a verdict.
FEW = 4
# A cause must cost at least this share of the wall time alone. The value lies between 0.5 %, below
# which no cause should be named, and 2 %, above which every cause should be.
LEAST = 0.0125
# From this share of their time on, ranks are reported as waiting for each other.
WAITING = 0.05


@dataclass(frozen=True)
class Verdict:
    """Causes that slow a run down, with their cost.

    Args:
        steps: number of steps with at least two ranks that the verdict uses.
        wall_s: wall time of these steps.
        waste: share of the ranks' time (`wall_s` each) that they spend waiting for slower ranks.
        noise: relative standard deviation of the time of a usual step.
        cost_s: time that all causes cost together.
        causes: active causes first; their steps are indices into `seen.step`.
        seen: the observed steps.
        part: cost of each batch ÷ cost of the mean batch of its step, [K, W]; None: too few steps.
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
        """Return the share of their time that ranks have waited since step index `at`."""
        times = Times.of(self.seen, self.seen.took_part)
        wall_s = float(times.steps_s[at:].sum())
        return float(times.waits_s(self.seen.took_part)[at:].sum()) / wall_s if wall_s else 0.0


def judge(seen: ObservedSteps) -> Verdict:
    """Find the causes of lost time and compute what each of them costs."""
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
