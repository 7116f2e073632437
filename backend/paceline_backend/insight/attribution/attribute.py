"""What ranks wait for: each step's SP by cause, and what each rank has to do with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline_backend.insight.attribution.model import Bools, Rows, SpeedModel, fit
from paceline_backend.insight.attribution.split import Split, split
from paceline_backend.policies.base import Floats, Ints

CAUSES = ("data", "node", "transient", "input")

GAP = 3  # steps of usual speed that do not end a slow span
MOST_SPANS = 50  # newest slow spans that are reported per rank
_SAME = 1e-9  # relative; times that differ by less are one time, computed in another order


@dataclass(frozen=True)
class Worker:
    """A rank, over the window. `data` … `input` add up to `caused`."""

    rank: int
    factor: float | None  # time at equal load ÷ the typical rank's; None: too few steps to tell
    slow_steps: list[tuple[int, int]]  # first and last step of each span of passing slowness
    caused: float  # share of all waiting that others spend on this rank
    data: float
    node: float
    transient: float
    input: float
    hidden: float  # s a step that the rank would take longer with an equal share of the load


@dataclass(frozen=True)
class Attribution:
    """Why ranks wait for each other. K steps; `parts` add up to `sp_s`.

    SP and SE are computed from the times at which ranks are ready: data loading plus computing.
    Ranks without samples take no part.
    """

    step: Ints  # [K] steps in which at least two ranks took part
    sp_s: Floats  # [K]
    parts: Mapping[str, Floats]  # cause → s, [K]
    se: float
    waste: float
    noise: float  # relative standard deviation of a usual step
    shares: Mapping[str, float]  # cause → share of the SP of all steps; all 0 where SP is 0
    workers: list[Worker]


def attribute(rows: Rows) -> Attribution:
    """Splits each step's SP into causes.

    - data: the part that batch sizes explain, as if all ranks were equally fast;
    - node: the part that lasting speeds explain, as if all ranks had equal loads;
    - input: the part that slow data loading explains;
    - transient: the rest, passing slowdowns and noise.
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
    """One rank's slowness, whether other ranks wait for it or a smaller load hides it."""
    with_samples = took_part[:, rank]
    rest = np.where(model.passing[:, rank], model.rest[:, rank], 1.0)
    equal_s, own_equal_s = model.equal[:, 0], model.own_equal[:, rank]
    # A rank that sets `equal_s` is as fast as itself on each CPU, whatever the last bits are.
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
    """First and last step of each slow span; short gaps do not end a span."""
    spans: list[tuple[int, int]] = []
    for number in step[slow].tolist():
        if spans and number - spans[-1][1] <= GAP:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans[-MOST_SPANS:]
