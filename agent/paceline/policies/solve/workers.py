"""Workers' models for compiled code, and lower bounds of a step's time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.policies.values import Floats, Ints, Models


class Workers(NamedTuple):
    """Models of the workers' times, in arrays: worker j takes T_j = a_j·Λ' + c_j·n + b_j seconds.

    Λ' is the effective load of the worker's n samples; without samples, the time is 0. `most` is
    the maximum number of samples of each worker in a step.
    """

    a: Floats  # [W] s per size unit
    c: Floats  # [W] s per sample
    b: Floats  # [W] s per step
    most: Ints  # [W]

    @staticmethod
    def of(models: Models, most: Ints) -> Workers:
        """Convert models to the array types for which the code is compiled."""
        a, c, b = (np.array(values, np.float64) for values in (models.a, models.c, models.b))
        return Workers(a, c, b, np.array(most, np.int64))

    def only(self, among: npt.NDArray[np.bool_]) -> Workers:
        """Return the workers for which `among`, [W], is True."""
        return Workers(self.a[among], self.c[among], self.b[among], self.most[among])


def most_of(limits: Ints | None, samples: int, world: int) -> Ints:
    """Return each worker's maximum number of samples in a step of `samples` samples, [W].

    `limits` are the workers' memory limits, [W]. If they allow fewer than `samples` samples in
    total, they are ignored.
    """
    if limits is None or int(np.sum(limits)) < samples:
        return np.full(world, samples, np.int64)
    return np.asarray(limits, np.int64)


def descending(values: Floats) -> Ints:
    """Return the positions of values in descending order, [n]; values must be finite and ≥ 0.

    Values that are equal after rounding to float32 keep their order. The radix sort is several
    times faster than a stable sort of doubles.
    """
    largest = float(values.max(initial=0.0)) or 1.0
    bits = ~(values / largest + 0.0).astype(np.float32).view(np.uint32)
    order = np.argsort(bits.astype(np.uint16), kind="stable")
    return np.asarray(order[np.argsort((bits >> 16).astype(np.uint16)[order], kind="stable")])


def level(sizes: Floats, workers: Workers) -> float:
    """Return the time at which all workers would end if samples were perfectly divisible.

    `sizes` has the cost f(λ) of each sample, [n]; only their mean is used. A worker whose fixed
    time b is longer than the result gets no samples; memory limits are ignored.
    """
    if not len(sizes):
        return 0.0
    return _shared(float(len(sizes)), _rates(sizes, workers), workers)


def least(sizes: Floats, workers: Workers) -> float:
    """Return a proven lower bound of the time of any partition of these samples.

    `sizes` has the cost f(λ) of each sample, [n]. If no worker has a cost per sample, c, the bound
    is `level`. Otherwise the time of a sample relative to an average sample differs between the
    workers, and each sample counts with its smallest relative time.
    """
    if not len(sizes) or not workers.c.any():
        return level(sizes, workers)
    rates = _rates(sizes, workers)
    cheapest = (rates * (workers.a * sizes[:, None] + workers.c)).min(axis=1)
    return _shared(float(cheapest.sum()), rates, workers)


def _rates(sizes: Floats, workers: Workers) -> Floats:
    """Return the number of average samples that each worker computes in a second, [W]."""
    return np.asarray(1.0 / np.maximum(workers.a * sizes.mean() + workers.c, 1e-300))


def _shared(work: float, rates: Floats, workers: Workers) -> float:
    by_b = np.argsort(workers.b)
    rates, b = rates[by_b], workers.b[by_b]
    # In ascending sequence of b, each added worker lowers the common time, until b alone exceeds
    # it. So the result is the minimum over all numbers of workers.
    return float(((work + np.cumsum(rates * b)) / np.cumsum(rates)).min())
