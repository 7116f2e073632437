"""Panel of a run's target: the metric value that the operator wants, and when the run met it."""

from __future__ import annotations

from dash import html

from paceline_dashboard.components import field, option, panel, tip


def target_panel() -> html.Section:
    """Return the target in words, and the form that sets it."""
    meaning = (
        "A value that a metric of the evaluations shall reach. The time to target goes from the "
        "run's begin to the first evaluation that meets it. If the script evaluates no loss, a "
        "target for the loss is about the training loss, as its mean over 100 steps."
    )
    directions = [option(">=", "at least"), option("<=", "at most")]
    form = html.Details(
        id="target-form",
        children=[
            html.Summary("Set a target…"),
            field("Metric", html.Span(id="target-metric-place"), "target-metric"),
            field("Direction", html.Select(directions, id="target-direction"), "target-direction"),
            field("Value", html.Span(id="target-value-place"), "target-value"),
            html.Div(
                className="bar",
                children=[
                    html.Button("Set target", id="target-set", type="button", className="primary"),
                    html.Button("Remove", id="target-remove", type="button", hidden=True),
                ],
            ),
            html.P(id="target-problem", className="problem", role="alert", hidden=True),
        ],
    )
    return panel(
        "Target",
        html.P(id="target-words", className="small", role="status"),
        form,
        labelled="target-title",
        beside=[tip("Target", meaning)],
    )
