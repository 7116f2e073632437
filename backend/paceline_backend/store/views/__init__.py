"""Views: what a page draws of a range of steps, small for a run of any length and any world.

A view has at most 512 columns of steps and at most 256 rows of ranks. Every column keeps the
greatest value of its steps and ranks, so no spike is lost. `reading` asks the database, from
roll-ups where they exist; `heat` makes the heat map, which travels as one byte for each cell.

    view = views.view(connection, key, world=1024, span=(None, None))
"""

from paceline_backend.store.views.reading import COLUMNS, LINES, POINTS, newest, view

__all__ = ["COLUMNS", "LINES", "POINTS", "newest", "view"]
