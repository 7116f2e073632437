"""Views: the data that a page draws for a range of steps, small for any length and any world size.

A view has at most 512 columns of steps and at most 256 rows of ranks. Every column keeps the
greatest value of its steps and ranks, so no spike is lost. `reading` queries the database, using
roll-ups where they exist; `heat` encodes the heat map as one byte per cell.

    view = views.view(connection, key, world=1024, span=(None, None))
"""

from paceline_backend.store.views.reading import COLUMNS, LINES, POINTS, newest, view

__all__ = ["COLUMNS", "LINES", "POINTS", "newest", "view"]
