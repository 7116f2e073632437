"""Data frames and figures made from the server's answers.

The module `server` calls `of_csv` and `of_rows` to make data frames of pandas or polars, and
`figure` to plot a run. The libraries are imported only here and only when they are used; without
one of them, functions raise a `PacelineError` that names the package to install.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import IO, Any, Literal

from paceline.core.errors import InputError, PacelineError

Frames = Literal["pandas", "polars"]
# A data frame of pandas or polars.
DataFrame = Any
# Metric → its title, and the format of its axis.
METRICS = {
    "step_s": ("Time per step, s", "~g"),
    "waste": ("Waste", "~%"),
    "se": ("SE", "~g"),
    "loss": ("Loss", "~g"),
    "comm_s": ("Communication, s", "~g"),
    "compute_max": ("Slowest rank's compute time, s", "~g"),
    "dif": ("DIF of a step", "~s"),
    "ett_error": ("ETT error", "~%"),
}


def checked(frames: str) -> Frames:
    """Return the name of a data frame library; raise an InputError if it is unknown."""
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
    """Make a data frame from its columns."""
    return _library(frames).DataFrame(dict(columns))


def of_rows(rows: Sequence[Mapping[str, Any]], frames: Frames) -> DataFrame:
    """Make a data frame from rows with equal keys; values that are lists or dicts become JSON."""
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


def figure(
    title: str,
    columns: Mapping[str, Sequence[Any]],
    switches: Sequence[Mapping[str, Any]],
    metrics: Sequence[str],
) -> Any:
    """Plot metrics over steps, one below the other, with a dashed line at each policy's first step.

    `columns` and `switches` are answers of `GET steps` and `GET switches`.

    Raises:
        InputError: a metric is not in `METRICS`.
        PacelineError: Plotly is not installed.
    """
    unknown = [name for name in metrics if name not in METRICS]
    if unknown or not metrics:
        raise InputError(f"metrics={', '.join(unknown) or '[]'}: choose from {', '.join(METRICS)}")
    try:
        from plotly.graph_objects import Scatter
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise PacelineError("Plotly is not installed: pip install 'paceline[notebook]'") from error
    figure = make_subplots(rows=len(metrics), shared_xaxes=True, vertical_spacing=0.04)
    for row, name in enumerate(metrics, 1):
        words, form = METRICS[name]
        line = Scatter(x=columns["step"], y=columns[name], name=words, mode="lines")
        figure.add_trace(line, row=row, col=1)
        figure.update_yaxes(title_text=words, tickformat=form, rangemode="tozero", row=row, col=1)
    for switch in switches:
        if switch["version"] and switch["effective_step"] is not None:
            at, label = switch["effective_step"], switch["policy"]
            figure.add_vline(x=at, line_dash="dash", annotation_text=label)
    figure.update_xaxes(title_text="Step", row=len(metrics), col=1)
    figure.update_layout(title=title, showlegend=False, height=120 + 200 * len(metrics))
    return figure
