"""Frame of all pages, and the pages about all runs: list, new run, comparison, alerts and so on.

A function returns the elements of a page, and the module in ``assets/js`` of the same name fills
them with data. `run_page` has the page of a single run, and `rank_page` the page of a rank.
"""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from paceline_dashboard import columns
from paceline_dashboard.components import (
    chart,
    dialog,
    field,
    here,
    kpi,
    loading,
    option,
    page_data,
    panel,
    save_menu,
    table,
    tip,
)

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


def launch_page() -> list[Any]:
    """Return the form for a new run."""
    return [
        page_data("launch"),
        html.Div(html.H1("New run"), className="bar"),
        html.P("", id="launch-rights", className="muted", hidden=True),
        html.Form(
            [
                html.Div(
                    [
                        panel("What", html.Div(id="launch-what"), labelled="launch-what-title"),
                        panel("Where", html.Div(id="launch-where"), labelled="launch-where-title"),
                        panel("How", html.Div(id="launch-how"), labelled="launch-how-title"),
                    ],
                    className="launch-columns",
                ),
                html.P(id="launch-problem", className="problem", role="alert", hidden=True),
                html.Div(
                    [
                        html.Span(id="launch-summary", className="muted", role="status"),
                        html.Button(
                            "Start run",
                            id="launch-start",
                            type="submit",
                            className="primary",
                            disabled=True,
                        ),
                    ],
                    className="bar end launch-bar",
                ),
            ],
            id="launch-form",
        ),
    ]


def compare_page() -> list[Any]:
    """Return overlaid charts and a table of differences, which ``assets/js/compare.js`` fills."""
    return [
        page_data("compare"),
        html.Div(
            className="bar",
            children=[
                html.H1("Compare"),
                html.Label("Align by", htmlFor="compare-align", className="push"),
                html.Select(
                    [option("step", "step"), option("sample", "sample"), option("time", "time")],
                    id="compare-align",
                ),
                html.Label("Smooth over", htmlFor="compare-smooth"),
                html.Select(
                    [
                        option("1", "raw"),
                        option("50", "50 steps"),
                        option("200", "200 steps"),
                    ],
                    id="compare-smooth",
                ),
                html.Button("CSV", id="compare-csv", type="button", disabled=True),
                html.Button("Copy link", id="compare-link", type="button"),
            ],
        ),
        html.Div(id="compare-sides", className="compare-sides"),
        html.Div(id="compare-problem", className="problem", role="alert", hidden=True),
        html.Div(
            id="compare-empty",
            className="panel empty",
            children=[
                html.H2("Nothing to compare yet"),
                html.P(
                    "Choose two runs above, or one run twice with different parts of it. Charts "
                    "and a table of differences with 95 % intervals appear here."
                ),
            ],
        ),
        html.Div(_comparison(), id="compare-answer", hidden=True),
    ]


def _comparison() -> list[Any]:
    charts = [
        chart(
            "compare-step_s",
            "Time per step",
            "Median of the steps around, and a band from the 10th to the 90th percentile.",
            wide=True,
        ),
        chart("compare-waste", "Waste", "Share of the ranks' time spent waiting for slower ones."),
        chart("compare-loss", "Loss", "Of the global batch, as the ranks reported it."),
        chart(
            "compare-ranks",
            "Compute time per rank",
            "Median of a rank's steps, of each side. Of many ranks, those that differ most.",
            wide=True,
        ),
    ]
    return [
        html.Div(id="compare-words", className="panel compare-words", role="status"),
        html.Div(
            className="compare-columns",
            children=[
                html.Div(charts, className="charts"),
                panel(
                    "Differences",
                    html.P(
                        "below each difference of steps its 95 % interval (bootstrap over blocks "
                        "of steps); what is measured once has none",
                        className="muted small",
                    ),
                    html.Div(id="compare-table"),
                    labelled="compare-table-title",
                ),
            ],
        ),
    ]


def forecasts_page() -> list[Any]:
    """Return the page on forecast accuracy, which `assets/js/forecasts.js` fills."""
    return [
        page_data("forecasts"),
        html.Div(
            className="bar",
            children=[
                html.H1("Forecasts against outcomes"),
                html.Span(id="forecasts-count", className="muted", role="status"),
                html.Label("Runs", htmlFor="forecasts-runs", className="push"),
                html.Select(
                    [option("", "real ones"), option("true", "real and simulated ones")],
                    id="forecasts-runs",
                ),
            ],
        ),
        html.Div(id="forecasts-problem", className="problem", role="alert", hidden=True),
        html.Div(
            id="forecasts-empty",
            className="panel empty",
            hidden=True,
            children=[
                html.H2("No outcomes yet"),
                html.P(
                    "This page will compare what forecasts said a switch of policy would save with "
                    "what the switch then saved: a chart, how many outcomes were inside the "
                    "forecasts' 95 % intervals, and the errors of each preset."
                ),
                html.P(
                    "A switch appears here if a forecast was made before it, and once 200 steps "
                    "after it count, another policy has followed, or its run has been over for a "
                    "minute."
                ),
            ],
        ),
        html.Div(_outcomes(), id="forecasts-outcomes", hidden=True),
    ]


def _outcomes() -> list[Any]:
    return [
        html.Section(_accuracy(), className="kpis", **{"aria-label": "How right forecasts were"}),
        chart(
            "chart-outcomes",
            "Forecast and measured saving",
            "Each mark is a switch: the saving that was forecast, and the one that was measured, "
            "with 95 % intervals. On the dashed line both are equal.",
        ),
        panel("By preset", html.Div(id="forecasts-presets"), labelled="forecasts-presets-title"),
        panel("Newest switches", html.Div(id="forecasts-items"), labelled="forecasts-items-title"),
    ]


def _accuracy() -> list[Any]:
    return [
        kpi(
            "forecasts-inside",
            "Inside 95 %",
            "Share of measured savings inside the forecasts' intervals. 95 % is right.",
        ),
        kpi(
            "forecasts-median",
            "Median error",
            "Of the forecast time for the same load, relative to the measured time, without sign.",
        ),
        kpi("forecasts-p90", "90 % below", "Nine of ten errors, without sign, are below this."),
        kpi(
            "forecasts-bias",
            "Bias",
            "Mean error with its sign. Above zero, forecasts of the time are too long.",
        ),
    ]


def alerts_page() -> list[Any]:
    """Return the page of alerts and rules, which `assets/js/alerts.js` fills."""
    return [
        page_data("alerts"),
        html.Div(
            className="bar",
            children=[
                html.H1("Alerts"),
                html.Span(id="alerts-summary", className="muted", role="status"),
                html.Label("Show", htmlFor="alerts-state", className="push"),
                html.Select(
                    [
                        option("raised", "active"),
                        option("resolved", "resolved"),
                        option("", "all"),
                    ],
                    id="alerts-state",
                ),
            ],
        ),
        html.Div(id="alerts-problem", className="problem", role="alert", hidden=True),
        html.P("", id="alerts-rights", className="muted", hidden=True),
        html.Section(
            [
                html.P("", id="alerts-none", className="muted", hidden=True),
                html.Div(id="alerts-list"),
                html.Button("Older alerts", id="alerts-more", type="button", hidden=True),
            ],
            className="panel",
            **{"aria-label": "Alerts"},
        ),
        panel(
            "Rules",
            html.P(
                "A condition has to hold for a while before an alert is raised, and to be gone for "
                "a while before it is resolved.",
                className="muted",
            ),
            _name_field("rules-operator"),
            html.Div(id="alerts-rules"),
            labelled="alerts-rules-title",
        ),
        panel(
            "Webhooks",
            html.P("", id="webhooks-note", className="muted"),
            html.Div(id="webhooks-list"),
            html.Form(
                [
                    field("Name", html.Span(id="webhook-name-slot"), "webhook-name"),
                    field("URL", html.Span(id="webhook-url-slot"), "webhook-url"),
                    field(
                        "Least severity",
                        html.Select(
                            [option(name, name) for name in ("warning", "critical", "info")],
                            id="webhook-severity",
                        ),
                        "webhook-severity",
                    ),
                    html.Button("Add webhook", id="webhook-add", type="submit"),
                ],
                id="webhook-form",
                className="webhook-form",
                hidden=True,
            ),
            html.P("", id="webhook-secret", className="secret", role="status", hidden=True),
            labelled="webhooks-title",
        ),
        _acknowledge_dialog(),
        _webhook_dialog(),
    ]


def _name_field(element: str) -> html.Div:
    # Users who share a token have to give their names.
    name = html.Textarea(id=element, rows=1, maxLength=200)
    return html.Div(
        field("Your name (shown to other operators)", name, element),
        id=f"{element}-field",
        hidden=True,
    )


def _acknowledge_dialog() -> html.Dialog:
    return dialog(
        "acknowledge-dialog",
        html.H2("Acknowledge this alert?", id="acknowledge-dialog-title"),
        html.P("", id="acknowledge-about"),
        _name_field("acknowledge-operator"),
        field(
            "Why? (shown beside the alert)",
            html.Textarea(id="acknowledge-why", rows=1, maxLength=500),
            "acknowledge-why",
        ),
        html.P(id="acknowledge-problem", className="problem", role="alert", hidden=True),
        confirm=html.Button(
            "Acknowledge", id="acknowledge-confirm", type="button", className="primary"
        ),
    )


def _webhook_dialog() -> html.Dialog:
    return dialog(
        "webhook-dialog",
        html.H2("Delete this webhook?", id="webhook-dialog-title"),
        html.P("", id="webhook-about"),
        html.P(id="webhook-problem", className="problem", role="alert", hidden=True),
        confirm=html.Button(
            "Delete webhook", id="webhook-confirm", type="button", className="danger"
        ),
    )


def fleet_page() -> list[Any]:
    """Return the page about all runs and nodes, which `assets/js/fleet.js` fills."""
    return [
        page_data("fleet"),
        html.Div(
            className="bar",
            children=[
                html.H1("Fleet"),
                html.Span(id="fleet-words", className="muted", role="status"),
                html.Label("Days", htmlFor="fleet-days", className="push"),
                html.Select(
                    [option(days, f"last {days}") for days in ("28", "7", "90")], id="fleet-days"
                ),
            ],
        ),
        html.Div(id="fleet-problem", className="problem", role="alert", hidden=True),
        html.Div(id="fleet-figures", className="fleet-figures"),
        panel(
            "Runs that train, by what they lose",
            html.Div(loading(), id="fleet-runs"),
            labelled="fleet-runs-title",
        ),
        html.Div([_fleet_nodes(), _fleet_cost()], className="fleet-pair"),
    ]


def _fleet_nodes() -> html.Section:
    return panel(
        "Nodes, day by day",
        html.Div(loading(), id="fleet-nodes"),
        labelled="fleet-nodes-title",
        beside=[
            tip("nodes by day", "For how many hours of each day a verdict named the node as one "
                "that others wait for, in whatever run. A node that is named day after day is one "
                "to replace."),
            save_menu("fleet-nodes", "Nodes, day by day", ("csv",)),
        ],
    )  # fmt: skip


def _fleet_cost() -> html.Section:
    groups = [option(by, by) for by in ("owner", "tag", "run")]
    return panel(
        "Cost of waiting",
        html.Div(
            [html.Label("Added up by", htmlFor="fleet-by"), html.Select(groups, id="fleet-by")],
            className="bar",
        ),
        html.Div(loading(), id="fleet-cost"),
        labelled="fleet-cost-title",
        beside=[
            tip("cost of waiting", "Worker-hours in which ranks waited for slower ones: four ranks "
                "that each wait for half an hour are 2 hours. With a price of a worker-hour "
                "(paceline server --hour-price), they are money, too. Cost is of all time of "
                "the ranks. A run counts for each of its tags, so tags may add up to more "
                "than all runs."),
            save_menu("fleet-cost", "Cost of waiting", ("csv",)),
        ],
    )  # fmt: skip


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
