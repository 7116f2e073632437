"""Names the cause, overall and of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from paceline_backend.insight.attribution.model import FEW, Bools, Model, Rows, fit
from paceline_backend.insight.attribution.split import Split, split
from paceline_backend.policies.base import Floats, Ints

CAUSES = ("data", "node", "transient", "input")

# A cause counts from an SE of so much on: below, LBB (Alg. 2, FT) tunes nothing either.
LEAST_SE = 0.05
# Something that passes is large in few steps: it counts when it lasts so many, and in the mean of
# all steps makes an SE of so much. It is told from noise step by step.
PASSING_STEPS = 3
LEAST_PASSING_SE = 0.01
GAP = 3  # steps of usual speed that do not end a slow span
MOST_SPANS = 50  # of a rank, the latest
_CUT = 0.3  # of what slowness costs is hidden: more than the luck of the draw


@dataclass(frozen=True)
class Worker:
    """A rank, over the window. `data` … `input` add up to `caused`."""

    rank: int
    cause: str  # "data", "node", "transient", "input" or "none"; also what balancing hides
    factor: float | None  # time at equal load ÷ the typical rank's; None: too few steps to tell
    slow_steps: list[tuple[int, int]]  # first and last of spans in which it was slow in passing
    slow_factor: float | None  # how slow it was in them; None: there are none
    slow_now: bool  # the last span reaches the window's end
    caused: float  # share of all waiting that others waited for it
    data: float
    node: float
    transient: float
    input: float
    late_s: float  # s a step that its loader takes longer than the typical one
    hidden: float  # s a step that it would take longer if its share of the load were equal
    cut: bool  # that makes up for much of its slowness


@dataclass(frozen=True)
class Attribution:
    """Why ranks wait for each other. K steps; `parts` add up to `sp_s`.

    A step's SP and SE are those of the times at which ranks are ready: data loading and computing.
    Ranks without samples take no part.
    """

    step: Ints  # [K] those steps in which at least two ranks took part
    sp_s: Floats  # [K]
    parts: Mapping[str, Floats]  # cause → s, [K]
    se: float
    waste: float
    noise: float  # relative standard deviation of a usual step
    counted: float  # share of the data part that is from numbers of samples, not from sizes
    shares: Mapping[str, float]  # cause → share of the SP of all steps; all 0 without any
    cause: str  # "data", "node", "transient", "input" or "none"
    ranks: list[int]  # the culprits, worst first; empty: none, or all in turn
    workers: list[Worker]


def attribute(rows: Rows) -> Attribution:
    """Splits each step's SP into causes and names the one that matters.

    - data: what the sizes in the batches explain, if all ranks were equally fast;
    - node: what lasting speeds explain, if all had equal loads;
    - input: what slow data loading explains;
    - transient: the rest, slowdowns that pass and noise.

    A cause is named when it makes an SE of 0.05 (one that passes: 0.01 in the mean, over at least
    three steps; noise never), and is the largest of those.
    """
    rows = rows.of(rows.took_part.sum(axis=1) >= 2)
    world = rows.compute_s.shape[1]
    if not len(rows.step):
        return _nothing(rows.step, world)
    took_part = rows.took_part
    model = fit(rows, took_part)
    made = split(rows, took_part, model)
    slow = model.passing & (model.rest > 1)
    workers = [_worker(rows.step, took_part, model, made, rank) for rank in range(world)]
    cause = "none"
    if len(rows.step) >= FEW:
        data, node, passing, _, loading = (made.sp_parts / made.mean_s).mean(axis=1)
        se = dict(zip(CAUSES, (data, node, passing, loading), strict=True))
        cause = _worst(se, int(slow.sum(axis=0).max()))
    if cause == "data":
        workers = [_with_data(worker, world) for worker in workers]
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
        counted=made.counted,
        shares={name: float(part.sum()) / total if total else 0.0 for name, part in parts.items()},
        cause=cause,
        ranks=_culprits(cause, workers),
        workers=workers,
    )


def _nothing(step: Ints, world: int) -> Attribution:
    causes = dict.fromkeys(CAUSES, 0.0)
    workers = [
        Worker(
            rank=rank,
            cause="none",
            factor=None,
            slow_steps=[],
            slow_factor=None,
            slow_now=False,
            caused=0.0,
            **causes,
            late_s=0.0,
            hidden=0.0,
            cut=False,
        )
        for rank in range(world)
    ]
    return Attribution(
        step=step,
        sp_s=np.empty(0),
        parts={name: np.empty(0) for name in CAUSES},
        se=0.0,
        waste=0.0,
        noise=0.0,
        counted=0.0,
        shares=causes,
        cause="none",
        ranks=[],
        workers=workers,
    )


def _worker(step: Ints, took_part: Bools, model: Model, made: Split, rank: int) -> Worker:
    """A rank's own slowness, whether others wait for it or its smaller load hides it."""
    with_samples = took_part[:, rank]
    rest = np.where(model.passing[:, rank], model.rest[:, rank], 1.0)
    slow = rest > 1
    equal_s, own_equal_s = model.equal[:, 0], model.own_equal[:, rank]
    extra_s = np.where(with_samples, np.maximum(own_equal_s * rest - equal_s, 0.0), 0.0)
    longer_s = np.where(extra_s > 0, (own_equal_s - model.own[:, rank]) * rest, 0.0)
    hidden_s = max(float(longer_s.mean()), 0.0)
    late_s = float(np.median(made.late_s[with_samples, rank])) if with_samples.any() else 0.0
    step_s = float(made.mean_s.mean())
    se = {
        "node": float(np.where(with_samples, own_equal_s - equal_s, 0.0).mean()) / step_s,
        "transient": float(np.where(slow, own_equal_s * (rest - 1), 0.0).mean()) / step_s,
        "input": late_s / step_s,
    }
    caused = made.caused[:, :, rank].sum(axis=1)
    data, node, passing, noise, loading = (
        caused / made.waited_s if made.waited_s else np.zeros_like(caused)
    ).tolist()
    factor = float(model.factor[rank])
    return Worker(
        rank=rank,
        cause=_worst(se, int(slow.sum())) if len(step) >= FEW else "none",
        factor=None if np.isnan(factor) else factor,
        slow_steps=_spans(step, slow),
        slow_factor=float(np.median(rest[slow])) if slow.any() else None,
        slow_now=bool(slow[-GAP:].any()),
        caused=data + node + passing + noise + loading,
        data=data,
        node=node,
        transient=passing + noise,
        input=loading,
        late_s=late_s,
        hidden=hidden_s,
        cut=hidden_s > _CUT * float(extra_s.mean()),
    )


def _with_data(worker: Worker, world: int) -> Worker:
    """A rank that nothing else ails, where data is the cause: does it take part in that?"""
    guilty = worker.caused >= 0.5 / world and worker.data >= 0.5 * worker.caused
    return replace(worker, cause="data") if worker.cause == "none" and guilty else worker


def _worst(se: Mapping[str, float], slow_steps: int) -> str:
    """The cause with the largest effect, of those that count."""
    least = dict.fromkeys(CAUSES, LEAST_SE)
    least["transient"] = LEAST_PASSING_SE if slow_steps >= PASSING_STEPS else np.inf
    counting = {name: value for name, value in se.items() if value >= least[name]}
    return max(counting, key=counting.__getitem__, default="none")


def _culprits(cause: str, workers: list[Worker]) -> list[int]:
    """Ranks of that cause, the worst first; none if data makes all of them slow in turn."""
    guilty = [worker for worker in workers if worker.cause == cause != "none"]
    if cause == "data":
        guilty = [worker for worker in guilty if worker.caused > 2 / len(workers)]
    return [worker.rank for worker in sorted(guilty, key=lambda worker: -worker.caused)]


def _spans(step: Ints, slow: Bools) -> list[tuple[int, int]]:
    """First and last step of each time of slowness, short gaps left out."""
    spans: list[tuple[int, int]] = []
    for at in step[slow].tolist():
        if spans and at - spans[-1][1] <= GAP:
            spans[-1] = (spans[-1][0], at)
        else:
            spans.append((at, at))
    return spans[-MOST_SPANS:]
