"""Top of a run's page: title, verdict, tiles, and the quality of the predictor's model."""

from __future__ import annotations

from dash import dcc, html

from paceline_dashboard.components import here, quality, tile, tip


def problems(run: str) -> list[html.Div]:
    """Return messages that replace the page or appear above it. `run` is the run's public id."""
    return [
        html.Div(
            id="run-missing",
            className="panel empty",
            hidden=True,
            children=[
                html.H1("No such run"),
                html.P(["There is no run ", html.Code(run), ". It may have been pruned."]),
                dcc.Link("All runs", href=here("/")),
            ],
        ),
        html.Div(id="run-problem", className="problem", role="alert", hidden=True),
    ]


def header() -> html.Div:
    """Return title, state and progress."""
    return html.Div(
        className="bar run-header",
        children=[
            html.H1("…", id="run-name"),
            html.Span(id="run-state", className="state badge", role="status"),
            html.Span(id="run-policy", className="badge", title="Policy in force"),
            html.Span(id="run-progress", className="muted"),
            html.Span(html.I(), id="run-bar", className="progress", hidden=True),
            html.Span(id="run-eta", className="muted", hidden=True),
            html.Span(id="run-device", className="muted wide-only"),
            html.Span(id="run-emulated", className="badge warn", hidden=True),
            html.Span(id="run-controller", className="badge", role="status", hidden=True),
            html.Span(id="run-rights", className="muted small wrap push", hidden=True),
            html.A("Run again…", id="run-again", className="button push", hidden=True),
            html.Button(
                "Resume run…", id="resume-open", type="button", className="primary",
                hidden=True,
            ),
            html.Button(
                "Stop run…", id="stop-open", type="button", className="danger push", disabled=True
            ),
        ],
    )  # fmt: skip


def verdict() -> html.Section:
    """Return the banner: what slows down the run, what it costs, and what helps."""
    return html.Section(
        id="verdict",
        className="verdict grey",
        **{"aria-label": "Verdict"},
        children=[
            html.Span("…", id="verdict-icon", className="verdict-icon", **{"aria-hidden": "true"}),
            html.Div(
                className="verdict-body",
                children=[
                    html.P(
                        "Looking at the newest steps…",
                        id="verdict-title",
                        className="verdict-title",
                        role="status",
                    ),
                    html.P(id="run-notice", hidden=True),
                    html.P(id="verdict-also", hidden=True),
                    html.P(id="verdict-cost", hidden=True),
                    html.P(id="verdict-remedy", hidden=True),
                    html.Ul(id="verdict-others", hidden=True),
                    html.Details(
                        id="run-failure",
                        hidden=True,
                        open=True,
                        children=[
                            html.Summary("Last lines of its log"),
                            html.Pre(
                                id="run-log",
                                className="log",
                                tabIndex="0",
                                **{"aria-label": "Last lines of the failed rank's log"},
                            ),
                            html.Button(
                                "Copy", id="run-log-copy", type="button", className="smaller"
                            ),
                        ],
                    ),
                ],
            ),
            html.Div(
                className="verdict-actions",
                children=[
                    html.Button(
                        "Switch…", id="verdict-switch", type="button", className="primary",
                        hidden=True,
                    ),
                    html.A("Stacks", id="verdict-stacks", className="button", hidden=True),
                    html.Button("Replace node…", id="verdict-replace", type="button", hidden=True),
                    html.Button("Why", id="verdict-why", type="button", hidden=True),
                    html.Button(
                        "more", id="verdict-more", type="button", className="ghost", hidden=True,
                        **{"aria-expanded": "false", "aria-controls": "verdict-others"},
                    ),
                ],
            ),
        ],
    )  # fmt: skip


def tiles() -> html.Section:
    """Return the tiles of time per step, waste and slowest worker, with reference values."""
    return html.Section(
        className="tiles",
        **{"aria-label": "Key figures"},
        children=[
            tile("kpi-step-time", "Time per step", "From a step's start to the next one's, mean "
                 "over the workers and the last 50 steps. The dashed line is the fluid limit: the "
                 "time if each step's load were divided so that all workers end together.",
                 "spark-step-time", html.Span(id="tiles-span")),
            tile("kpi-waste", "Lost worker time", "The share of all workers' time, steps as a "
                 "whole, that is lost: to waiting for slower workers, or to what holds all of them "
                 "up, such as a slow reduction. Worker-hours are that share of the workers' time. "
                 "The chart of waste has the share of the time of computing alone.", "spark-waste",
                 ["imbalance (SE)",
                  tip("imbalance (SE)", "Straggler effect: (max T − min T) / mean T of the "
                      "workers' compute times T in one step. 0 is perfect balance."),
                  html.B("–", id="kpi-se")]),
            tile("kpi-slowest", "Slowest worker", "The worker that others wait for, and its time "
                 "÷ the typical rank's for the same batch: the lower median's. The small chart is "
                 "the slowest worker's time ÷ the mean of all.", "spark-slowest",
                 html.Span(id="kpi-caused")),
        ],
    )  # fmt: skip


def quality_row() -> html.Section:
    """Return the figures of the model: accuracy, balance of loads, and speed-up."""
    return html.Section(
        className="quality panel",
        **{"aria-label": "Quality of the model"},
        children=[
            quality("kpi-ett-error", "ETT error", "How far the estimated training time (ETT) of a "
                    "worker's step is from the measured compute time, mean of |ETT − T| / T."),
            quality("kpi-dif", "Step DIF", "Data imbalance factor: sample standard deviation of "
                    "the workers' loads (sums of sample sizes) in one step, in the data set's size "
                    "unit."),
            quality("kpi-speedup", "Speed-up", "Time per load of the steps before the last policy "
                    "switch ÷ that of the steps since. Above 1× is faster.",
                    id="quality-speedup", hidden=True),
        ],
    )  # fmt: skip


def dock() -> html.Div:
    """Return the main actions, which a phone shows at the bottom of the screen."""
    return html.Div(
        id="dock",
        className="dock",
        hidden=True,
        children=[
            html.Button("Switch policy…", id="dock-switch", type="button"),
            html.Button("Stop…", id="dock-stop", type="button", className="danger"),
        ],
    )
