"""The layout of the pages; the modules in ``assets/js`` fill it with numbers."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html
from plotly.colors import qualitative

from paceline_dashboard import columns
from paceline_dashboard.components import (
    chart,
    dialog,
    field,
    kpi,
    option,
    panel,
    table,
    tip,
)

RUN_STATES = ["pending", "starting", "running", "finished", "failed", "stopped"]


def shell() -> dmc.MantineProvider:
    """The frame of every page."""
    header = html.Header(
        className="top",
        children=[
            html.A("Skip to content", href="#page", className="skip"),
            dcc.Link(
                [html.Span(className="logo", **{"aria-hidden": "true"}), "Paceline"],
                href="/",
                className="brand",
                title="All runs",
            ),
            html.Nav(id="crumbs", className="crumbs", **{"aria-label": "Where you are"}),
            html.Div(id="connection-status", role="status", className="connection"),
            dmc.ColorSchemeToggle(
                lightIcon=html.Span("☾"),
                darkIcon=html.Span("☀"),
                variant="subtle",
                color="gray",
                size="lg",
                **{"aria-label": "Switch between light and dark"},
            ),
        ],
    )
    return dmc.MantineProvider(
        [
            dcc.Location(id="url"),
            dcc.Store(id="page-opened"),
            header,
            html.Main(id="page", tabIndex="-1"),
        ],
        defaultColorScheme="auto",
        theme={
            "fontFamily": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
            "primaryColor": "teal",
        },
    )


def _data(page: str, **values: object) -> dcc.Store:
    """The data that bridge.js passes to the page's module."""
    return dcc.Store(
        id="page-data", data={"page": page, "palette": list(qualitative.Safe), **values}
    )


def runs_page() -> list[Any]:
    """The list of runs, and the nodes."""
    return [
        _data("runs"),
        html.Div(
            className="bar",
            children=[
                html.H1("Runs"),
                html.Span(id="runs-count", className="muted", role="status"),
                html.Label("State", htmlFor="state-filter", className="push"),
                html.Select(
                    [option("", "all"), *(option(state, state) for state in RUN_STATES)],
                    id="state-filter",
                ),
            ],
        ),
        html.Div(
            id="runs-empty",
            className="panel empty",
            hidden=True,
            children=[
                html.H2("No runs yet"),
                html.P("Start the demonstration: four emulated devices on real data."),
                html.Pre(html.Code("make demo")),
                html.P("Or run your own training script:"),
                html.Pre(html.Code("paceline run --nproc 4 train.py")),
            ],
        ),
        html.Div(id="runs-problem", className="problem", role="alert", hidden=True),
        table("runs-grid", columns.RUNS),
        html.Div(
            html.Button("Older runs", id="runs-more", type="button", hidden=True), className="bar"
        ),
        panel("Nodes", html.Div(id="nodes"), labelled="nodes-title"),
    ]


def run_page(run: str, plotly_url: str) -> list[Any]:
    """One run, live.

    Args:
        run: its public id.
        plotly_url: where the browser finds Plotly.
    """
    return [
        _data("run", run=run, plotly=plotly_url),
        html.Div(id="run-problem", className="problem", role="alert", hidden=True),
        html.Pre(
            id="run-log",
            className="log",
            hidden=True,
            tabIndex="0",
            **{"aria-label": "Last lines of the failed rank's log"},
        ),
        _run_header(),
        html.Section(_kpis(), className="kpis", **{"aria-label": "Key figures"}),
        html.Div(
            className="columns",
            children=[
                html.Section(_charts(), className="charts", **{"aria-label": "Charts"}),
                html.Aside([_policy_panel(), _whatif_panel(), _facts_panel()], className="side"),
            ],
        ),
        _workers_panel(),
        _switch_dialog(),
        _stop_dialog(),
    ]


def missing_page(path: str) -> list[Any]:
    """For an address that is no page."""
    return [
        _data("missing"),
        html.Div(
            className="panel empty",
            children=[html.H1("No such page"), html.P(["Nothing is at ", html.Code(path), "."])],
        ),
    ]


def _run_header() -> html.Div:
    return html.Div(
        className="bar run-header",
        children=[
            html.H1("…", id="run-name"),
            html.Span(id="run-state", className="state", role="status"),
            html.Span(id="run-policy", className="badge", title="Policy in force"),
            html.Span(id="run-progress", className="muted"),
            html.Span(id="run-device", className="muted"),
            html.Span(id="run-emulated", className="badge warn", hidden=True),
            html.Span(id="run-controller", className="badge", role="status"),
            html.Button(
                "Stop run…", id="stop-run", type="button", className="danger push", disabled=True
            ),
        ],
    )


def _kpis() -> list[html.Div]:
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


def _charts() -> list[Any]:
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


def _policy_panel() -> html.Section:
    modes = [
        option("off", "off"),
        option("recommend", "recommend a better one"),
        option("switch", "switch to a better one"),
    ]
    return panel(
        "Policy",
        html.Div(id="policy-current", className="policy-current"),
        html.P(id="policy-summary", className="muted small"),
        html.P(id="policy-changed", className="small wrap", hidden=True),
        html.P(id="policy-why", className="small wrap", hidden=True),
        html.Ol(
            id="policy-choices", className="history", hidden=True,
            **{"aria-label": "Earlier synchronisers"},
        ),
        html.Button(
            "Switch policy…", id="policy-apply", type="button", className="primary", disabled=True
        ),
        html.Div(id="switch-status", role="status", className="switch-status"),
        html.Ol(id="switch-history", className="history", **{"aria-label": "Earlier switches"}),
        html.Div(
            className="auto",
            children=[
                field("auto: look for a better policy",
                      html.Select(modes, id="auto-mode", disabled=True), "auto-mode"),
                html.Div(
                    className="field",
                    children=[
                        html.Label("relaxed presets, too", id="auto-relaxed-label",
                                   className="check"),
                        html.Div(
                            "Under these, ranks do not wait for all others in each step: they "
                            "change the training.",
                            id="auto-relaxed-help", className="muted small",
                        ),
                    ],
                ),
                html.P(id="auto-last", className="small wrap", role="status"),
                html.Button("", id="auto-accept", type="button", hidden=True),
                html.P(id="auto-problem", className="problem", role="alert", hidden=True),
            ],
        ),
        labelled="policy-title",
    )  # fmt: skip


def _whatif_panel() -> html.Section:
    return panel(
        "Other policies",
        html.Button("What would other policies save?", id="whatif-ask", type="button"),
        html.P(id="whatif-words", className="small", role="status"),
        html.P(
            "Another policy is in force since then: ask again.",
            id="whatif-old", className="small problem", hidden=True,
        ),
        html.P(id="whatif-problem", className="problem", role="alert", hidden=True),
        html.Ol(id="whatif-forecasts", className="forecasts", **{"aria-label": "Forecasts"}),
        html.P(id="whatif-note", className="muted small wrap"),
        labelled="whatif-title",
    )  # fmt: skip


def _facts_panel() -> html.Section:
    return panel("Run", html.Dl(id="run-facts", className="facts"), labelled="facts-title")


def _workers_panel() -> html.Section:
    return panel(
        "Who is slow and why",
        html.P(id="attribution-words", className="words", role="status"),
        chart("chart-attribution", "What ranks wait for", "SP, the time from the first rank's "
              "being ready to the last one's, per step, divided among its causes: unequal sizes of "
              "samples, slow nodes, slowness that passes (and noise), and slow data loading."),
        table("workers-grid", columns.WORKERS, paginationPageSize=25,
              paginationPageSizeSelector=False, suppressCellFocus=True),
        labelled="workers-title",
    )  # fmt: skip


def _switch_dialog() -> html.Dialog:
    return dialog(
        "switch-dialog",
        html.H2("Switch policy", id="switch-dialog-title"),
        html.Div(
            className="choose",
            children=[
                html.Div(
                    id="policy-presets", className="presets", role="radiogroup",
                    **{"aria-label": "Presets"},
                ),
                html.Div(
                    className="chosen",
                    children=[
                        html.H3(id="policy-chosen"),
                        html.Div(id="policy-parameters", className="parameters"),
                    ],
                ),
            ],
        ),
        html.P(id="switch-when"),
        html.P(id="switch-changes", className="small", role="status"),
        html.P(id="switch-problem", className="problem", role="alert", hidden=True),
        confirm=html.Button(
            "Switch policy", id="policy-confirm", type="button", className="primary"
        ),
    )  # fmt: skip


def _stop_dialog() -> html.Dialog:
    return dialog(
        "stop-dialog",
        html.H2("Stop this run?", id="stop-dialog-title"),
        html.P(
            "The running segment ends, the loaders run dry and the script goes on to its last "
            "lines. A stopped run cannot be resumed here."
        ),
        dmc.Checkbox(
            id="stop-force",
            label="Do not wait: end the processes at once. What was not saved is lost.",
            size="xs",
        ),
        html.P(id="stop-problem", className="problem", role="alert", hidden=True),
        confirm=html.Button("Stop run", id="stop-confirm", type="button", className="danger"),
    )
