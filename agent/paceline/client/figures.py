"""Plotly figures of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.errors import InputError, PacelineError

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


def of_run(
    title: str,
    columns: Mapping[str, Sequence[Any]],
    switches: Sequence[Mapping[str, Any]],
    metrics: Sequence[str],
) -> Any:
    """Plot metrics over steps, one below the other, with a dashed line where each policy began.

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
