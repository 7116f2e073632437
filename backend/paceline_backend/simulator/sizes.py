"""Sizes of a simulated data set: drawn from a distribution, or read from a file."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Salt that makes draws of sizes differ from draws of devices, which use the same seed.
_SALT = 0x51


class SizesError(ValueError):
    """A file of sizes that cannot be used."""


class Sizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sizes of a data set: drawn from a distribution, or read from a file with all sizes.

    The distribution has the mean `mean` and the standard deviation `dif` (DIF). Draws are clipped
    to `min` (default: a hundredth of the mean) and `max`. Clipping changes the mean and the DIF of
    a normal distribution if the DIF is near the mean; it hardly changes gamma and lognormal
    distributions. `file` is a .txt, .csv or .npy file; `column` is the column with the sizes in a
    .csv file.
    """

    distribution: Literal["constant", "uniform", "normal", "lognormal", "gamma"] | None = None
    samples: int = 0
    mean: float = 1.0
    dif: float = 0.0
    min: float | None = None
    max: float | None = None
    file: str | None = None
    column: str | None = None

    def defect(self) -> str | None:
        """Return a message about the first field with an illegal value; None if all are legal."""
        if (self.distribution is None) == (self.file is None):
            return "sizes: give either distribution or file"
        if self.file is not None:
            if Path(self.file).suffix not in _READERS:
                return f"sizes.file: {self.file}; give a file that ends in {', '.join(_READERS)}"
            return None
        if self.samples < 1:
            return f"sizes.samples: {self.samples}; give the number of samples of the data set"
        for name, value in (("mean", self.mean), ("dif", self.dif)):
            if not 0 <= value < math.inf or (name == "mean" and value == 0):
                return f"sizes.{name}: {value}; give a number above 0"
        low, high = self._bounds()
        if not 0 < low <= high:
            return f"sizes.min: {low} to sizes.max: {high}; give 0 < min ≤ max"
        if self.distribution == "uniform" and self.mean - math.sqrt(3) * self.dif < 0:
            return f"sizes.dif: {self.dif}; give at most mean / √3, or uniform sizes would be < 0"
        return None

    def draw(self, seed: int) -> Floats:
        """Return the size of each sample, [N]; the same seed gives the same sizes.

        Raises:
            SizesError: the file cannot be read, or a value in the file is not a number above 0.
        """
        if self.file is not None:
            return self._read(Path(self.file))
        rng = np.random.default_rng([seed, _SALT])
        mean, dif, n = self.mean, self.dif, self.samples
        if self.distribution == "constant" or dif == 0:
            return np.full(n, mean)
        if self.distribution == "uniform":
            half = math.sqrt(3) * dif
            drawn = rng.uniform(mean - half, mean + half, n)
        elif self.distribution == "normal":
            drawn = rng.normal(mean, dif, n)
        elif self.distribution == "lognormal":
            variance = math.log1p((dif / mean) ** 2)
            drawn = rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), n)
        else:
            shape = (mean / dif) ** 2
            drawn = rng.gamma(shape, mean / shape, n)
        return np.clip(drawn, *self._bounds())

    def _bounds(self) -> tuple[float, float]:
        low = self.mean / 100 if self.min is None else self.min
        return low, math.inf if self.max is None else self.max

    def _read(self, path: Path) -> Floats:
        try:
            sizes = _READERS[path.suffix](path, self.column)
        except (OSError, ValueError, TypeError, EOFError, csv.Error) as error:
            raise SizesError(f"sizes.file: {path}: {error}") from error
        if sizes.ndim != 1 or not len(sizes):
            raise SizesError(f"sizes.file: {path}: give one number above 0 for each sample")
        wrong = np.flatnonzero(~(np.isfinite(sizes) & (sizes > 0)))
        if len(wrong):
            at = int(wrong[0])
            raise SizesError(
                f"sizes.file: {path}: row {at + 1}: {sizes[at]:g}; give numbers above 0"
            )
        return sizes


def _numbers(values: Iterable[Any]) -> Floats:
    numbers = []
    for row, value in enumerate(values, 1):
        try:
            numbers.append(float(value))
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {row}: {value!r}; give numbers above 0") from error
    return np.array(numbers)


def _text(path: Path, column: str | None) -> Floats:
    return _numbers(path.read_text().split())


def _csv(path: Path, column: str | None) -> Floats:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = list(rows[0]) if rows else []
    name = column or (names[0] if len(names) == 1 else None)
    if name not in names:
        raise ValueError(f"sizes.column: give the column with the sizes, one of {names}")
    return _numbers(row[name] for row in rows)


def _npy(path: Path, column: str | None) -> Floats:
    return np.asarray(np.load(path, allow_pickle=False), np.float64)


_READERS = {".txt": _text, ".csv": _csv, ".npy": _npy}
