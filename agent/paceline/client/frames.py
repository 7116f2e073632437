"""Conversion of the server's answers to data frames of pandas or polars.

Functions raise `PacelineError` if the library is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import IO, Any, Literal

from paceline.core.errors import InputError, PacelineError

Frames = Literal["pandas", "polars"]
# A data frame of pandas or polars.
DataFrame = Any


def checked(frames: str) -> Frames:
    """Validate the name of a data frame library; else raise an InputError."""
    if frames not in ("pandas", "polars"):
        raise InputError(f"frames={frames!r}: give 'pandas' or 'polars'")
    return frames  # type: ignore[return-value]


def of_csv(file: IO[bytes], frames: Frames) -> DataFrame:
    """Read a table in the server's CSV format."""
    library = _library(frames)
    if frames == "polars":
        return library.read_csv(file, infer_schema_length=None)
    return library.read_csv(file, float_precision="round_trip")


def of_columns(columns: Mapping[str, Sequence[Any]], frames: Frames) -> DataFrame:
    """Make a table from its columns."""
    return _library(frames).DataFrame(dict(columns))


def of_rows(rows: Sequence[Mapping[str, Any]], frames: Frames) -> DataFrame:
    """Make a table from objects with equal names; lists and mappings become JSON."""
    names = list(rows[0]) if rows else []
    return of_columns({name: [_plain(row.get(name)) for row in rows] for name in names}, frames)


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value


def _library(frames: Frames) -> Any:
    try:
        if frames == "polars":
            import polars

            return polars
        import pandas
    except ImportError as error:
        install = "polars" if frames == "polars" else "'paceline[notebook]'"
        raise PacelineError(f"{frames} is not installed: pip install {install}") from error
    return pandas
