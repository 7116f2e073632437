"""The verdict over all runs: which run costs most, what waits, and who is slow on which node.

`judged` makes what is kept of a run's verdict. `overview` puts the kept verdicts of the runs that
train together, and `record` says which node held runs up on which day and what waiting cost.
`control.fleet` calls the first, `api.fleet` the others.
"""

from paceline_backend.insight.fleet.judging import judged
from paceline_backend.insight.fleet.overview import overview
from paceline_backend.insight.fleet.record import record

__all__ = ["judged", "overview", "record"]
