"""Who is slow, and why: the straggler effect split into data, node, transient and input.

`Rows` holds what the ranks reported. `attribute` returns an `Attribution`: the cause that matters
most, the ranks behind it, and one `Worker` per rank. `words` and `worker_words` put both into
sentences. The API's route `/runs/{id}/attribution` and the benchmark call these::

    result = attribute(Rows(step, samples, load, squares, longest, data_s, compute_s))
    print(result.cause, result.ranks, words(result))

`slow_node` names the node on which all slow ranks sit, if there is one, and `throttled` says which
of its GPUs run at a lower clock, and why.

`model` fits the expected time of each step. `split` divides the lateness among the causes.
`verdict` names the cause.
"""

from paceline_backend.insight.attribution.load import read_rows
from paceline_backend.insight.attribution.model import Rows
from paceline_backend.insight.attribution.nodes import (
    FEWEST_STEPS,
    SlowNode,
    slow_node,
    throttled,
)
from paceline_backend.insight.attribution.verdict import CAUSES, Attribution, Worker, attribute
from paceline_backend.insight.attribution.words import words, worker_words

__all__ = [
    "CAUSES",
    "FEWEST_STEPS",
    "Attribution",
    "Rows",
    "SlowNode",
    "Worker",
    "attribute",
    "read_rows",
    "slow_node",
    "throttled",
    "words",
    "worker_words",
]
