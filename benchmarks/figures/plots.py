"""Charts of the rows as SVG, which plotly draws in a headless Chromium.

Each chart is labelled with its origin ("simulated", "measured on this machine"), and a JSON file
beside it has its provenance.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import provenance

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

WIDTH, HEIGHT = 720, 360
_DRAW = """async ([figure, width, height]) => {
    const uri = await Plotly.toImage(figure, {format: "svg", width, height});
    return decodeURIComponent(uri.slice(uri.indexOf(",") + 1));
}"""


def draw(rows: Mapping[str, Mapping[str, Any]], shows: Mapping[str, str], folder: Path) -> None:
    """Write `folder`/row.svg for each row's chart, and its provenance beside it.

    `rows` are records with a chart, and `shows` the origins of the charts, both by row.
    """
    import plotly
    from find_chromium import find_chromium
    from playwright.sync_api import sync_playwright

    library = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        tab = browser.new_page()
        tab.set_content("<html><body></body></html>")
        tab.add_script_tag(path=library)
        for row, measured in rows.items():
            figure = json.loads(_figure(measured["chart"], shows[row]).to_json())
            svg = _compact(tab.evaluate(_DRAW, [figure, WIDTH, HEIGHT]), row)
            picture = folder / f"{row}.svg"
            picture.write_text(svg + "\n")
            provenance.record(picture, shows[row], measured["made"])
        browser.close()


def _figure(chart: Mapping[str, Any], shows: str) -> Any:
    """Return the chart as plotly's figure, labelled with its origin."""
    import plotly.graph_objects as go

    figure = go.Figure()
    symbols = cycle(("diamond", "square", "triangle-up", "x"))
    for line in chart["lines"]:
        of = {"x": line["x"], "y": line["y"], "name": line["name"]}
        if line["paper"]:
            marker = {"symbol": next(symbols), "size": 8, "color": "black"}
            figure.add_scatter(**of, mode="markers", marker=marker)
        elif chart["bars"]:
            figure.add_bar(**of)
        else:
            figure.add_scatter(**of, mode="lines", line={"width": 1.5})
    figure.update_layout(
        template="simple_white",
        paper_bgcolor="white",
        margin={"l": 60, "r": 10, "t": 25, "b": 45},
        legend={"font": {"size": 9}},
        xaxis_title=chart["x"],
        yaxis_title=chart["y"],
        showlegend=True,
    )
    figure.add_annotation(
        text=shows, x=0, y=1, xref="paper", yref="paper", xanchor="left", yanchor="bottom",
        showarrow=False, font={"size": 11, "color": "#b00020"},
    )  # fmt: skip
    if chart["log_y"]:
        figure.update_yaxes(type="log")
    return figure


# Parts of plotly's SVG that draw nothing: classes, data attributes and empty groups.
_USELESS = re.compile(
    r' (?:class|data-[\w-]+|style)=""| class="[^"]*"| data-[\w-]+="[^"]*"'
    r"|(?<=[ \"])(?:opacity|fill-opacity|stroke-opacity): 1; ?|pointer-events: \w+; ?"
    r"|vector-effect: [\w-]+; ?|white-space: pre; ?"
)
_EMPTY = re.compile(r"<(?:g|path)(?: clip-path=\"[^\"]*\")?/>|<(g|defs)></\1>")
_NAMES = re.compile(r"\b(?:clip|topdefs-|defs-|legend)([0-9a-f]{6})")


def _compact(svg: str, row: str) -> str:
    """Shrink an SVG, and replace its random names so that drawing is reproducible."""
    for number, name in enumerate(dict.fromkeys(_NAMES.findall(svg))):
        svg = svg.replace(name, f"{row}-{number}")
    svg = re.sub("<[^>]*>", lambda tag: re.sub(r"(\d+\.\d{2})\d+", r"\1", tag[0]), svg)
    svg = _USELESS.sub("", svg)
    while (smaller := _EMPTY.sub("", svg)) != svg:
        svg = smaller
    return svg
