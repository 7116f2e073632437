"""The key figures and charts of a run's page."""

from __future__ import annotations

from typing import Any

from dash import html

from paceline_dashboard.components import chart, kpi, option, tip


def key_figures() -> list[html.Div]:
    """The row of key figures above the charts."""
    return [
        kpi("kpi-step-time", "Step time", "From a step's start to the next one's, mean over the "
            "workers and the last 20 steps."),
        kpi("kpi-se", "SE", "Straggler effect: (max T − min T) / mean T of the workers' compute "
            "times T in one step. 0 is perfect balance."),
        kpi("kpi-waste", "Waste", "Straggler waste: the share of the workers' time that they spend "
            "waiting for the slowest, Σ(max T − T) / (M · max T)."),
        kpi("kpi-dif", "Step DIF", "Data imbalance factor: sample standard deviation of the "
            "workers' loads (sums of sample sizes) in one step, in the data set's size unit."),
        kpi("kpi-ett-error", "ETT error", "How far the estimated training time (ETT) of a worker's "
            "step is from the measured compute time, mean of |ETT − T| / T."),
        kpi("kpi-speedup", "Speed-up", "Step time of the 20 steps before the last policy switch "
            "÷ that of the last 20 steps since. Above 1× is faster."),
    ]  # fmt: skip


def charts() -> list[Any]:
    """All charts over steps, with the choice of steps to show."""
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
                html.Span(id="chart-note", className="muted small"),
                html.Span(
                    className="key",
                    children=[
                        html.Span("policy switch", className="switch"),
                        html.Span("other synchroniser", className="choice"),
                        html.Span("no controller", className="coast"),
                        html.Span("no data", className="gap"),
                    ],
                ),
            ],
        ),
        chart("chart-compute", "Compute time and ETT per worker", "Solid: compute time T, forward "
              "+ backward without waiting or communication. Dashed: ETT, the estimated training "
              "time that the plan expected.", wide=True, tall=True),
        html.Figure(
            id="heatmap-card",
            className="panel chart wide",
            hidden=True,
            children=[
                html.Figcaption([
                    "Compute time, worker × step",
                    tip("heatmap", "Each row is a worker (or the slowest of neighbouring ones), "
                        "each column a step. Brighter is slower."),
                    html.Span(id="heatmap-scale", className="muted push"),
                ]),
                html.Canvas(id="heatmap", className="heatmap"),
                html.Div(id="heatmap-readout", className="muted readout"),
            ],
        ),
        chart("chart-se", "SE", "Straggler effect: (max T − min T) / mean T."),
        chart("chart-waste", "Waste", "Share of the workers' time spent waiting for the slowest."),
        chart("chart-dif", "Step DIF", "Sample standard deviation of the workers' loads in one "
              "step, in the data set's size unit."),
        chart("chart-loss", "Loss", "Mean over the global batch."),
        chart("chart-share", "Share of the batch per worker", "Λ_j ÷ ΣΛ: which part of each "
              "step's load (sum of its samples' sizes) a worker got.", wide=True),
        _rounds(),
    ]  # fmt: skip


def _rounds() -> html.Div:
    """Of runs with a relaxed synchroniser alone."""
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
