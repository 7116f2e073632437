"""Components that several pages share. Browser modules fill them by their element ids."""

from __future__ import annotations

from typing import Any

import dash
import dash_ag_grid as dag
import dash_mantine_components as dmc
from dash import dcc, html
from plotly.colors import qualitative


def here(path: str) -> str:
    """Return the address of a page, such as `/forecasts`, including a proxy's path prefix."""
    address: str = dash.get_relative_path(path)
    return address


def page_data(page: str, **values: object) -> dcc.Store:
    """Return the data that bridge.js passes to the page's module."""
    return dcc.Store(
        id="page-data", data={"page": page, "palette": list(qualitative.Safe), **values}
    )


def tip(name: str, text: str) -> dmc.Tooltip:
    """Return a small "?" that explains a term on hover, focus and touch."""
    return dmc.Tooltip(
        html.Button("?", type="button", className="tip", **{"aria-label": f"About {name}: {text}"}),
        label=text,
        multiline=True,
        w=280,
        withArrow=True,
        events={"hover": True, "focus": True, "touch": True},
    )


def kpi(element: str, label: str, meaning: str) -> html.Div:
    """Return a key figure; `element` is its value's id, and ``{element}-note`` its note's id."""
    return html.Div(
        className="kpi panel",
        children=[
            html.Div([html.Span(label), tip(label, meaning)], className="kpi-label"),
            html.Div("–", id=element, className="kpi-value"),
            html.Div(id=f"{element}-note", className="kpi-note muted"),
        ],
    )


def tile(element: str, label: str, meaning: str, spark: str, beside: Any) -> html.Div:
    """Return a large figure with a small chart.

    `element` is the id of the value. ``{element}-bold`` and ``{element}-note`` are the ids of the
    two parts of the line below it. The page's module draws the chart into the element `spark`.
    `beside` is on the right of the label.
    """
    return html.Div(
        id=f"{element}-tile",
        className="tile panel",
        children=[
            html.Div(
                [html.Span([label, tip(label, meaning)]), html.Span(beside)], className="tile-label"
            ),
            html.Div("–", id=element, className="tile-value"),
            html.Div(id=spark, className="tile-spark"),
            html.Div(
                [html.B(id=f"{element}-bold"), html.Span("loading…", id=f"{element}-note")],
                className="tile-note",
            ),
        ],
    )


def quality(element: str, label: str, meaning: str, **options: Any) -> html.Div:
    """Return a figure for the row below the tiles; ``{element}-note`` is the id of its note."""
    return html.Div(
        [
            html.Span([label, tip(label, meaning)], className="muted"),
            html.B("–", id=element),
            html.Span(id=f"{element}-note", className="muted"),
        ],
        **options,
    )


def chart(
    element: str, title: str, meaning: str, *, wide: bool = False, tall: bool = False
) -> html.Figure:
    """Return a chart's card. The page's module draws into `element`, and CSS sets its size."""
    sizes = " wide" * wide + " tall" * tall
    return html.Figure(
        className=f"panel chart{sizes}",
        children=[
            html.Figcaption([title, tip(title, meaning), save_menu(element, title)]),
            html.Div(id=element, className="plot", role="img", **{"aria-label": title}),
        ],
    )


def save_menu(element: str, title: str, forms: tuple[str, ...] = ("png", "svg", "csv")) -> Any:
    """Return a menu by which `assets/js/exports.js` saves a chart as picture or numbers."""
    data = {"data-chart": element}
    buttons = [
        html.Button(form.upper(), type="button", **data, **{"data-save": form}) for form in forms
    ]
    label = {"aria-label": f"Save {title}", "title": "Save as a picture or as numbers"}
    return html.Details(
        [html.Summary("Save", **label), html.Div(buttons, className="save-forms")],
        className="save",
    )


def loading() -> html.P:
    """Return a placeholder for content that the page's module requests."""
    return html.P("Loading…", className="muted loading")


def panel(title: str, *children: Any, labelled: str, beside: list[Any] | None = None) -> Any:
    """Return a titled box; `beside` is on the line of the title."""
    head: Any = html.H2(title, id=labelled)
    if beside:
        head = html.Div([head, *beside], className="bar card-head")
    return html.Section(
        [head, *children],
        className="panel",
        **{"aria-labelledby": labelled},
    )


def table(element: str, columns: list[dict[str, Any]], **options: Any) -> dag.AgGrid:
    """Return a table, whose rows the page's module sets. Each row needs an `id`.

    `columns` are AG Grid's `columnDefs`, and `options` additional grid options.
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
    """Return a labelled control."""
    return html.Div([html.Label(label, htmlFor=element), control], className="field")


def option(value: str, label: str) -> html.Option:
    """Return a choice of a native select."""
    return html.Option(label, value=value)


def choices(element: str, label: str, chosen: str, values: dict[str, str]) -> html.Div:
    """Return a row of buttons, one of which is pressed. `values` maps values to labels."""
    buttons = [
        html.Button(
            words,
            type="button",
            **{"data-value": value, "aria-pressed": str(value == chosen).lower()},
        )
        for value, words in values.items()
    ]
    return html.Div(buttons, id=element, className="choices", role="group", **{"aria-label": label})


def dialog(element: str, *children: Any, confirm: html.Button) -> html.Dialog:
    """Return a native modal dialog, in which the browser keeps the focus and handles Escape."""
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
