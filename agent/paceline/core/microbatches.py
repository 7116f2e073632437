"""A batch that does not fit into memory at once, cut into micro-batches that do."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def cut(sizes: Floats, most: int) -> list[Ints]:
    """The fewest micro-batches that a batch can be cut into; their counts differ by one at most.

    Each has samples of similar sizes, so that little is padded.

    Args:
        sizes: λ of the batch's samples, [n], n ≥ 1.
        most: samples of a micro-batch, ≥ 1.

    Returns:
        places in the batch, micro-batch by micro-batch.
    """
    order = np.argsort(sizes, kind="stable")
    return np.array_split(order, -(-len(order) // most))
