"""Dialogs that stop and resume a run. `assets/js/resuming.js` handles the second."""

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


def _why(element: str) -> html.Div:
    # Use a text area, because Enter in an input would press the form's Cancel button.
    area = html.Textarea(id=element, rows=1, maxLength=500)
    return field("Why? (for the list of changes)", area, element)
