"""Page that starts a run. `assets/js/launch.js` creates its fields."""

from __future__ import annotations

from typing import Any

from dash import html

from paceline_dashboard.components import page_data, panel


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
