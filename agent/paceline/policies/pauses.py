"""Forecast of regular pauses: single slow steps of a rank that recur at equal intervals.

`planner` calls `noticed` and `factors` for policies with `Policy.foretells`. A rank's last pauses
may be older than the oldest feedback, so they are stored in `Plan.memory`, like the allocator's
state. After three pauses the next pause is forecast. If it does not occur, the rank's pauses are
forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from paceline.policies.values import Feedback, Floats, Models, usable

# Minimum ratio of the measured to the expected time of a step with a pause.
_PAUSE_RATIO = 2.0
# Minimum number of pauses for a forecast.
_ENOUGH = 3
# A rank's pauses are regular if the distances between them differ by at most this many steps.
_OFF = 1
# Minimum distance between regular pauses, in steps; closer pauses are often regular by chance.
_APART = 8

# A rank's last pauses, oldest first: pairs of the step and its measured ÷ expected time, or 0 if
# the rank had no samples in this step.
Pauses = list[list[float]]


def noticed(memory: Mapping[str, Any], feedback: Feedback, models: Models) -> dict[str, Any]:
    """Update the record of the ranks' pauses with feedback to which `models` were fitted.

    A slow step is a pause if the rank's steps before and after it were not slow. The newest step is
    not checked yet, because the step after it is unknown. If a rank has no samples in a step where
    a pause was forecast, the step counts as a pause, except if the rank's last pause was already
    counted in this way.

    `memory` is the record that the last call returned, and is empty at first. ``judged`` is the
    last step that was checked for pauses; ``ranks`` has the `Pauses` of each rank that has paused,
    by the rank's number as text.
    """
    rows = feedback.by_step(models.world)
    if not models.known or len(rows.step) < 3:
        return dict(memory)
    steps, judged = rows.step[:, 0], int(memory.get("judged", -1))
    ranks: dict[str, Pauses] = {rank: [*of] for rank, of in memory.get("ranks", {}).items()}
    ett_s = models.ett(rows.features)
    known = usable(rows.samples, rows.load, rows.compute_s) & (ett_s > 0)
    times = np.where(known, rows.compute_s, 1.0) / np.where(known, ett_s, 1.0)
    slow = times > _PAUSE_RATIO
    new = (steps[1:-1] > judged) & (steps[2:] - steps[:-2] == 2)
    pause = slow[1:-1] & ~slow[:-2] & ~slow[2:] & new[:, None]
    for at, rank in zip(*(axis.tolist() for axis in np.nonzero(pause)), strict=True):
        of = ranks.setdefault(str(rank), [])
        of.append([int(steps[at + 1]), float(times[at + 1, rank])])
        del of[:-_ENOUGH]
    judged = max(judged, int(steps[-2]))
    for name, of in list(ranks.items()):
        forecast = _forecast(of)
        if forecast and judged > max(forecast) + _OFF:
            empty = rows.samples[np.isin(steps, forecast), int(name)] == 0
            if of[-1][1] > 0 and empty.any():
                ranks[name] = [*of[1:], [forecast[0], 0.0]]
            else:
                del ranks[name]
    return {"judged": judged, "ranks": ranks}


def factors(memory: Mapping[str, Any], first_step: int, steps: int, world: int) -> Floats | None:
    """Return the factors by which forecast pauses prolong the ranks' planned steps, [steps, W].

    The factor is 1 where no pause is forecast; the result is None if all factors are 1. `memory` is
    the result of `noticed`.
    """
    made = np.ones((steps, world))
    for rank, pauses in memory.get("ranks", {}).items():
        for step in _forecast(pauses):
            if 0 <= step - first_step < steps:
                known = [times for _, times in pauses if times > 0]
                made[step - first_step, int(rank)] = float(np.median(known))
    return made if (made > 1).any() else None


def _forecast(pauses: Sequence[Sequence[float]]) -> list[int]:
    """Return the steps in which a rank's next pause is expected; empty if none is forecast."""
    at = [int(step) for step, _ in pauses]
    distances = [later - earlier for earlier, later in pairwise(at)]
    if len(at) < _ENOUGH or min(distances) < _APART or max(distances) - min(distances) > _OFF:
        return []
    return sorted({at[-1] + distance for distance in distances})
