"""Checks the names and values of metrics that a script reports."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real

import torch

from paceline.wire.metrics import MOST_METRICS, of_names

Value = torch.Tensor | float


class MetricNames:
    """Checker of metrics, which also limits the number of metric names in a run.

    `call` is the session's method that error messages name.
    """

    def __init__(self, call: str) -> None:
        self._call = call
        self._known: set[str] = set()

    def check(self, metrics: Mapping[str, Value]) -> None:
        """Check names and kinds of values.

        The values themselves are not read, because that would wait for the device.

        Raises:
            TypeError, ValueError: a name or a value is wrong; the message names the metric.
        """
        if new := metrics.keys() - self._known:
            if reason := of_names(new):
                raise ValueError(f"session.{self._call}: {reason}")
            if len(self._known) + len(new) > MOST_METRICS:
                raise ValueError(
                    f"session.{self._call}: {min(new)} would exceed the limit: a run has at most "
                    f"{MOST_METRICS} metrics, so do not put steps, classes or layers into their "
                    "names"
                )
        for name, value in metrics.items():
            _check_value(f"session.{self._call}: {name}", value)
        self._known |= new


def _check_value(place: str, value: object, *, dimensions: bool = False) -> None:
    if isinstance(value, torch.Tensor):
        # A tensor that is split over ranks is refused: reading it later would wait for other ranks.
        if not all(each.is_replicate() for each in getattr(value, "placements", ())):
            raise TypeError(
                f"{place} is a DTensor, of which each rank has a part: give its full_tensor()"
            )
        if value.ndim and not (dimensions and value.numel() == 1):
            raise ValueError(
                f"{place} has the shape {list(value.shape)}: give a number or a tensor without "
                "dimensions, such as its mean()"
            )
        if value.is_complex():
            raise TypeError(f"{place} is complex: give a real number")
    elif not isinstance(value, Real):
        raise TypeError(f"{place} is {value!r}: give a number or a tensor without dimensions")


def check_loss(loss: object) -> None:
    """Check the kind of a loss; a tensor of a single element may have dimensions.

    Raises:
        TypeError, ValueError: the loss is not a number.
    """
    _check_value("session.log: loss", loss, dimensions=True)


def on_host(value: Value) -> Value:
    """Start copying a value to the host, without waiting for the device.

    The result is always a copy, because the script may change the tensor before the copy is read.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", non_blocking=True, copy=True)
    return value
