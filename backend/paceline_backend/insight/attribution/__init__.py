"""What ranks wait for: the straggler effect split into data, node, transient and input.

`Rows` holds what the ranks reported. `attribute` returns an `Attribution`: the SP of each step by
cause, and one `Worker` per rank. The API's route `/runs/{id}/attribution` calls these::

    result = attribute(Rows(step, samples, load, squares, longest, data_s, compute_s))
    print(result.shares, result.workers[0].caused)

`model` fits the expected time of each step. `split` divides the lateness among the causes. Which
cause counts, since when, and what it costs, is said by `paceline_backend.insight.verdict`.
"""

from paceline_backend.insight.attribution.attribute import CAUSES, Attribution, Worker, attribute
from paceline_backend.insight.attribution.load import read_rows
from paceline_backend.insight.attribution.model import Rows

__all__ = ["CAUSES", "Attribution", "Rows", "Worker", "attribute", "read_rows"]
