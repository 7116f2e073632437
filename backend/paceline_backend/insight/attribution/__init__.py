"""Attribution of waiting time: the SP of each step, split into data, node, transient and input.

The straggler problem (SP) of a step is the time between the first and the last rank to be ready for
the reduction of the gradients. `attribute` returns an `Attribution` with the SP of each step by
cause and one `Worker` per rank::

    result = attribute(Rows(step, samples, load, squares, longest, data_s, compute_s))
    print(result.shares, result.workers[0].caused)

The module `model` fits the expected time of each step, and the module `attribute` divides each
rank's lateness among causes. `paceline_backend.insight.verdict` decides which causes matter, when
they started, and how much time they cost.
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
