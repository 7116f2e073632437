"""Names the cause of the waiting, over all ranks and for each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from paceline_backend.insight.attribution.model import FEW, Bools, Model, Rows, fit
from paceline_backend.insight.attribution.split import Split, split
from paceline_backend.policies.base import Floats, Ints

CAUSES = ("data", "node", "transient", "input")

# A cause counts from this SE on. Below it LBB (Alg. 2, FT) tunes nothing, either.
LEAST_SE = 0.05
# A passing slowness is large in few steps. It counts when it lasts `PASSING_STEPS` steps and its SE
# over all steps is `LEAST_PASSING_SE` on average.
PASSING_STEPS = 3
LEAST_PASSING_SE = 0.01
GAP = 3  # steps of usual speed that do not end a slow span
MOST_SPANS = 50  # newest slow spans that are reported per rank
_CUT = 0.3  # from this share of hidden slowness on, the rank's load was cut on purpose


@dataclass(frozen=True)
class Worker:
    """A rank, over the window. `data` … `input` add up to `caused`."""

    rank: int
    cause: str  # "data", "node", "transient", "input" or "none"; slowness that balancing hides, too
    factor: float | None  # time at equal load ÷ the typical rank's; None: too few steps to tell
    slow_steps: list[tuple[int, int]]  # first and last step of each span of passing slowness
    slow_factor: float | None  # time in these spans ÷ the usual time; None: no spans
    slow_now: bool  # the last span reaches the window's end
    caused: float  # share of all waiting that others spend on this rank
    data: float
    node: float
    transient: float
    input: float
    late_s: float  # s a step that its loader takes longer than the typical rank's
    hidden: float  # s a step that the rank would take longer with an equal share of the load
    cut: bool  # the smaller load makes up for much of the rank's slowness


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
    counted: float  # share of the data part due to numbers of samples, not to sizes
    shares: Mapping[str, float]  # cause → share of the SP of all steps; all 0 where SP is 0
    cause: str  # "data", "node", "transient", "input" or "none"
    ranks: list[int]  # ranks behind the cause, worst first; empty: no rank, or all ranks in turn
    workers: list[Worker]


def attribute(rows: Rows) -> Attribution:
    """Splits each step's SP into causes and names the one that matters.

    - data: the part that batch sizes explain, as if all ranks were equally fast;
    - node: the part that lasting speeds explain, as if all ranks had equal loads;
    - input: the part that slow data loading explains;
    - transient: the rest, passing slowdowns and noise.

    The named cause is the largest of those that count. A cause counts from an SE of 0.05 on. A
    passing slowness counts from an SE of 0.01 on, if it lasts three steps. Noise never counts.
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
    """One rank's slowness, whether other ranks wait for it or a smaller load hides it."""
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
    """The worker with cause "data" if it has no other cause and large batches make others wait."""
    guilty = worker.caused >= 0.5 / world and worker.data >= 0.5 * worker.caused
    return replace(worker, cause="data") if worker.cause == "none" and guilty else worker


def _worst(se: Mapping[str, float], slow_steps: int) -> str:
    """The cause with the largest effect among those that count."""
    least = dict.fromkeys(CAUSES, LEAST_SE)
    least["transient"] = LEAST_PASSING_SE if slow_steps >= PASSING_STEPS else np.inf
    counting = {name: value for name, value in se.items() if value >= least[name]}
    return max(counting, key=counting.__getitem__, default="none")


def _culprits(cause: str, workers: list[Worker]) -> list[int]:
    """Ranks with this cause, the worst first; none if data makes all of them slow in turn."""
    guilty = [worker for worker in workers if worker.cause == cause != "none"]
    if cause == "data":
        guilty = [worker for worker in guilty if worker.caused > 2 / len(workers)]
    return [worker.rank for worker in sorted(guilty, key=lambda worker: -worker.caused)]


def _spans(step: Ints, slow: Bools) -> list[tuple[int, int]]:
    """First and last step of each slow span; short gaps do not end a span."""
    spans: list[tuple[int, int]] = []
    for number in step[slow].tolist():
        if spans and number - spans[-1][1] <= GAP:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans[-MOST_SPANS:]
