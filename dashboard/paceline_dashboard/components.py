"""The components of the pages."""

from __future__ import annotations

from typing import Any

import dash_ag_grid as dag
import dash_mantine_components as dmc
from dash import dcc, html
from plotly.colors import qualitative


def page_data(page: str, **values: object) -> dcc.Store:
    """The data that bridge.js passes to the page's module."""
    return dcc.Store(
        id="page-data", data={"page": page, "palette": list(qualitative.Safe), **values}
    )


def tip(name: str, text: str) -> dmc.Tooltip:
    """A small "?" that explains a term on hover, focus and touch."""
    return dmc.Tooltip(
        html.Button("?", type="button", className="tip", **{"aria-label": f"About {name}: {text}"}),
        label=text,
        multiline=True,
        w=280,
        withArrow=True,
        events={"hover": True, "focus": True, "touch": True},
    )


def kpi(element: str, label: str, meaning: str) -> html.Div:
    """A key figure. `element` shows the value, and ``{element}-note`` a note below the value."""
    return html.Div(
        className="kpi panel",
        children=[
            html.Div([html.Span(label), tip(label, meaning)], className="kpi-label"),
            html.Div("–", id=element, className="kpi-value"),
            html.Div(id=f"{element}-note", className="kpi-note muted"),
        ],
    )


def chart(
    element: str, title: str, meaning: str, *, wide: bool = False, tall: bool = False
) -> html.Figure:
    """A chart's card. The page's module draws into `element`; the style sheet sets its size."""
    sizes = " wide" * wide + " tall" * tall
    return html.Figure(
        className=f"panel chart{sizes}",
        children=[
            html.Figcaption([title, tip(title, meaning)]),
            html.Div(id=element, className="plot", role="img", **{"aria-label": title}),
        ],
    )


def panel(title: str, *children: Any, labelled: str) -> html.Section:
    """A titled box."""
    return html.Section(
        [html.H2(title, id=labelled), *children],
        className="panel",
        **{"aria-labelledby": labelled},
    )


def table(element: str, columns: list[dict[str, Any]], **options: Any) -> dag.AgGrid:
    """A table. The page's module sets the rows; each row has an `id`.

    Args:
        element: its id.
        columns: as AG Grid's `columnDefs`.
        options: further grid options.
    """
    return dag.AgGrid(
        id=element,
        columnDefs=columns,
        rowData=[],
        getRowId="params.data.id",
        defaultColDef={"sortable": True, "resizable": True, "suppressMovable": True},
        dashGridOptions={
            "domLayout": "autoHeight",
            "animateRows": False,
            "rowHeight": 34,
            "headerHeight": 34,
            "theme": {"function": "paceline.gridTheme(themeQuartz)"},
            "tooltipShowDelay": 300,
            **options,
        },
        style={"height": None, "width": "100%"},
    )


def field(label: str, control: Any, element: str) -> html.Div:
    """A labelled control."""
    return html.Div([html.Label(label, htmlFor=element), control], className="field")


def option(value: str, label: str) -> html.Option:
    """One choice of a native select."""
    return html.Option(label, value=value)


def dialog(element: str, *children: Any, confirm: html.Button) -> html.Dialog:
    """A native modal dialog: the browser keeps the focus inside and closes it on Escape."""
    return html.Dialog(
        html.Form(
            [
                *children,
                html.Div([html.Button("Cancel", type="submit"), confirm], className="bar end"),
            ],
            method="dialog",
        ),
        id=element,
        **{"aria-labelledby": f"{element}-title"},
    )
