"""Dialog that switches a run's policy. `assets/js/switchdialog.js` fills it."""

from __future__ import annotations

from dash import html


def switch_dialog() -> html.Dialog:
    """Return the dialog: presets on the left, the chosen one on the right, buttons below."""
    # The confirm button is the form's first button of type submit, because Enter presses that one.
    return html.Dialog(
        html.Form(
            [_head(), html.Div([_list(), _detail()], className="switch-body"), _foot()],
            id="switch-form",
            method="dialog",
        ),
        id="switch-dialog",
        **{"aria-labelledby": "switch-dialog-title"},
    )


def _head() -> html.Header:
    return html.Header(
        className="switch-head",
        children=[
            html.Div(
                className="switch-title",
                children=[
                    html.H2("Switch policy", id="switch-dialog-title"),
                    html.Span(
                        [
                            html.Span(id="switch-run", className="muted small"),
                            html.Span(id="switch-in-force", className="badge accent"),
                        ],
                        className="switch-now",
                        role="status",
                    ),
                    html.Button(
                        "✕",
                        id="switch-close",
                        type="button",
                        className="ghost smaller",
                        **{"aria-label": "Close"},
                    ),
                ],
            ),
            html.Div(
                id="switch-notice",
                className="switch-notice",
                role="status",
                hidden=True,
                children=[
                    html.Span(id="switch-notice-words"),
                    html.Button("Look again", id="switch-look", type="button", className="smaller"),
                ],
            ),
        ],
    )


def _list() -> html.Div:
    return html.Div(
        className="switch-list",
        children=[
            html.Div(
                className="switch-scale muted small",
                children=[
                    html.Span(id="switch-forecast", role="status"),
                    html.Span("shorter ← now → longer", className="switch-arrows"),
                ],
            ),
            html.Div(id="policy-presets", role="radiogroup", **{"aria-label": "Presets"}),
            html.P(id="switch-left-out", className="muted small wrap", hidden=True),
        ],
    )


def _detail() -> html.Div:
    return html.Div(
        className="switch-detail",
        children=[
            html.Div(
                className="switch-chosen",
                children=[
                    html.H3(id="policy-chosen"),
                    html.Span(id="switch-tag", className="badge"),
                ],
            ),
            html.P(id="switch-summary"),
            html.Div(id="switch-figures", className="switch-figures"),
            html.Div(
                html.Ul(id="switch-warnings", className="switch-warnings", hidden=True),
                role="status",
            ),
            html.Div(id="policy-parameters", className="parameters"),
            html.Div(id="switch-words"),
            html.Div(html.Ul(id="switch-changes", className="switch-points"), role="status"),
        ],
    )


def _foot() -> html.Footer:
    return html.Footer(
        className="switch-foot",
        children=[
            html.Label(id="switch-accept-label", className="switch-accept", hidden=True),
            html.P(id="switch-problem", className="problem", role="alert", hidden=True),
            html.Div(
                className="switch-buttons",
                children=[
                    html.Span(id="switch-when", className="muted"),
                    html.Button("Cancel", id="switch-cancel", type="button"),
                    html.Button(
                        "Switch policy", id="switch-confirm", type="submit", className="primary"
                    ),
                ],
            ),
        ],
    )
