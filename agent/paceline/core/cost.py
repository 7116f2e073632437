"""The effective load of a batch: its cost relative to other batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.batch_limits.shapes import raised

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Features(NamedTuple):
    """The properties that determine the cost of batches: arrays of equal shape."""

    samples: Ints  # n
    load: Floats  # Λ = Σλ
    squares: Floats  # Σλ²
    longest: Floats  # max λ; 0 for an empty batch


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rule that computes a batch's effective load from the sizes of its samples.

    Step times are linear in the effective load. The load of a sample of size λ is f(λ) = λ + κ·λ².
    κ is above 0 if a sample's cost grows faster than its length, as with attention. The load of a
    batch of n samples is Σ f(λ), or n · f(max λ) if samples are padded to the longest one.
    """

    # κ in f(λ), per size unit; ≥ 0
    kappa: float = 0.0
    padded: bool = False

    def sizes(self, sizes: Floats) -> Floats:
        """Return the load f(λ) of each sample."""
        return sizes + self.kappa * sizes**2 if self.kappa else sizes

    def load(self, of: Features) -> Any:
        """Return the effective load of each batch."""
        if self.padded:
            return of.samples * (of.longest + self.kappa * of.longest**2)
        return of.load + self.kappa * of.squares if self.kappa else of.load


class PaddedCost(Cost, frozen=True, forbid_unknown_fields=True):
    """The cost of batches that are padded to a multiple of a length; see `Shapes.length`."""

    grid: float = 0.0  # in the unit of the sizes

    def sizes(self, sizes: Floats) -> Floats:
        """Return the load f(λ) of each sample, with its size λ rounded up to the grid."""
        return super().sizes(raised(sizes, self.grid))

    def load(self, of: Features) -> Any:
        """Return the effective load of each batch; its longest sample is rounded up to the grid."""
        return super().load(of._replace(longest=raised(of.longest, self.grid)))


SUM = Cost()


def features(sizes: Floats, counts: Ints) -> Features:
    """Return the features of consecutive batches.

    `sizes` has the samples' sizes λ, batch after batch. `counts` has each batch's number of
    samples, in an array of any shape, in C order.
    """
    counts = np.asarray(counts, np.int64)
    ends = np.cumsum(counts.ravel())
    starts = ends - counts.ravel()
    load, squares = (
        (running[ends] - running[starts]).reshape(counts.shape)
        for running in (
            np.concatenate([[0.0], np.cumsum(sizes)]),
            np.concatenate([[0.0], np.cumsum(sizes**2)]),
        )
    )
    longest = np.zeros(counts.size)
    filled = np.flatnonzero(counts.ravel())
    if len(filled):
        longest[filled] = np.maximum.reduceat(sizes, starts[filled])
    return Features(counts, load, squares, longest.reshape(counts.shape))
