"""Search past runs and their cost.

- `filters`: filter and order of lists of runs.
- `labels`: tags and notes of runs.
- `days`: sums over the steps of each run by day, which the worker process keeps up to date.

`runs.page` lists runs by a `RunFilter`:

    runs.page(store, RunFilter(tags=("nightly",), waste=FigureBounds(least=0.2)), sort="-waste")
"""

from paceline_backend.store.history.filters import SORTS, FigureBounds, RunFilter, RunOrder

__all__ = ["SORTS", "FigureBounds", "RunFilter", "RunOrder"]
