"""Page of a rank: its steps beside those of other ranks, its times, its node and its log."""

from __future__ import annotations

from typing import Any

from dash import dcc, html

from paceline_dashboard.components import chart, choices, here, option, page_data, panel, tip

_PHASES = {
    "data": "How long the rank waited for the data loader",
    "compute": "Forward and backward, without waiting or communication",
    "wait": "For slower ranks, within the reduction of the gradients",
    "reduce": "The reduction of the gradients itself",
    "rest": "The rest of the step: the optimiser and the script",
}


def rank_page(run: str, rank: str) -> list[Any]:
    """Return the live page of a rank.

    `run` is the run's public id, and `rank` the rank's number as in the address.
    """
    return [
        page_data("rank", run=run, rank=rank),
        html.Div(id="rank-problem", className="problem", role="alert", hidden=True),
        html.Div(
            className="bar",
            children=[
                html.H1([
                    dcc.Link("…", id="rank-run", href=here(f"/runs/{run}"), className="muted"),
                    html.Span(" / ", className="muted"),
                    html.Span(f"rank {rank}", id="rank-title"),
                ]),
                html.Span(id="rank-phase", className="badge", role="status"),
                html.Span(id="rank-where", className="muted"),
                html.Label("rank", htmlFor="rank-pick", className="muted small push"),
                html.Span(id="rank-pick-place"),
            ],
        ),
        html.Div(id="rank-verdict", className="rank-verdict", hidden=True, children=[
            html.B(id="rank-verdict-title"), html.Span(id="rank-verdict-words"),
        ]),
        html.Div(
            className="columns",
            children=[
                html.Div([_gantt(), _charts(), _stacks(), _log()], className="evidence"),
                html.Aside([_facts(), _node(), _history()], className="side"),
            ],
        ),
    ]  # fmt: skip


def _gantt() -> html.Section:
    keys = [
        html.Span([html.I(className=f"phase {name}"), html.Span(name, title=meaning)])
        for name, meaning in _PHASES.items()
    ]
    return html.Section(
        className="panel",
        **{"aria-labelledby": "gantt-title"},
        children=[
            html.Div(
                className="bar card-head",
                children=[
                    html.H2("Its last steps beside other ranks", id="gantt-title"),
                    tip("steps", "Each bar is a phase of a rank's step. The step ends for all "
                        "ranks together, so whoever computes longest makes the others wait. "
                        "Times are those of the nodes' clocks."),
                    html.Span(keys, className="phases muted small"),
                    html.Span(className="push"),
                    html.Button("‹", id="gantt-back", type="button", className="slim",
                                **{"aria-label": "Earlier steps"}),
                    html.Span(id="gantt-steps", className="small", role="status"),
                    html.Button("›", id="gantt-on", type="button", className="slim",
                                **{"aria-label": "Later steps"}),
                    html.Button("Follow", id="gantt-follow", type="button", className="slim",
                                **{"aria-pressed": "true"}),
                    html.A("Trace", id="gantt-trace", className="small", href="#",
                           title="These steps as a trace that Perfetto and Chrome open"),
                ],
            ),
            html.Div(id="gantt", className="gantt", role="img",
                     **{"aria-label": "Its last steps beside other ranks"}),
            html.P("Comes with the first step that all workers have ended.", id="gantt-empty",
                   className="muted small"),
        ],
    )  # fmt: skip


def _charts() -> html.Div:
    return html.Div(
        className="charts",
        children=[
            chart("chart-ratio", "Time ÷ typical rank's", "The rank's compute time ÷ the typical "
                  "rank's in the same step: the lower median of the ranks that the verdict does "
                  "not name as slow. 1× is like the others."),
            chart("chart-times", "Compute time and ETT", "Compute time of this rank, and dashed "
                  "the time that the plan expected (ETT)."),
        ],
    )  # fmt: skip


def _stacks() -> html.Section:
    return html.Section(
        id="stacks-card",
        className="panel",
        hidden=True,
        **{"aria-labelledby": "stacks-title"},
        children=[
            html.Div(
                className="bar card-head",
                children=[
                    html.H2("Where in its code it is", id="stacks-title"),
                    html.Span(id="stacks-words", className="small"),
                    html.Button("Ask for its stacks", id="stacks-ask", type="button",
                                className="slim push"),
                ],
            ),
            html.P(id="stacks-problem", className="problem", role="alert", hidden=True),
            html.Pre(id="stacks-text", className="log", hidden=True, tabIndex="0",
                     **{"aria-label": "Python stacks"}),
        ],
    )  # fmt: skip


def _log() -> html.Section:
    outputs = [option("stdout", "stdout"), option("stderr", "stderr")]
    return html.Section(
        className="panel",
        **{"aria-labelledby": "log-title"},
        children=[
            html.Div(
                className="bar card-head",
                children=[
                    html.H2("Log", id="log-title"),
                    html.Span(id="log-where", className="muted small"),
                    html.Span(className="push"),
                    html.Label("Output", htmlFor="log-output", className="muted small"),
                    html.Select(outputs, id="log-output"),
                    html.Label("Search", htmlFor="log-search", className="muted small"),
                    html.Span(id="log-search-place"),
                    html.Span(id="log-hits", className="muted small", role="status"),
                    choices("log-lines", "Lines", "all", {"all": "all", "warnings": "warnings"}),
                    html.Button("Follow", id="log-follow", type="button", className="slim",
                                **{"aria-pressed": "true"}),
                    html.Button("Earlier lines", id="log-more", type="button", className="slim"),
                    html.Button("Copy", id="log-copy", type="button", className="slim"),
                    html.Button("Download", id="log-download", type="button", className="slim"),
                ],
            ),
            html.P(id="log-problem", className="muted small", role="status"),
            html.Div(id="log-text", className="log-lines", tabIndex="0", role="log",
                     **{"aria-label": "The rank's log", "aria-live": "off"}),
        ],
    )  # fmt: skip


def _facts() -> html.Section:
    return panel("This rank, last 50 steps", html.Dl(id="rank-facts", className="facts"),
                 labelled="rank-facts-title")  # fmt: skip


def _node() -> html.Section:
    return panel(
        "Node",
        html.P(id="node-words", className="small"),
        html.Div(html.Table(id="node-devices"), className="scroll"),
        html.Dl(id="node-facts", className="facts"),
        labelled="node-title",
    )


def _history() -> html.Section:
    return panel("History of this rank", html.Ol(id="rank-history", className="rank-history"),
                 labelled="rank-history-title")  # fmt: skip
