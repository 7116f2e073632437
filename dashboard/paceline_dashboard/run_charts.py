"""Charts of a run's page."""

from __future__ import annotations

from typing import Any

from dash import html

from paceline_dashboard.components import chart, choices, option, save_menu, tip


def charts() -> list[Any]:
    """Return all charts over steps, with controls of the range, smoothing and axis."""
    window = [
        option("100", "last 100 steps"),
        option("300", "last 300 steps"),
        option("1000", "last 1,000 steps"),
        option("2000", "last 2,000 steps"),
        option("all", "whole run"),
    ]
    return [
        html.Div(
            className="bar charts-bar",
            children=[
                html.Label("Show", htmlFor="chart-window"),
                html.Select(window, id="chart-window"),
                html.Button("Back to live", id="chart-live", type="button", hidden=True),
                choices("chart-smoothing", "Smoothing", "50",
                        {"1": "raw", "50": "50 steps", "200": "200 steps"}),
                choices("chart-axis", "Axis", "steps", {"steps": "steps", "clock": "clock"}),
                html.Span(id="chart-note", className="muted small"),
                html.Span(
                    className="key",
                    children=[
                        html.Span("policy switch", className="switch"),
                        html.Span("other synchronisation", className="choice"),
                        html.Span("no controller", className="coast"),
                        html.Span("no data", className="gap"),
                    ],
                ),
            ],
        ),
        _compute(),
        _heatmap(),
        chart("chart-se", "SE", "Straggler effect: (max T − min T) / mean T."),
        chart("chart-waste", "Waste", "Share of the workers' time spent waiting for the slowest."),
        chart("chart-dif", "Step DIF", "Sample standard deviation of the workers' loads in one "
              "step, in the data set's size unit."),
        chart("chart-loss", "Loss", "Mean over the global batch."),
        chart("chart-share", "Share of the batch per worker", "Λ_j ÷ ΣΛ: which part of each "
              "step's load (sum of its samples' sizes) a worker got.", wide=True),
        _metrics(),
        _rounds(),
    ]  # fmt: skip


def _compute() -> html.Figure:
    meaning = (
        "Compute time T: forward + backward without waiting or communication. The worker that "
        "others wait for is coloured; click a line or give a rank to pin another one. Point at a "
        "step for the raw times. Dashed: ETT, the estimated training time that the plan expected."
    )
    return html.Figure(
        className="panel chart wide tall",
        children=[
            html.Figcaption([
                "Compute time per worker",
                tip("Compute time per worker", meaning),
                html.Span(id="chart-pinned", className="badge", hidden=True),
                html.Button("Unpin", id="chart-unpin", type="button", className="quiet",
                            hidden=True),
                html.Span(id="chart-compute-key", className="muted small push"),
                html.Label("Rank", htmlFor="chart-rank", className="muted small"),
                html.Span(id="chart-rank-place"),
                save_menu("chart-compute", "Compute time per worker"),
            ]),
            html.Div(id="chart-compute", className="plot", role="img",
                     **{"aria-label": "Compute time per worker"}),
        ],
    )  # fmt: skip


def _heatmap() -> html.Figure:
    meaning = (
        "A row is a worker, a column a step. Colour is the time of computing ÷ the typical rank's "
        "in this step, which is the lower median of the ranks that the verdict does not name as "
        "slow: orange is slower, blue is faster, grey is like the others. Where ranks or steps "
        "share a cell, the slowest shows."
    )
    about, colours = "time ÷ typical rank's", html.I(className="heat-scale")
    scale = [about, html.Span("0.5"), colours, html.Span("2×")]
    orders = {"rank": "by rank", "node": "by node", "cause": "by cause"}
    return html.Figure(
        id="heatmap-card",
        className="panel chart wide",
        children=[
            html.Figcaption([
                "Every worker, every step",
                tip("heat map", meaning),
                html.Span(scale, id="heatmap-scale", className="muted small push heat-key"),
                choices("heatmap-order", "Order of rows", "rank", orders),
                save_menu("heatmap", "Every worker, every step", ("png", "csv")),
            ]),
            html.Div(
                className="heat-body",
                children=[
                    html.Canvas(id="heatmap", className="heatmap", tabIndex="0", role="button",
                                **{"aria-label": "Every worker, every step"}),
                    html.Div(id="heatmap-labels", **{"aria-hidden": "true"}),
                    html.Div(id="heatmap-cursor", hidden=True),
                    html.P(id="heatmap-empty", className="muted small"),
                ],
            ),
            html.Div(id="heatmap-readout", className="muted readout", role="status"),
        ],
    )  # fmt: skip


def _metrics() -> html.Div:
    # Shown for runs that report more than a loss. `assets/js/metrics.js` creates the charts.
    meaning = (
        "What the script measured on held-out data, by step, over the whole run; and further "
        "metrics of its training, over the steps shown. The green line is the target."
    )
    title = html.Div([html.H2("Metrics"), tip("Metrics", meaning)], className="bar card-head")
    head = [title, html.P(id="metrics-words")]
    return html.Div(
        id="metrics",
        className="group",
        hidden=True,
        children=[
            html.Div(head, className="wide"),
            html.Div(id="metrics-evaluations", className="group"),
            html.Div(id="metrics-training", className="group"),
        ],
    )


def _rounds() -> html.Div:
    # Shown only for runs with relaxed synchronisation.
    return html.Div(
        id="rounds",
        className="group",
        hidden=True,
        children=[
            html.Div(
                className="wide",
                children=[html.H2("Synchronisation"), html.Ul(id="rounds-words")],
            ),
            chart("chart-contributors", "Contributors per round", "Workers whose gradients (or "
                  "replicas) went into a round, mean over the rounds of a step, and the fewest and "
                  "the most."),
            chart("chart-response", "Response time", "From the end of one round until the next is "
                  "called, mean and longest of a step's rounds; reduction, from then until its sum "
                  "is there; and copying what a worker gave from its device to the CPU."),
            chart("chart-dropped", "Dropped samples", "Per step: samples that were computed, but "
                  "whose gradients came too many rounds late and were not applied."),
            chart("chart-bytes", "Bytes exchanged", "Per step: what one worker gave to rounds."),
            chart("chart-staleness", "Staleness of gradients", "How many rounds old the gradients "
                  "of the steps shown were when they were applied, under each policy.", wide=True),
        ],
    )  # fmt: skip
