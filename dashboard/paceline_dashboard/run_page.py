"""Page of a run: its panels and dialogs.

`run_summary` has the top of the page, and `run_charts` the charts.
"""

from __future__ import annotations

from typing import Any

from dash import html

from paceline_dashboard import columns, run_actions, run_charts, run_summary
from paceline_dashboard.components import chart, page_data, panel, table
from paceline_dashboard.policy_panel import policy_panel, whatif_panel
from paceline_dashboard.switch_dialog import switch_dialog
from paceline_dashboard.target_panel import target_panel


def run_page(run: str) -> list[Any]:
    """Return the live page of a run. `run` is its public id."""
    return [
        page_data("run", run=run),
        *run_summary.problems(run),
        html.Div(
            id="run-body",
            children=[
                run_summary.header(),
                run_summary.verdict(),
                html.Div(
                    className="columns",
                    children=[
                        html.Div(
                            className="evidence",
                            children=[
                                run_summary.tiles(),
                                run_summary.quality_row(),
                                html.Section(
                                    run_charts.charts(),
                                    className="charts",
                                    **{"aria-label": "Charts"},
                                ),
                            ],
                        ),
                        html.Aside(
                            [
                                policy_panel(),
                                whatif_panel(),
                                target_panel(),
                                _changes_panel(),
                                _facts_panel(),
                            ],
                            className="side",
                        ),
                    ],
                ),
                _workers_panel(),
                _epochs_panel(),
                run_summary.dock(),
            ],
        ),
        switch_dialog(),
        run_summary.replace_dialog(),
        run_actions.stop_dialog(),
        run_actions.resume_dialog(),
    ]


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


def _epochs_panel() -> html.Section:
    return panel(
        "Epochs",
        html.Details(
            id="epochs",
            children=[
                html.Summary("What each epoch came to, by worker too"),
                html.P(id="epochs-problem", className="problem", role="alert", hidden=True),
                html.P("No step yet.", id="epochs-none", className="muted small", hidden=True),
                html.Div(id="epochs-table"),
                html.H3(id="epochs-words", role="status"),
                html.Div(id="epochs-workers"),
            ],
        ),
        labelled="epochs-title",
    )
