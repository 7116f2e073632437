"""Frame of all pages, and the list of runs.

Modules in ``assets/js`` fill the pages with data. `run_page` has the page of a single run.
"""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from paceline_dashboard import columns
from paceline_dashboard.components import here, option, page_data, panel, table

RUN_STATES = ["pending", "queued", "starting", "running", "finished", "failed", "stopped"]


def shell() -> dmc.MantineProvider:
    """Return the frame of every page."""
    header = html.Header(
        className="top",
        children=[
            html.A("Skip to content", href="#page", className="skip"),
            dcc.Link(
                [html.Span(className="logo", **{"aria-hidden": "true"}), "Paceline"],
                href=here("/"),
                className="brand",
                title="All runs",
            ),
            html.Nav(
                [
                    dcc.Link("Fleet", href=here("/fleet")),
                    dcc.Link(
                        ["Alerts", html.Span(id="alerts-bell", className="bell")],
                        href=here("/alerts"),
                    ),
                ],
                className="sites",
                **{"aria-label": "All runs"},
            ),
            html.Nav(id="crumbs", className="crumbs", **{"aria-label": "Where you are"}),
            html.Div(id="connection-status", role="status", className="connection"),
            html.Span(id="connection-age", className="connection-age"),
            dmc.ColorSchemeToggle(
                lightIcon=html.Span("☾"),
                darkIcon=html.Span("☀"),
                variant="subtle",
                color="gray",
                size="lg",
                **{"aria-label": "Switch between light and dark"},
            ),
            html.Form(html.Button("Log out", type="submit"), action=here("/logout"), method="POST"),
        ],
    )
    return dmc.MantineProvider(
        [
            dcc.Location(id="url"),
            dcc.Store(id="page-opened"),
            header,
            html.P(id="page-lost", className="callout bad", hidden=True, role="status"),
            html.Main(id="page", tabIndex="-1"),
        ],
        defaultColorScheme="auto",
        theme={
            "fontFamily": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
            "primaryColor": "teal",
        },
    )


def runs_page() -> list[Any]:
    """Return the list of runs, and the nodes."""
    return [
        page_data("runs"),
        html.Div(
            className="bar",
            children=[
                html.H1("Runs"),
                html.Span(id="runs-count", className="muted", role="status"),
                dcc.Link("Forecasts against outcomes", href=here("/forecasts"), className="push"),
                dcc.Link("Compare", href=here("/compare")),
                dcc.Link("New run…", href=here("/launch"), id="runs-new", className="button"),
            ],
        ),
        _filters(),
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
        _standings(),
        table("runs-grid", columns.RUNS),
        html.Div(
            html.Button("More runs", id="runs-more", type="button", hidden=True), className="bar"
        ),
        panel("Nodes", html.Div(id="nodes"), labelled="nodes-title"),
    ]


def _filters() -> html.Div:
    states = [option("", "all"), *(option(state, state) for state in RUN_STATES)]
    orders = {
        "": "who needs a person first",
        "-created_at": "newest first",
        "-waste": "most waste first",
        "-se": "most uneven first",
        "-step_s": "slowest steps first",
        "-cost": "most expensive first",
    }
    controls = {
        "state-filter": ("State", states),
        "tag-filter": ("Tag", [option("", "all")]),
        "used-filter": ("Policy, ever", [option("", "all")]),
        "runs-sort": ("Order", [option(sort, words) for sort, words in orders.items()]),
    }
    search = html.Div(
        [html.Label("Search", htmlFor="runs-search"), html.Span(id="runs-search-place")],
        className="filter",
    )
    fields = [
        html.Div(
            [html.Label(words, htmlFor=name), html.Select(options, id=name)],
            className="filter",
            id=f"{name}-field",
        )
        for name, (words, options) in controls.items()
    ]
    every = html.Button("Show all", id="runs-all", type="button", className="quiet", hidden=True)
    return html.Div([search, *fields, every], className="bar filters", role="search")


def _standings() -> html.Div:
    """Return totals over all active runs."""
    return html.Div(
        id="runs-standings",
        className="standings",
        hidden=True,
        children=[
            html.Div(
                [html.B("–", id="standing-running"), html.Span(id="standing-workers")],
                className="panel",
            ),
            html.Div(
                [html.B("–", id="standing-held-up"), html.Span(id="standing-watch")],
                className="panel",
            ),
            html.Div(
                [html.B("–", id="standing-waste"), html.Span("of worker time waits now")],
                className="panel",
            ),
        ],
    )


def missing_page(path: str) -> list[Any]:
    """Return the page for an unknown address."""
    return [
        page_data("missing"),
        html.Div(
            className="panel empty",
            children=[
                html.H1("No such page"),
                html.P(["Nothing is at ", html.Code(path), "."]),
                dcc.Link("All runs", href=here("/")),
            ],
        ),
    ]
