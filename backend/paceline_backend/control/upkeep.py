"""The worker's care for the database: roll-ups and sums by day that are due, and pruning."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from itertools import chain, islice

from paceline_backend.store import Store
from paceline_backend.store.history import days
from paceline_backend.store.rollups import fill
from paceline_backend.store.upkeep.prune import Keep, prune

log = logging.getLogger(__name__)

_MOST_SUMMED = 50  # runs in one look
_PAUSE_S = 0.05  # between two transactions: ingest takes its turns


def fill_rollups(store: Store, stop: threading.Event) -> None:
    """Make the roll-ups that are due; `stop` ends it early.

    Raises:
        StoreError: the database did not answer.
    """
    run = fill.fill(store, 0)
    while run is not None and not stop.wait(_PAUSE_S):
        run = fill.fill(store, run)


def prune_runs(store: Store, keep: Keep, stop: threading.Event) -> None:
    """Delete the runs that are beyond what is kept.

    Raises:
        StoreError: the database did not answer.
    """
    # For bytes, one run a look: how many there are may be known only later.
    by_bytes = islice(prune(store, keep, stop.wait), 1)
    for gone in chain(prune(store, replace(keep, bytes=None), stop.wait), by_bytes):
        log.warning("run %s is over and was deleted: it is beyond what is kept", gone)


def sum_up(store: Store, stop: threading.Event) -> None:
    """Sums up the steps of runs that have new ones, by day; `stop` ends it early.

    Raises:
        StoreError: the database did not answer.
    """
    with store.read() as connection:
        due = days.due(connection, _MOST_SUMMED)
    for run in due:
        days.sum_up(store, run)
        if stop.wait(_PAUSE_S):
            return
