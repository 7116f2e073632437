"""Attribution of each step's SP to causes, and of the waiting time to ranks.

`attribute` fits the expected times (`model.fit`), divides each rank's lateness among the causes
(`split`), attributes the waiting time to the slow ranks, and sums the results up by cause and by
rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from paceline.policies.base import Floats, Ints
from paceline.wire import OBSERVED
from paceline_backend.insight.attribution.model import Bools, Rows, SpeedModel, fit
from paceline_backend.insight.attribution.thresholds import THRESHOLDS
from paceline_backend.store import Connection, records, switches
from paceline_backend.store.attempts import Placement
from paceline_backend.store.reads import Range

CAUSES = ("data", "node", "transient", "input")


_COLUMNS = ("samples", "load", "squares", "longest", "data_s", "compute_s")


@dataclass(frozen=True)
class Worker:
    """One rank's slowness, and the waiting of other ranks for it, over the analysed steps.

    `data`, `node`, `transient` and `input` are the parts of `caused` by cause; they add up to it.
    """

    rank: int
    # Computing time ÷ the typical (median) rank's computing time, at equal load. None: the rank has
    # too few steps.
    factor: float | None
    # First and last step of each temporary slowdown.
    slow_steps: list[tuple[int, int]]
    # Fraction of all ranks' waiting time in which ranks wait for this rank.
    caused: float
    data: float
    node: float
    transient: float
    input: float
    # Time that this slow rank saves because its batches are smaller than the mean batch; 0 if the
    # rank is not slow.
    hidden: float  # seconds per step


@dataclass(frozen=True)
class Attribution:
    """Causes of the time that ranks wait for each other, over K steps; `parts` add up to `sp_s`.

    A rank is ready when it has loaded and computed its batch. SE is the mean over the steps of SP ÷
    the ranks' mean time to become ready. Ranks without samples are left out.
    """

    # Steps in which at least two ranks had samples.
    step: Ints  # [K]
    sp_s: Floats  # [K]
    parts: Mapping[str, Floats]  # [K], seconds, by the name of the cause
    se: float
    # Fraction of their time that ranks spend waiting, as the mean over the steps.
    waste: float
    # Relative standard deviation of the ranks' step times from the fitted model; a robust estimate
    # that slowdowns hardly change.
    noise: float
    # Share of each cause in the sum of `sp_s`; all shares are 0 if this sum is 0.
    shares: Mapping[str, float]
    workers: list[Worker]


def attribute(rows: Rows) -> Attribution:
    """Split the SP of each step into causes.

    - data: SP that different batches would cause if all ranks were equally fast;
    - node: SP that lasting differences in speed would cause if all batches were equal;
    - input: slow data loading;
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
    # The typical rank is one of the ranks. Without the tolerance `same`, rounding could make it
    # seem slower than itself.
    slower = with_samples & (own_equal_s * rest > equal_s * (1 + THRESHOLDS.same))
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
        if spans and number - spans[-1][1] <= THRESHOLDS.gap_steps:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans[-THRESHOLDS.most_spans :]


def read_rows(
    connection: Connection, run: int, span: Range, placement: Placement | None = None
) -> Rows:
    """Return the ranks' reports of the complete steps in the range `span`.

    If `span` has no first step, the last `range_steps` steps are read. If there are more than
    `most_rows` rows, only the rows of the newest steps are read. Steps before `placement` took
    effect are left out, because the ranks ran on other nodes then.
    """
    read = records.newest_complete(
        connection,
        run,
        _COLUMNS,
        span,
        count=THRESHOLDS.range_steps,
        most_rows=THRESHOLDS.most_rows,
    )
    if placement is not None:
        read = read.since(placement.since)
    steps, columns = read.by_step(None if placement is None else len(placement.nodes))
    policy = switches.of_version(connection, run, 0)
    return Rows(
        steps.astype(np.int64),
        **dict(zip(_COLUMNS, columns, strict=True)),
        planned=policy is None or policy.policy != OBSERVED,
    )


@dataclass(frozen=True)
class Split:
    """SP and waiting time by five causes: data, node, temporary slowness, noise and input."""

    sp_s: Floats  # [K]
    # Time from a step's start until a rank is ready, as the mean over the ranks.
    mean_s: Floats  # [K]
    waste: Floats  # [K]
    sp_parts: Floats  # [5, K]
    # Time that other ranks waited for each rank, by cause.
    caused: Floats  # [5, K, W], seconds
    # Total time that ranks waited, summed over all ranks and steps.
    waited_s: float


def split(rows: Rows, took_part: Bools, model: SpeedModel) -> Split:
    """Split each step's SP, and the waiting time that each rank causes, among five causes.

    The model of a rank's step time is the cost of its batch × its slowness × its temporary
    slowness. A rank's lateness is its step time minus the time of a typical rank with the mean
    batch. The lateness is divided among the three factors by their Shapley values: the only
    division that adds up, treats equal factors equally and gives nothing to a factor without
    effect. In a step in which the temporary slowness is within the noise, its part is attributed to
    the cause "noise". The extra time of a rank's data loader, compared with the typical rank, is a
    part of its lateness, too. If a smaller load compensates for a rank's slowness (or a larger load
    for its speed), these two parts of its lateness cancel, because no rank waits for compensated
    slowness. The part of a cause in a step's SP is the difference between the last and the first
    rank's lateness due to this cause.

    While some ranks wait, their waiting time is attributed in equal parts to all ranks that still
    compute.
    """
    counted = _counted(rows, took_part, model)
    parts = _lateness(rows, took_part, model)
    parts = _cancelled(parts, counted, THRESHOLDS.least_reaction * model.equal)
    ready = np.where(took_part, rows.data_s + rows.compute_s, np.nan)
    first = np.nanargmin(ready, axis=1)
    step = np.arange(len(ready))
    behind = np.where(took_part, ready - ready[step, first][:, None], 0.0)
    parts = _positive(parts - parts[:, step, first][:, :, None], behind)
    last = np.nanargmax(ready, axis=1)
    caused_s, waited_s = _waiting(ready, took_part)
    share = np.divide(caused_s, behind, out=np.zeros_like(behind), where=behind > 0)
    members = took_part.sum(axis=1)
    longest = ready[step, last]
    return Split(
        sp_s=behind[step, last],
        mean_s=np.nansum(ready, axis=1) / members,
        waste=waited_s / (members * longest),
        sp_parts=parts[:, step, last],
        caused=parts * share,
        waited_s=float(waited_s.sum()),
    )


def _lateness(rows: Rows, took_part: Bools, model: SpeedModel) -> Floats:
    """Return each rank's lateness, compared with a typical rank with the mean batch, [5, K, W]."""
    neither, both = model.equal, model.own
    batch, speed, rest = model.typical, model.own_equal, model.rest
    data = (2 * (batch - neither) + (both - speed)) / 6
    data = data + rest * ((batch - neither) + 2 * (both - speed)) / 6
    node = (2 * (speed - neither) + (both - batch)) / 6
    node = node + rest * ((speed - neither) + 2 * (both - batch)) / 6
    left = (rest - 1) * (2 * neither + batch + speed + 2 * both) / 6
    loading = np.where(took_part, rows.data_s, np.inf)
    middle = (took_part.sum(axis=1, keepdims=True) - 1) // 2
    typical = np.take_along_axis(np.sort(loading, axis=1), middle, axis=1)
    parts = [
        data,
        node,
        np.where(model.passing, left, 0.0),
        np.where(model.passing, 0.0, left),
        np.where(took_part, rows.data_s - typical, 0.0),
    ]
    return np.where(took_part, np.stack(parts), 0.0)


def _cancelled(parts: Floats, counted: Floats, least_s: Floats) -> Floats:
    """Return `parts` in which slowness and a smaller batch that compensates for it cancel out.

    The sum of each rank's `parts`, [5, K, W], does not change. A plan reacts to slowness by giving
    the slow rank fewer samples. The other ranks then get more samples, and the plan keeps this
    division for some steps after the slowness has ended. The smaller and the larger batches both
    look like the cause "data", but they are attributed to the slowness.

    `counted` is the fraction of the part "data" that the number of samples explains, [K, W]. A
    plan's reaction that changes a rank's time by less than `least_s` seconds, [K, 1], is ignored.
    """
    data, node, passing, noise, loading = parts
    slowness = node + passing
    opposite = np.sign(data) * np.sign(slowness) < 0
    amount = np.where(opposite, np.minimum(np.abs(data), np.abs(slowness)), 0.0)
    scale = np.divide(amount, np.abs(slowness), out=np.zeros_like(data), where=opposite)
    left = data - np.sign(data) * amount
    answers = np.where(slowness > 0, counted * scale, 0.0)
    to_node, to_passing = ((answers * cause).max(axis=1) for cause in (node, passing))
    padded = np.concatenate([np.zeros(THRESHOLDS.lag_steps), to_passing])
    to_passing = sliding_window_view(padded, THRESHOLDS.lag_steps + 1).max(axis=1)
    least = least_s[:, 0]
    by_passing = (to_passing > np.maximum(to_node, least))[:, None]
    by_node = (to_node > least)[:, None] & ~by_passing
    planned = counted * left
    return np.stack(
        [
            np.where(by_passing | by_node, left - planned, left),
            node * (1 - scale) + np.where(by_node, planned, 0.0),
            passing * (1 - scale) + np.where(by_passing, planned, 0.0),
            noise,
            loading,
        ]
    )


def _counted(rows: Rows, took_part: Bools, model: SpeedModel) -> Floats:
    """Return the fraction of a batch's extra cost that its number of samples explains, [K, W].

    The extra cost is the batch's cost minus the cost of the step's mean batch.
    """
    samples = np.where(took_part, rows.samples, 0.0)
    mean = samples.sum(axis=1, keepdims=True) / took_part.sum(axis=1, keepdims=True)
    more = model.typical - model.equal
    by_count = model.equal * (samples / mean - 1)
    part = np.divide(by_count, more, out=np.zeros_like(more), where=more != 0)
    return np.asarray(np.where(took_part, np.clip(part, 0.0, 1.0), 0.0))


def _positive(parts: Floats, total: Floats) -> Floats:
    """Set negative parts to 0, and scale the others to add up to `total` over the first axis."""
    later = np.maximum(parts, 0.0)
    whole = later.sum(axis=0)
    scale = np.divide(total, whole, out=np.zeros_like(total), where=whole > 0)
    return np.asarray(later * scale)


def _waiting(ready: Floats, took_part: Bools) -> tuple[Floats, Floats]:
    """Return the seconds that other ranks waited for each rank, [K, W], and the sum by step, [K].

    A rank's seconds are its Shapley value in an airport (runway cost) game; see `split`.
    """
    # `argsort` puts NaN, the ranks without samples, last.
    order = np.argsort(ready, axis=1)
    in_order = np.take_along_axis(ready, order, axis=1)
    gaps = np.nan_to_num(np.diff(in_order, axis=1))
    waiting = np.arange(1, ready.shape[1])
    computing = np.maximum(took_part.sum(axis=1, keepdims=True) - waiting, 1)
    waits = gaps * waiting
    caused = np.zeros_like(ready)
    by_order = np.cumsum(waits / computing, axis=1)
    np.put_along_axis(caused, order[:, 1:], by_order, axis=1)
    return np.where(took_part, caused, 0.0), waits.sum(axis=1)
