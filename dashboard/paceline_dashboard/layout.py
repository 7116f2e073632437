"""The frame of all pages, and the list of runs.

Modules in ``assets/js`` fill the pages with numbers. `run_page` has the page of one run.
"""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from paceline_dashboard import columns
from paceline_dashboard.components import option, page_data, panel, table

RUN_STATES = ["pending", "queued", "starting", "running", "finished", "failed", "stopped"]


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


def runs_page() -> list[Any]:
    """The list of runs, and the nodes."""
    return [
        page_data("runs"),
        html.Div(
            className="bar",
            children=[
                html.H1("Runs"),
                html.Span(id="runs-count", className="muted", role="status"),
                dcc.Link("Forecasts against outcomes", href="/forecasts", className="push"),
                html.Label("State", htmlFor="state-filter"),
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


def missing_page(path: str) -> list[Any]:
    """For an address that is no page."""
    return [
        page_data("missing"),
        html.Div(
            className="panel empty",
            children=[html.H1("No such page"), html.P(["Nothing is at ", html.Code(path), "."])],
        ),
    ]
