"""Database reads that prepare the input of a verdict."""

from __future__ import annotations

import numpy as np

from paceline_backend.insight.verdict.observed import ObservedSteps
from paceline_backend.policies.base import Floats, Ints
from paceline_backend.store import Connection, records, segments, switches
from paceline_backend.store.attempts import Placement
from paceline_backend.store.reads import Range

# A verdict covers this many steps unless the caller gives a range.
STEPS = 500
# A verdict over this many takes a second or two.
_MOST_PAIRS = 5e7  # pairs of steps × ranks
# At most this many rows are read. Of a longer range these are the newest steps.
MOST_ROWS = 100_000

# These presets divide each global batch by sizes and speeds, unless their parameter `batches` names
# another preset.
BALANCE = ("paceline", "paceline-relaxed")
_COLUMNS = ("samples", "load", "squares", "longest", "data_s", "compute_s", "sync_s")
_MORE = ("step_s", "ended_at", "segment", "attempt")


def read_observed(
    connection: Connection, run: int, span: Range, placement: Placement | None = None
) -> ObservedSteps:
    """Return the ranks' reports of the complete steps in a range.

    Without a first step, `span` covers the last `STEPS` steps. Of more than `MOST_ROWS` rows, only
    the newest steps are read. Steps before the given placement of ranks are left out, because ranks
    were on other nodes; None: the placement is unknown.
    """
    read = records.newest_complete(
        connection, run, _COLUMNS + _MORE, span, count=STEPS, most_rows=MOST_ROWS
    )
    if placement is not None:
        read = read.since(placement.since)
    # The time to compute a verdict grows with the square of the number of steps.
    width = max(len(np.unique(read.table[:, 1])), 1)
    newest = np.unique(read.table[:, 0])[-int(np.sqrt(_MOST_PAIRS / width)) :]
    read = read.since(int(newest.min(initial=0)))
    steps, columns = read.by_step(None if placement is None else len(placement.nodes))
    world = columns.shape[2]
    given = dict(zip(_COLUMNS + _MORE, columns, strict=True))
    step = steps.astype(np.int64)
    apart, attempt = np.zeros(len(step), bool), _first_known(given["attempt"])
    if len(step):
        for number, first, end in segments.apart(connection, run, int(step[0]), int(step[-1])):
            apart |= (attempt == number) & (step >= first) & (step < end)
    segment = _first_known(given["segment"])
    nodes = () if placement is None else tuple(placement.nodes)
    version = _versions(connection, run, attempt, segment)
    last = int(version[version >= 0][-1]) if (version >= 0).any() else 0
    in_force = switches.of_version(connection, run, last)
    newest = attempt[~np.isnan(attempt)][-1:].astype(int).tolist()
    equal = any(segments.equal_because(connection, run, number) for number in newest)
    return ObservedSteps(
        step=step,
        samples=given["samples"],
        load=given["load"],
        squares=given["squares"],
        longest=given["longest"],
        data_s=given["data_s"],
        compute_s=given["compute_s"],
        sync_s=given["sync_s"],
        between_s=_between(step, given),
        first=np.diff(segment, prepend=np.nan) != 0,
        apart=apart,
        nodes=nodes if len(nodes) == world else (),
        switched=_switched(step, version),
        policy="" if in_force is None else in_force.policy,
        balances=in_force is not None and not equal and _balances(in_force),
        equal=equal,
    )


def _balances(policy: switches.Switch) -> bool:
    return policy.parameters.get("batches", policy.policy) in BALANCE


def _versions(connection: Connection, run: int, attempt: Floats, segment: Floats) -> Ints:
    """Return the policy version that planned each step, [K]; -1: unknown."""
    version = np.full(len(segment), -1)
    for number in np.unique(attempt[~np.isnan(attempt)]):
        mine = attempt == number
        span = int(np.nanmin(segment[mine])), int(np.nanmax(segment[mine]))
        for first, planned in segments.versions(connection, run, int(number), span):
            version[mine & (segment >= first)] = planned
    return version


def _switched(step: Ints, version: Ints) -> list[int]:
    known = version >= 0
    return [int(at) for at in step[known][1:][np.diff(version[known]) != 0]]


def _first_known(values: Floats) -> Floats:
    if not values.size:
        return np.empty(len(values))
    at = np.argmax(~np.isnan(values), axis=1)
    return np.asarray(values[np.arange(len(values)), at])


def _between(step: Ints, given: dict[str, Floats]) -> Floats:
    """Return the seconds after each step in which no rank loads, computes or reduces, [K].

    A rank's next step starts when its batch has arrived. The time after the last step and between
    two attempts is unknown; the usual value is returned there.
    """
    out = np.zeros(len(step))
    if len(step) < 2 or not given["ended_at"].shape[1]:
        return out
    began_at = given["ended_at"] - given["step_s"]
    busy_s = given["compute_s"][:-1] + given["sync_s"][:-1] + given["data_s"][1:]
    idle_s = np.diff(began_at, axis=0) - busy_s
    known = ~np.isnan(idle_s) & (np.diff(given["attempt"], axis=0) == 0)
    known &= (np.diff(step) == 1)[:, None]
    least = np.where(known, idle_s, np.inf).min(axis=1)
    there = np.isfinite(least)
    out[:] = np.median(np.maximum(least[there], 0.0)) if there.any() else 0.0
    out[:-1][there] = np.maximum(least[there], 0.0)
    return out
