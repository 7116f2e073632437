"""Panels at the side of a run's page: policy, forecasts, target, changes, and settings."""

from __future__ import annotations

from dash import html

from paceline_dashboard.components import field, option, panel, tip


def policy_panel() -> html.Section:
    """Return the current policy, the last switch with its forecast and effect, and `auto`."""
    return panel(
        "Policy",
        html.Div(
            className="policy-head",
            children=[
                html.Span(id="policy-current", className="policy-current"),
                html.Span(id="policy-tag", className="badge", hidden=True),
                html.Span(id="policy-since", className="muted small push"),
            ],
        ),
        html.P(id="policy-summary", className="muted small"),
        html.P(id="policy-changed", className="small wrap", hidden=True),
        html.P(id="policy-why", className="small wrap", hidden=True),
        html.P(id="policy-fallback", className="small problem wrap", role="status", hidden=True),
        html.Ol(
            id="policy-choices", className="history", hidden=True,
            **{"aria-label": "Earlier synchronisation"},
        ),
        html.Button(
            "Switch policy…", id="switch-open", type="button", disabled=True
        ),
        _last_switch(),
        _auto(),
        labelled="policy-title",
    )  # fmt: skip


def _last_switch() -> html.Div:
    return html.Div(
        className="policy-part",
        children=[
            html.Div(
                className="policy-head",
                children=[
                    html.H3("Last switch"),
                    html.Button(
                        "", id="switch-revert", type="button", className="smaller push", hidden=True
                    ),
                ],
            ),
            html.Div(id="switch-status", role="status", className="switch-status"),
            html.Div(id="switch-last", children=html.Div(id="switch-effect"), hidden=True),
            html.Ol(id="switch-history", className="history", **{"aria-label": "Earlier switches"}),
        ],
    )


def _auto() -> html.Div:
    modes = [
        option("off", "off"),
        option("recommend", "recommend a better one"),
        option("switch", "switch to a better one"),
    ]
    select = html.Select(modes, id="auto-mode", disabled=True)
    return html.Div(
        className="policy-part auto",
        children=[
            field("auto: look for a better policy", select, "auto-mode"),
            html.Div(
                className="field",
                children=[
                    html.Label("relaxed presets, too", id="auto-relaxed-label", className="check"),
                    html.Div(
                        "Under these, ranks do not wait for all others in each step: they "
                        "change the training.",
                        id="auto-relaxed-help",
                        className="muted small",
                    ),
                ],
            ),
            html.P(id="auto-last", className="small wrap", role="status"),
            html.Button("", id="auto-accept", type="button", hidden=True),
            html.P(id="auto-problem", className="problem", role="alert", hidden=True),
        ],
    )


def whatif_panel() -> html.Section:
    """Return the panel with forecasts for other policies, which a click requests."""
    return panel(
        "Other policies",
        html.P(id="whatif-words", className="small", role="status"),
        html.P(
            "Another policy is in force since then: ask again.",
            id="whatif-old", className="small problem", hidden=True,
        ),
        html.P(id="whatif-problem", className="problem", role="alert", hidden=True),
        html.Div(
            id="whatif-recommended", className="recommended-box", hidden=True,
            children=[
                html.Div(
                    [
                        html.B(id="whatif-best"),
                        html.Span("recommended", className="badge recommended"),
                        html.B(id="whatif-best-figure", className="push"),
                    ],
                    className="policy-head",
                ),
                html.Div(id="whatif-best-interval"),
                html.P(id="whatif-best-about", className="small"),
                html.Button("Look at it and its parameters…", id="whatif-look", type="button"),
            ],
        ),
        html.Ol(id="whatif-forecasts", className="forecasts", **{"aria-label": "Forecasts"}),
        html.Div(
            [
                html.Button("What would other policies save?", id="whatif-ask", type="button"),
                html.Button("All options…", id="whatif-all", type="button", hidden=True),
            ],
            className="whatif-buttons",
        ),
        html.P(id="whatif-note", className="muted small wrap"),
        labelled="whatif-title",
    )  # fmt: skip


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


def changes_panel() -> html.Section:
    """Return the list of changes: who changed the run, when, and why."""
    return panel(
        "Changes",
        html.P("Nobody has changed this run.", id="changes-none", className="muted small",
               hidden=True),
        html.Ol(id="changes", className="history", **{"aria-labelledby": "changes-title"}),
        labelled="changes-title",
    )  # fmt: skip


def facts_panel() -> html.Section:
    """Return the settings of the run."""
    return panel("Run", html.Dl(id="run-facts", className="facts"), labelled="facts-title")
