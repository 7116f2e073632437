"""What people look for in runs of long ago, and what these runs cost.

- `filters`: which runs a list has, and in which order.
- `labels`: tags and notes of runs.
- `days`: sums over the steps of each run by day, which the worker keeps up to date.

`runs.page` lists runs by a `RunFilter`:

    runs.page(store, RunFilter(tags=("nightly",), waste=Bounds(least=0.2)), sort="-waste")
"""

from paceline_backend.store.history.filters import SORTS, FigureBounds, RunFilter, RunOrder

__all__ = ["SORTS", "FigureBounds", "RunFilter", "RunOrder"]
