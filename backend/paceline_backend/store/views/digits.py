"""Numbers as short as a chart needs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

DIGITS = 5  # of a chart's number: finer than a pixel of any screen


def rounded(column: Iterable[float | None]) -> list[float | None]:
    """A column with so many significant digits."""
    return [None if value is None else float(f"{value:.{DIGITS}g}") for value in column]


def short(columns: dict[str, Any]) -> dict[str, Any]:
    """Columns of floating-point numbers made shorter; times of day keep their milliseconds."""
    return {name: _short(name, value) for name, value in columns.items()}


def _short(name: str, value: Any) -> Any:
    if name == "ended_at":
        return [round(at, 3) for at in value]
    if not isinstance(value, list) or not value:
        return value
    if isinstance(value[0], list):
        return [_short(name, each) for each in value]
    if any(isinstance(each, float) for each in value):
        return rounded(value)
    return value
