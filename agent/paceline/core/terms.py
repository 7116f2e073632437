"""A run's arguments, validated; they stay the same during the run."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Any

from paceline.core.batch_limits.budget import budget_of
from paceline.core.batch_limits.shapes import Shapes

# Values of `loss_mean`. A rank's loss is the mean over its samples ("samples") or over their total
# size ("size"), or is already scaled so that the mean over ranks is right ("ranks").
MEANS = ("samples", "size", "ranks")
# The policy of plain DDP. Under this policy the leader needs no plans: it makes segments of
# equal local batches, in the epoch's order.
PLAIN = "bsp"


@dataclass(frozen=True)
class Terms:
    """The arguments of `Session` that planning needs, the same on all ranks.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names the argument.
    """

    # Number of samples N; 0: a stream, whose length is unknown.
    samples: int
    # Number of samples of a step; with a token budget, their mean number.
    global_batch: int
    seed: int
    drop_last: bool
    loss_mean: str  # one of `MEANS`
    # Number of steps that the leader plans at once while it coasts.
    coast_steps: int
    shapes: Shapes = field(default_factory=Shapes)
    # Largest total size of a step; None: steps have `global_batch` samples.
    token_budget: float | None = None

    def __post_init__(self) -> None:
        whole("global_batch", self.global_batch, 1)
        whole("seed", self.seed, 0)
        if self.seed >= 2**63:
            raise ValueError(f"seed is {self.seed}: it must be below 2**63 to fit in a database")
        whole("coast_steps", self.coast_steps, 1)
        if self.samples and self.global_batch > self.samples:
            raise ValueError(
                f"global_batch is {self.global_batch}, more than the data set's {self.samples} "
                "samples: it counts the samples of one step over all ranks"
            )
        if self.coast_steps > 4:
            raise ValueError(
                f"coast_steps is {self.coast_steps}: it must be at most 4, so that "
                "switches take effect soon"
            )
        if self.loss_mean not in MEANS:
            raise ValueError(f"loss_mean is {self.loss_mean!r}: give 'samples', 'size' or 'ranks'")
        if self.global_batch % self.shapes.samples:
            raise ValueError(
                f"shapes: samples is {self.shapes.samples}, which does not divide "
                f"global_batch={self.global_batch}: give a divisor of the global batch"
            )
        if self.token_budget is not None:
            budget_of(self.token_budget)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in a whole epoch.

        With a token budget, use `paceline.train.epochs.EpochSteps` instead. Raise a TypeError for a
        stream, which has no length.
        """
        if not self.samples:
            raise TypeError(
                "a stream has no length: its steps per epoch are known only when the epoch is over"
            )
        return steps_per_epoch(self.samples, self.global_batch, self.drop_last)

    def epoch_finished(self, left: int) -> bool:
        """Return True if an epoch with `left` unused samples has no step left."""
        return epoch_finished(left, self.global_batch, self.drop_last)


def steps_per_epoch(samples: int, global_batch: int, drop_last: bool) -> int:
    """Return the number of steps in a whole epoch."""
    full, rest = divmod(samples, global_batch)
    return full + (rest > 0 and not drop_last)


def epoch_finished(left: int, global_batch: int, drop_last: bool) -> bool:
    """Return True if an epoch with `left` unused samples has no step left."""
    return left == 0 or (drop_last and left < global_batch)


def whole(name: str, value: Any, least: int) -> int:
    """Validate that a value is a whole number ≥ `least`; return the value.

    Raises:
        TypeError, ValueError: the value is no whole number, or too small; the message has `name`.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: it must be a whole number")
    if value < least:
        raise ValueError(f"{name} is {value}: it must be at least {least}")
    return value


def length(dataset: Sized) -> int:
    """Return the number of samples of a data set.

    Raises:
        TypeError: the data set is not map-style.
        ValueError: the data set is empty.
    """
    try:
        samples = len(dataset)
    except TypeError as error:
        raise TypeError(
            "dataset has no len(): use a map-style data set, or wrap an iterable data set "
            "in paceline.data.Stream(dataset, size=…, split=…)"
        ) from error
    if samples < 1:
        raise ValueError("dataset is empty")
    return samples
