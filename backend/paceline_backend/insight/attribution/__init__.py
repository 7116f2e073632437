"""Who is slow, and why: the straggler effect split into data, node, transient and input.

`Rows` holds what the ranks reported. `attribute` returns an `Attribution`: the cause that matters
most, the ranks behind it, and one `Worker` per rank. `words` and `worker_words` put both into
sentences. The API's route `/runs/{id}/attribution` and the benchmark call these::

    result = attribute(Rows(step, samples, load, squares, longest, data_s, compute_s))
    print(result.cause, result.ranks, words(result))

`model` fits the expected time of each step. `split` divides the lateness among the causes.
`verdict` names the cause.
"""

from paceline_backend.insight.attribution.load import read_rows
from paceline_backend.insight.attribution.model import Rows
from paceline_backend.insight.attribution.verdict import CAUSES, Attribution, Worker, attribute
from paceline_backend.insight.attribution.words import words, worker_words

__all__ = [
    "CAUSES",
    "Attribution",
    "Rows",
    "Worker",
    "attribute",
    "read_rows",
    "words",
    "worker_words",
]
