"""Metrics that the script reports: their names and values, checked."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real

import torch

from paceline.wire.metrics import MOST_METRICS, of_names

Value = torch.Tensor | float


class MetricNames:
    """Checks metrics, and bounds how many names a run has.

    Args:
        call: of the session, for messages.
    """

    def __init__(self, call: str) -> None:
        self._call = call
        self._known: set[str] = set()

    def check(self, metrics: Mapping[str, Value]) -> None:
        """Checks names and kinds of values; looks at no value, which a device may still compute.

        Raises:
            TypeError, ValueError: a name or a value is wrong; the message names the metric.
        """
        if new := metrics.keys() - self._known:
            if reason := of_names(new):
                raise ValueError(f"session.{self._call}: {reason}")
            if len(self._known) + len(new) > MOST_METRICS:
                raise ValueError(
                    f"session.{self._call}: {min(new)} would be one metric too many: a run has at "
                    f"most {MOST_METRICS}, so do not make names of steps, classes or layers"
                )
        for name, value in metrics.items():
            _check_value(f"session.{self._call}: {name}", value)
        self._known |= new


def _check_value(place: str, value: object, *, dimensions: bool = False) -> None:
    if isinstance(value, torch.Tensor):
        # Reading a part later would wait for other ranks.
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
    """Checks the kind of a loss; a tensor of a single element may have dimensions.

    Raises:
        TypeError, ValueError: it is no number; the message says so.
    """
    _check_value("session.log: loss", loss, dimensions=True)


def on_host(value: Value) -> Value:
    """The value on its way to the host, without waiting for the device.

    It is a copy: it is read later, when the script may have changed the tensor.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", non_blocking=True, copy=True)
    return value
