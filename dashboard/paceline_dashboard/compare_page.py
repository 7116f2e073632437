"""Page that compares runs, or ranges of steps of runs."""

from __future__ import annotations

from typing import Any

from dash import html

from paceline_dashboard.components import chart, option, page_data, panel


def compare_page() -> list[Any]:
    """Return overlaid charts and a table of differences, which ``assets/js/compare.js`` fills."""
    return [
        page_data("compare"),
        html.Div(
            className="bar",
            children=[
                html.H1("Compare"),
                html.Label("Align by", htmlFor="compare-align", className="push"),
                html.Select(
                    [option("step", "step"), option("sample", "sample"), option("time", "time")],
                    id="compare-align",
                ),
                html.Label("Smooth over", htmlFor="compare-smooth"),
                html.Select(
                    [
                        option("1", "raw"),
                        option("50", "50 steps"),
                        option("200", "200 steps"),
                    ],
                    id="compare-smooth",
                ),
                html.Button("CSV", id="compare-csv", type="button", disabled=True),
                html.Button("Copy link", id="compare-link", type="button"),
            ],
        ),
        html.Div(id="compare-sides", className="compare-sides"),
        html.Div(id="compare-problem", className="problem", role="alert", hidden=True),
        html.Div(
            id="compare-empty",
            className="panel empty",
            children=[
                html.H2("Nothing to compare yet"),
                html.P(
                    "Choose two runs above, or one run twice with different parts of it. Charts "
                    "and a table of differences with 95 % intervals appear here."
                ),
            ],
        ),
        html.Div(_answer(), id="compare-answer", hidden=True),
    ]


def _answer() -> list[Any]:
    charts = [
        chart(
            "compare-step_s",
            "Time per step",
            "Median of the steps around, and a band from the 10th to the 90th percentile.",
            wide=True,
        ),
        chart("compare-waste", "Waste", "Share of the ranks' time spent waiting for slower ones."),
        chart("compare-loss", "Loss", "Of the global batch, as the ranks reported it."),
        chart(
            "compare-ranks",
            "Compute time per rank",
            "Median of a rank's steps, of each side. Of many ranks, those that differ most.",
            wide=True,
        ),
    ]
    return [
        html.Div(id="compare-words", className="panel compare-words", role="status"),
        html.Div(
            className="compare-columns",
            children=[
                html.Div(charts, className="charts"),
                panel(
                    "Differences",
                    html.P(
                        "below each difference of steps its 95 % interval (bootstrap over blocks "
                        "of steps); what is measured once has none",
                        className="muted small",
                    ),
                    html.Div(id="compare-table"),
                    labelled="compare-table-title",
                ),
            ],
        ),
    ]
