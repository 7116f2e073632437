"""Dialogs of a run's page: stop, resume, replace a node, and switch the policy.

`assets/js/resuming.js` handles the resume, `replacing.js` the replacement, and `switchdialog.js`
fills the dialog of the switch.
"""

from __future__ import annotations

import dash_mantine_components as dmc
from dash import html

from paceline_dashboard.components import dialog, field


def stop_dialog() -> html.Dialog:
    """Return the dialog that confirms a stop."""
    return dialog(
        "stop-dialog",
        html.H2("Stop this run?", id="stop-dialog-title"),
        html.P(
            "The running segment ends, the loaders run dry and the script goes on to its last "
            "lines. If epochs are left, the run can be resumed later: a script with checkpoints "
            "goes on from its newest one, any other begins anew."
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


def resume_dialog() -> html.Dialog:
    """Return the dialog that confirms a resume and changes its options."""
    return dialog(
        "resume-dialog",
        html.H2("Resume this run?", id="resume-dialog-title"),
        html.P(
            "The same run starts again, with its script and its policy, on as many ranks as before "
            "or as chosen here. "
            "A script with checkpoints goes on from its newest one; steps after it are trained "
            "again. Any other script begins anew."
        ),
        html.Div(
            [
                field("Backend", html.Select(id="resume-backend"), "resume-backend"),
                *(
                    field(words, html.Span(id=f"{element}-slot"), element)
                    for element, words in {
                        "resume-nproc": "Ranks on each node",
                        "resume-nodes-min": "Fewest nodes",
                        "resume-nodes-max": "Most nodes",
                    }.items()
                ),
            ],
            className="resume-size",
        ),
        html.Div(
            field(
                "Environment (NAME=value, a line each; values are not stored)",
                html.Textarea(id="resume-env", rows=3, spellCheck=False),
                "resume-env",
            ),
            id="resume-env-field",
            hidden=True,
        ),
        html.Div(
            field(
                "Your name (shown to other operators)",
                html.Textarea(id="resume-operator", rows=1, maxLength=200),
                "resume-operator",
            ),
            id="resume-operator-field",
            hidden=True,
        ),
        _why("resume-why"),
        html.P(id="resume-problem", className="problem", role="alert", hidden=True),
        confirm=html.Button("Resume run", id="resume-confirm", type="button", className="primary"),
    )


def replace_dialog() -> html.Dialog:
    """Return the dialog that confirms the replacement of a node."""
    return dialog(
        "replace-dialog",
        html.H2("Replace this node?", id="replace-dialog-title"),
        html.P(
            "Another node joins first: a spare of the run, or the least busy one. Then this one "
            "leaves. The ranks go on from the newest checkpoint."
        ),
        dmc.Checkbox(
            id="replace-cordon",
            label="Cordon it, too: it gets no new run until somebody lifts that.",
            size="xs",
        ),
        _why("replace-why"),
        html.P(id="replace-problem", className="problem", role="alert", hidden=True),
        confirm=html.Button(
            "Replace node", id="replace-confirm", type="button", className="primary"
        ),
    )


def _why(element: str) -> html.Div:
    # Use a text area, because Enter in an input would press the form's Cancel button.
    area = html.Textarea(id=element, rows=1, maxLength=500)
    return field("Why? (for the list of changes)", area, element)


def switch_dialog() -> html.Dialog:
    """Return the dialog: presets on the left, the selected preset on the right, buttons below."""
    # The confirm button is the form's first submit button, because Enter presses the first one.
    return html.Dialog(
        html.Form(
            [
                _switch_head(),
                html.Div([_switch_list(), _switch_detail()], className="switch-body"),
                _switch_foot(),
            ],
            id="switch-form",
            method="dialog",
        ),
        id="switch-dialog",
        **{"aria-labelledby": "switch-dialog-title"},
    )


def _switch_head() -> html.Header:
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


def _switch_list() -> html.Div:
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


def _switch_detail() -> html.Div:
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


def _switch_foot() -> html.Footer:
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
