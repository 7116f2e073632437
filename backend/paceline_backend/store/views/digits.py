"""Round numbers to the precision that a chart needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Significant digits of a chart's number: finer than a pixel of any screen.
DIGITS = 5


def rounded(column: Iterable[float | None]) -> list[float | None]:
    """Round a column to `DIGITS` significant digits."""
    return [None if value is None else float(f"{value:.{DIGITS}g}") for value in column]


def short(columns: dict[str, Any]) -> dict[str, Any]:
    """Round columns of floating-point numbers; times of day keep their milliseconds."""
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
