"""Who is slow, and why: the straggler effect split into data, node, transient and input."""

from paceline_backend.attribution._model import Rows
from paceline_backend.attribution._verdict import CAUSES, Attribution, Worker, attribute
from paceline_backend.attribution._words import words, worker_words

__all__ = ["CAUSES", "Attribution", "Rows", "Worker", "attribute", "words", "worker_words"]
