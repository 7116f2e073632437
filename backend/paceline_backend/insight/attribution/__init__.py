"""Attribution of waiting time: the SP of each step, split into data, node, transient and input.

The SP of a step is the time from the moment at which its first rank is ready for the reduction to
the moment at which its last rank is. `Rows` holds the reports of the ranks. `attribute` returns an
`Attribution` with the SP of each step by cause and one `Worker` per rank. The API's route
`/runs/{id}/attribution` calls these functions::

    result = attribute(Rows(step, samples, load, squares, longest, data_s, compute_s))
    print(result.shares, result.workers[0].caused)

`model` fits the expected time of each step. `attribute` divides each rank's lateness among causes.
`thresholds` defines the numbers on which both modules depend. `paceline_backend.insight.verdict`
decides which causes matter, since when, and how much time they cost.
"""

from paceline_backend.insight.attribution.attribute import (
    CAUSES,
    Attribution,
    Worker,
    attribute,
    read_rows,
)
from paceline_backend.insight.attribution.model import Rows

__all__ = ["CAUSES", "Attribution", "Rows", "Worker", "attribute", "read_rows"]
