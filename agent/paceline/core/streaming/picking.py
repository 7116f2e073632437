"""A step of a stream: how many samples each rank trains, and which samples of its buffer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.wire import Paces

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_HALVINGS = 60
# Largest number of swaps per rank and step.
_SWAPS = 4
# Relative to a rank's load: a rank that is this close to the target load swaps no more.
_CLOSE = 1e-3


class Speeds:
    """Step times of ranks, ``a·Λ + c·n + b`` s, as arrays, [W]."""

    def __init__(self, paces: Paces) -> None:
        self.a, self.c, self.b = np.array(paces.a), np.array(paces.c), np.array(paces.b)

    def step_s(self, counts: Ints, load: Floats) -> Floats:
        """Return each rank's step time, [W] s; 0 for a rank without samples."""
        step_s: Floats = np.where(counts > 0, self.a * load + self.c * counts + self.b, 0.0)
        return step_s

    def load_in(self, step_s: float, counts: Ints) -> Floats:
        """Return the load that each rank trains in `step_s` seconds, [W]."""
        load: Floats = (step_s - self.b - self.c * counts) / self.a
        return load


def counts_in_time(total: int, typical: Floats, most: Ints, speeds: Speeds) -> Ints:
    """Return each rank's number of samples, so that all ranks end together, [W].

    The step has `total` samples, at most the sum of `most` [W], the samples that each rank has.
    `typical` is the mean size in each rank's buffer, [W].
    """
    each_s = speeds.a * typical + speeds.c

    def counts_at(step_s: float) -> Floats:
        counts: Floats = np.clip((step_s - speeds.b) / each_s, 0, most)
        return counts

    low, high = 0.0, float((speeds.b + each_s * most).max())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if counts_at(middle).sum() < total else (low, middle)
    counts = np.floor(counts_at(high) + 1e-9).astype(np.int64)
    while (extra := int(counts.sum()) - total) > 0:
        counts[np.argsort(-counts, kind="stable")[:extra]] -= 1
    while (missing := total - int(counts.sum())) > 0:
        able = np.flatnonzero(counts < most)
        after_s = speeds.b[able] + each_s[able] * (counts[able] + 1)
        counts[able[np.argsort(after_s, kind="stable")[:missing]]] += 1
    return counts


def loads_in_time(counts: Ints, typical: Floats, speeds: Speeds) -> tuple[float, Floats]:
    """Return the time at which all ranks should end, in s, and each rank's load until then, [W].

    The loads add up to those of typical samples. So no kind of sample stays behind for long.
    """
    busy = np.flatnonzero(counts)
    inverse = 1.0 / speeds.a[busy]
    waiting = ((speeds.b + speeds.c * counts)[busy] * inverse).sum()
    step_s = float(((counts * typical)[busy].sum() + waiting) / inverse.sum())
    return step_s, speeds.load_in(step_s, counts)


def picked(sizes: Floats, count: int, load: float | None, due: Bools) -> Ints:
    """Return places in a rank's buffer of the samples that it trains in a step, [count].

    These are its first samples. Some of them are exchanged for later ones if that brings their
    total size nearer to `load`; None: any load. `sizes` is λ of the buffer's samples. Of the `due`
    samples, which have waited for long, those among the first `count` are not exchanged.
    """
    places = np.arange(count)
    if load is None or count in (0, len(sizes)):
        return places
    free = np.flatnonzero(~due[:count])
    rest = np.arange(count, len(sizes))
    rest = rest[np.argsort(sizes[rest], kind="stable")]
    for _ in range(_SWAPS):
        off = load - float(sizes[places].sum())
        if not len(free) or abs(off) <= _CLOSE * load:
            break
        wanted = sizes[places[free]] + off
        after = np.searchsorted(sizes[rest], wanted)
        near = np.clip(np.stack([after - 1, after]), 0, len(rest) - 1)
        error = np.abs(sizes[rest[near]] - wanted)
        side, best = np.unravel_index(int(error.argmin()), error.shape)
        if error[side, best] >= abs(off):
            break
        at = int(near[side, best])
        places[free[best]], rest[at] = rest[at], places[free[best]]
        rest = rest[np.argsort(sizes[rest], kind="stable")]
    return places
