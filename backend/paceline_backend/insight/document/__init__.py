"""A run's report as one HTML file, to attach to a ticket or to print.

The file needs nothing else: no script, no font, no picture of another host. `read` gathers what the
database has of a run, and `render` writes it. REST (`GET /runs/{id}/report?format=html`) and
`paceline report` use both::

    html = render(read(store, run))

`charts` draws the lines as SVG, `heatmap` the ranks' times as a PNG inside of one.
"""

from paceline_backend.insight.document.content import Content, read
from paceline_backend.insight.document.page import render

__all__ = ["Content", "read", "render"]
