"""Answers of the server as data frames: of pandas or of polars, whichever somebody asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import IO, Any, Literal

from paceline.core.errors import InputError, PacelineError

Frames = Literal["pandas", "polars"]
DataFrame = Any  # of pandas, or of polars


def checked(frames: str) -> Frames:
    """The name of a library that makes data frames.

    Raises:
        InputError: another name.
    """
    if frames not in ("pandas", "polars"):
        raise InputError(f"frames={frames!r}: give 'pandas' or 'polars'")
    return frames  # type: ignore[return-value]


def of_csv(file: IO[bytes], frames: Frames) -> DataFrame:
    """A table as the server exports it.

    Args:
        file: CSV.
        frames: whose data frame.

    Raises:
        PacelineError: the library is not installed.
    """
    library = _library(frames)
    if frames == "polars":
        return library.read_csv(file, infer_schema_length=None)
    return library.read_csv(file, float_precision="round_trip")


def of_columns(columns: Mapping[str, Sequence[Any]], frames: Frames) -> DataFrame:
    """A table whose columns are known.

    Raises:
        PacelineError: the library is not installed.
    """
    return _library(frames).DataFrame(dict(columns))


def of_rows(rows: Sequence[Mapping[str, Any]], frames: Frames) -> DataFrame:
    """A table of objects with equal names; what is neither number nor text becomes JSON.

    Raises:
        PacelineError: the library is not installed.
    """
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
