"""Page of the fleet: what active runs lose now, slow nodes by day, and the cost of waiting."""

from __future__ import annotations

from typing import Any

from dash import html

from paceline_dashboard.components import loading, option, page_data, panel, save_menu, tip


def fleet_page() -> list[Any]:
    """Return the page, which `assets/js/fleet.js` fills."""
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
        html.Div([_nodes(), _cost()], className="fleet-pair"),
    ]


def _nodes() -> html.Section:
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


def _cost() -> html.Section:
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
