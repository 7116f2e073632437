"""Page that compares forecasts with the measured effects of switches, over all runs."""

from __future__ import annotations

from typing import Any

from dash import html

from paceline_dashboard.components import chart, kpi, option, page_data, panel


def forecasts_page() -> list[Any]:
    """Return the page, which `assets/js/forecasts.js` fills."""
    return [
        page_data("forecasts"),
        html.Div(
            className="bar",
            children=[
                html.H1("Forecasts against outcomes"),
                html.Span(id="forecasts-count", className="muted", role="status"),
                html.Label("Runs", htmlFor="forecasts-runs", className="push"),
                html.Select(
                    [option("", "real ones"), option("true", "real and simulated ones")],
                    id="forecasts-runs",
                ),
            ],
        ),
        html.Div(id="forecasts-problem", className="problem", role="alert", hidden=True),
        html.Div(
            id="forecasts-empty",
            className="panel empty",
            hidden=True,
            children=[
                html.H2("No outcomes yet"),
                html.P(
                    "This page will compare what forecasts said a switch of policy would save with "
                    "what the switch then saved: a chart, how many outcomes were inside the "
                    "forecasts' 95 % intervals, and the errors of each preset."
                ),
                html.P(
                    "A switch appears here if a forecast was made before it, and once 200 steps "
                    "after it count, another policy has followed, or its run has been over for a "
                    "minute."
                ),
            ],
        ),
        html.Div(_outcomes(), id="forecasts-outcomes", hidden=True),
    ]


def _outcomes() -> list[Any]:
    return [
        html.Section(_figures(), className="kpis", **{"aria-label": "How right forecasts were"}),
        chart(
            "chart-outcomes",
            "Forecast and measured saving",
            "Each mark is a switch: the saving that was forecast, and the one that was measured, "
            "with 95 % intervals. On the dashed line both are equal.",
        ),
        panel("By preset", html.Div(id="forecasts-presets"), labelled="forecasts-presets-title"),
        panel("Newest switches", html.Div(id="forecasts-items"), labelled="forecasts-items-title"),
    ]


def _figures() -> list[Any]:
    return [
        kpi(
            "forecasts-inside",
            "Inside 95 %",
            "Share of measured savings inside the forecasts' intervals. 95 % is right.",
        ),
        kpi(
            "forecasts-median",
            "Median error",
            "Of the forecast time for the same load, relative to the measured time, without sign.",
        ),
        kpi("forecasts-p90", "90 % below", "Nine of ten errors, without sign, are below this."),
        kpi(
            "forecasts-bias",
            "Bias",
            "Mean error with its sign. Above zero, forecasts of the time are too long.",
        ),
    ]
