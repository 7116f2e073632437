"""Page of alerts: active and resolved alerts, rules, and webhooks."""

from __future__ import annotations

from typing import Any

from dash import html

from paceline_dashboard.components import dialog, field, option, page_data, panel


def alerts_page() -> list[Any]:
    """Return the page, which `assets/js/alerts.js` fills."""
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
                        option("raised", "what goes on"),
                        option("resolved", "what is over"),
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
