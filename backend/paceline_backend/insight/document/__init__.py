"""A run's report as one HTML file, to attach to a ticket or to print.

The file is self-contained: it loads no script, font or picture from another host. `read` collects
the data of a run from the database, and `render` returns the HTML::

    html = render(read(store, run))
"""

from paceline_backend.insight.document.content import Content, read
from paceline_backend.insight.document.page import render

__all__ = ["Content", "read", "render"]
