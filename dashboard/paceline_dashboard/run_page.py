"""A run's page: its header, panels and dialogs. The charts are in `run_charts`."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import html

from paceline_dashboard import columns, run_charts
from paceline_dashboard.components import chart, dialog, field, option, page_data, panel, table


def run_page(run: str, plotly_url: str) -> list[Any]:
    """One run, live.

    Args:
        run: its public id.
        plotly_url: where the browser finds Plotly.
    """
    return [
        page_data("run", run=run, plotly=plotly_url),
        html.Div(id="run-problem", className="problem", role="alert", hidden=True),
        html.Pre(
            id="run-log",
            className="log",
            hidden=True,
            tabIndex="0",
            **{"aria-label": "Last lines of the failed rank's log"},
        ),
        _run_header(),
        html.Section(run_charts.key_figures(), className="kpis", **{"aria-label": "Key figures"}),
        html.Div(
            className="columns",
            children=[
                html.Section(run_charts.charts(), className="charts", **{"aria-label": "Charts"}),
                html.Aside(
                    [_policy_panel(), _whatif_panel(), _changes_panel(), _facts_panel()],
                    className="side",
                ),
            ],
        ),
        _workers_panel(),
        _switch_dialog(),
        _stop_dialog(),
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
                "Stop run…", id="stop-open", type="button", className="danger push", disabled=True
            ),
        ],
    )


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
        html.P(id="policy-fallback", className="small problem wrap", role="status", hidden=True),
        html.Ol(
            id="policy-choices", className="history", hidden=True,
            **{"aria-label": "Earlier synchronisers"},
        ),
        html.Button(
            "Switch policy…", id="switch-open", type="button", className="primary", disabled=True
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


def _changes_panel() -> html.Section:
    return panel(
        "Changes",
        html.P("Nobody has changed this run.", id="changes-none", className="muted small",
               hidden=True),
        html.Ol(id="changes", className="history", **{"aria-labelledby": "changes-title"}),
        labelled="changes-title",
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
        _why("switch-why"),
        html.P(id="switch-when"),
        html.P(id="switch-changes", className="small", role="status"),
        html.Ul(id="switch-warnings", className="small warnings", role="status", hidden=True),
        html.P(id="switch-problem", className="problem", role="alert", hidden=True),
        confirm=html.Button(
            "Switch policy", id="switch-confirm", type="button", className="primary"
        ),
    )  # fmt: skip


def _why(element: str) -> html.Div:
    """The reason of a change. A text area: Enter in an input would press the form's Cancel."""
    area = html.Textarea(id=element, rows=1, maxLength=500)
    return field("Why? (for the list of changes)", area, element)


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
        _why("stop-why"),
        html.P(id="stop-problem", className="problem", role="alert", hidden=True),
        confirm=html.Button("Stop run", id="stop-confirm", type="button", className="danger"),
    )
