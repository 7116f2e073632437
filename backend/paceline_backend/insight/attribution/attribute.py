"""Attribution of each step's SP to causes, and of the waiting time to ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline_backend.insight.attribution.model import Bools, Rows, SpeedModel, fit
from paceline_backend.insight.attribution.split import Split, split
from paceline_backend.policies.base import Floats, Ints

CAUSES = ("data", "node", "transient", "input")

# A slow span does not end at a gap of up to this many steps of usual speed.
GAP = 3
# For each rank, report only this many of the newest slow spans.
MOST_SPANS = 50
# Smaller differences come from rounding in another order of computation.
_SAME = 1e-9  # relative


@dataclass(frozen=True)
class Worker:
    """One rank's slowness and its contribution to waiting, over the analysed steps.

    `data`, `node`, `transient` and `input` are shares of all waiting. They add up to `caused`.
    """

    rank: int
    # Time at equal load ÷ the typical rank's time. None: the rank has too few steps.
    factor: float | None
    # First and last step of each temporary slowdown.
    slow_steps: list[tuple[int, int]]
    # Share of all waiting that other ranks spend waiting for this rank.
    caused: float
    data: float
    node: float
    transient: float
    input: float
    # Extra time that a step would take on this rank if the load were divided equally.
    hidden: float  # seconds per step


@dataclass(frozen=True)
class Attribution:
    """Causes of the time that ranks wait for each other, over K steps; `parts` add up to `sp_s`.

    SP and SE are computed from the times at which ranks become ready: data loading plus computing.
    Ranks without samples are left out.
    """

    # Steps in which at least two ranks had samples.
    step: Ints  # [K]
    sp_s: Floats  # [K]
    # Part of `sp_s` by cause.
    parts: Mapping[str, Floats]  # [K], seconds
    se: float
    waste: float
    # Relative standard deviation of the time of a usual step.
    noise: float
    # Share of each cause in the SP of all steps; all 0 where SP is 0.
    shares: Mapping[str, float]
    workers: list[Worker]


def attribute(rows: Rows) -> Attribution:
    """Split the SP of each step into causes.

    - data: the part that batch sizes explain, as if all ranks were equally fast;
    - node: the part that lasting differences in speed explain, as if all ranks had equal loads;
    - input: the part that slow data loading explains;
    - transient: the rest, that is, temporary slowdowns and noise.
    """
    rows = rows.of(rows.took_part.sum(axis=1) >= 2)
    world = rows.compute_s.shape[1]
    if not len(rows.step):
        return _nothing(rows.step, world)
    took_part = rows.took_part
    model = fit(rows, took_part)
    made = split(rows, took_part, model)
    data, node, passing, noise, loading = made.sp_parts
    parts = dict(zip(CAUSES, (data, node, passing + noise, loading), strict=True))
    total = float(made.sp_s.sum())
    return Attribution(
        step=rows.step,
        sp_s=made.sp_s,
        parts=parts,
        se=float((made.sp_s / made.mean_s).mean()),
        waste=float(made.waste.mean()),
        noise=model.noise,
        shares={name: float(part.sum()) / total if total else 0.0 for name, part in parts.items()},
        workers=[_worker(rows.step, took_part, model, made, rank) for rank in range(world)],
    )


def _nothing(step: Ints, world: int) -> Attribution:
    nothing = dict.fromkeys(CAUSES, 0.0)
    workers = [
        Worker(rank, factor=None, slow_steps=[], caused=0.0, **nothing, hidden=0.0)
        for rank in range(world)
    ]
    return Attribution(
        step=step,
        sp_s=np.empty(0),
        parts={name: np.empty(0) for name in CAUSES},
        se=0.0,
        waste=0.0,
        noise=0.0,
        shares=nothing,
        workers=workers,
    )


def _worker(step: Ints, took_part: Bools, model: SpeedModel, made: Split, rank: int) -> Worker:
    with_samples = took_part[:, rank]
    rest = np.where(model.passing[:, rank], model.rest[:, rank], 1.0)
    equal_s, own_equal_s = model.equal[:, 0], model.own_equal[:, rank]
    # The tolerance `_SAME` keeps the rank that defines `equal_s` from seeming slower than itself,
    # whatever the CPU's rounding.
    slower = with_samples & (own_equal_s * rest > equal_s * (1 + _SAME))
    longer_s = np.where(slower, (own_equal_s - model.own[:, rank]) * rest, 0.0)
    caused = made.caused[:, :, rank].sum(axis=1)
    data, node, passing, noise, loading = (
        caused / made.waited_s if made.waited_s else np.zeros_like(caused)
    ).tolist()
    factor = float(model.factor[rank])
    return Worker(
        rank=rank,
        factor=None if np.isnan(factor) else factor,
        slow_steps=_spans(step, rest > 1),
        caused=data + node + passing + noise + loading,
        data=data,
        node=node,
        transient=passing + noise,
        input=loading,
        hidden=max(float(longer_s.mean()), 0.0),
    )


def _spans(step: Ints, slow: Bools) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for number in step[slow].tolist():
        if spans and number - spans[-1][1] <= GAP:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans[-MOST_SPANS:]
