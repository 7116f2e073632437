"""Page of a run.

`run_summary` has the top of the page, `run_charts` the charts, `run_panels` the panels beside them,
and `run_dialogs` the dialogs.
"""

from __future__ import annotations

from typing import Any

from dash import html

from paceline_dashboard import columns, run_charts, run_dialogs, run_panels, run_summary
from paceline_dashboard.components import chart, page_data, panel, table


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
                                run_panels.policy_panel(),
                                run_panels.whatif_panel(),
                                run_panels.target_panel(),
                                run_panels.changes_panel(),
                                run_panels.facts_panel(),
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
        run_dialogs.switch_dialog(),
        run_dialogs.replace_dialog(),
        run_dialogs.stop_dialog(),
        run_dialogs.resume_dialog(),
    ]


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
