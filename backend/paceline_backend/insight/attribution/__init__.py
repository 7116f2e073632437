"""Who is slow, and why: the straggler effect split into data, node, transient and input."""

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
