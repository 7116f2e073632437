"""Reads and checks the sizes of a data set's samples, for `Session`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

logger = logging.getLogger(__name__)

# The argument `sizes`: "auto", one number per sample, or a function from a sample to its size.
Sizes = str | Sequence[float] | npt.NDArray[Any] | torch.Tensor | Callable[[Any], float]

_FIX = "give one positive number per sample, for example max(1, number of frames)"


def resolve(sizes: Sizes, dataset: Any) -> npt.NDArray[np.float64]:
    """Return the size λ of every sample, shape [N], float64, all > 0.

    A size of 0 is refused: for a batch whose sizes are all 0, the mean per unit of size would be
    0/0.

    Args:
        sizes: one number per sample; or a callable, which is called once with every sample; or
            "auto": ``dataset.sizes``, or 1 for every sample if the data set has no ``sizes``.
        dataset: a map-style data set.

    Raises:
        TypeError: sizes are not numbers.
        ValueError: sizes are missing, too few, too many, not positive or not finite.
    """
    n = len(dataset)
    source = "sizes"
    if isinstance(sizes, str):
        if sizes != "auto":
            raise TypeError(f"sizes={sizes!r} is not a list of numbers: {_FIX}")
        if not hasattr(dataset, "sizes"):
            logger.warning("no sizes given and no dataset.sizes: all samples count as equal")
            return np.ones(n)
        source, sizes = "dataset.sizes", dataset.sizes
    if sizes is None:
        raise ValueError(
            f"{source} is None: {_FIX}, or leave sizes out to count all samples as equal"
        )
    if callable(sizes):
        sizes = [sizes(dataset[index]) for index in range(n)]
    array = _numbers(sizes, source)
    if array.ndim != 1 or len(array) != n:
        shape = f"shape {list(array.shape)}" if array.ndim != 1 else f"{len(array)} entries"
        raise ValueError(f"{source} has {shape} but the data set has {n} samples: {_FIX}")
    bad = np.flatnonzero(~(np.isfinite(array) & (array > 0)))
    if len(bad):
        raise ValueError(
            f"{source}[{bad[0]}] is {array[bad[0]]:g} ({len(bad)} of {n} are invalid): sizes must "
            f"be finite and > 0; {_FIX}"
        )
    return array


def _numbers(sizes: Any, source: str) -> npt.NDArray[np.float64]:
    if isinstance(sizes, torch.Tensor):
        sizes = sizes.detach().cpu().numpy()
    try:
        return np.asarray(sizes, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{source} has an entry that is not a number ({error}): {_FIX}") from error
