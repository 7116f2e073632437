"""Splits each rank's lateness into causes, and the waiting among the ranks that caused it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from paceline_backend.insight.attribution.model import Bools, Rows, SpeedModel
from paceline_backend.policies.base import Floats

_LAG = 64  # plans rest on so many steps; that long they may answer to a slowness that has passed
_LEAST = 0.02  # share of a step's time below which a plan's answer to slowness does not count


@dataclass(frozen=True)
class Split:
    """How late ranks were ready, and why: data, node, passing slowness, noise, input."""

    sp_s: Floats  # [K] from the first rank that is ready to the last
    mean_s: Floats  # [K] mean time until a rank is ready
    waste: Floats  # [K] share of the ranks' time spent waiting
    sp_parts: Floats  # [5, K] `sp_s` by cause
    caused: Floats  # [5, K, W] s that others waited for each rank, by cause
    waited_s: float  # s that all ranks waited in all steps


def split(rows: Rows, took_part: Bools, model: SpeedModel) -> Split:
    """Splits each step's straggler effect.

    A rank's step time is a product of its batch, its speed and its passing slowness. The rank's
    lateness against a typical rank with the mean batch is divided among these three by their
    Shapley values: the only division that adds up, treats causes alike and gives nothing to a cause
    without effect. The time of a slow loader is added. Where a rank's smaller load makes up for its
    slowness (or a larger load for its speed), the two cancel, because slowness that balancing hides
    makes no rank wait. The SP of a step is the difference between its last and its first rank,
    cause by cause.

    Waiting is charged in equal parts to all ranks that still compute while others wait.
    """
    counted = _counted(rows, took_part, model)
    parts = _lateness(rows, took_part, model)
    parts = _cancelled(parts, counted, _LEAST * model.equal)
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
    """Each rank's time minus the typical rank's time for the mean batch, by cause, [5, K, W]."""
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
    """The parts without slowness that a smaller batch makes up for; their sums stay the same.

    A plan answers to slowness by giving the slow rank fewer samples. The other ranks then get more,
    and the plan does so for some steps after the slowness has passed. Both effects look like data
    but are charged to the slowness.

    Args:
        parts: by cause, [5, K, W].
        counted: share of `data` due to the number of samples, [K, W].
        least_s: smaller answers to slowness do not count, [K, 1].
    """
    data, node, passing, noise, loading = parts
    slowness = node + passing
    opposite = np.sign(data) * np.sign(slowness) < 0
    amount = np.where(opposite, np.minimum(np.abs(data), np.abs(slowness)), 0.0)
    scale = np.divide(amount, np.abs(slowness), out=np.zeros_like(data), where=opposite)
    left = data - np.sign(data) * amount
    answers = np.where(slowness > 0, counted * scale, 0.0)
    to_node, to_passing = ((answers * cause).max(axis=1) for cause in (node, passing))
    padded = np.concatenate([np.zeros(_LAG), to_passing])
    to_passing = sliding_window_view(padded, _LAG + 1).max(axis=1)
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
    """Share of a batch's cost above or below the mean that is due to its count, 0 … 1."""
    samples = np.where(took_part, rows.samples, 0.0)
    mean = samples.sum(axis=1, keepdims=True) / took_part.sum(axis=1, keepdims=True)
    more = model.typical - model.equal
    by_count = model.equal * (samples / mean - 1)
    part = np.divide(by_count, more, out=np.zeros_like(more), where=more != 0)
    return np.asarray(np.where(took_part, np.clip(part, 0.0, 1.0), 0.0))


def _positive(parts: Floats, total: Floats) -> Floats:
    """Parts ≥ 0 that add up to `total`: negative parts reduce the positive ones in proportion."""
    later = np.maximum(parts, 0.0)
    whole = later.sum(axis=0)
    scale = np.divide(total, whole, out=np.zeros_like(total), where=whole > 0)
    return np.asarray(later * scale)


def _waiting(ready: Floats, took_part: Bools) -> tuple[Floats, Floats]:
    """Seconds that others waited for each rank, [K, W], and all waiting of each step, [K].

    From one rank's being ready to the next one's, those who are ready wait for all who are not:
    the Shapley value of a cost game like that of an airport's runway.
    """
    order = np.argsort(ready, axis=1)  # NaN last
    in_order = np.take_along_axis(ready, order, axis=1)
    gaps = np.nan_to_num(np.diff(in_order, axis=1))
    waiting = np.arange(1, ready.shape[1])
    computing = np.maximum(took_part.sum(axis=1, keepdims=True) - waiting, 1)
    waits = gaps * waiting
    caused = np.zeros_like(ready)
    by_order = np.cumsum(waits / computing, axis=1)
    np.put_along_axis(caused, order[:, 1:], by_order, axis=1)
    return np.where(took_part, caused, 0.0), waits.sum(axis=1)
