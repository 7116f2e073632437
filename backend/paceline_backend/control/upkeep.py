"""Maintenance of the database by the worker: roll-ups, sums by day, and pruning."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from itertools import chain, islice

from paceline_backend.store import Store
from paceline_backend.store.history import days
from paceline_backend.store.rollups.writing import fill
from paceline_backend.store.upkeep.prune import Keep, prune

log = logging.getLogger(__name__)

_MOST_SUMMED = 50
# Pause between two transactions, so that ingest can write meanwhile.
_WRITE_PAUSE_S = 0.05


def fill_rollups(store: Store, stop: threading.Event) -> None:
    """Create the roll-ups that are due. Setting `stop` ends the work early."""
    run = fill(store, 0)
    while run is not None and not stop.wait(_WRITE_PAUSE_S):
        run = fill(store, run)


def prune_runs(store: Store, keep: Keep, stop: threading.Event) -> None:
    """Delete the runs that exceed the limits of `keep`."""
    # For the limit in bytes, delete one run per round: the freed size may be known only later.
    by_bytes = islice(prune(store, keep, stop.wait), 1)
    for gone in chain(prune(store, replace(keep, bytes=None), stop.wait), by_bytes):
        log.warning("run %s has ended and was deleted: it exceeds the retention limits", gone)


def sum_up(store: Store, stop: threading.Event) -> None:
    """Update the daily totals of runs that have new steps. Setting `stop` ends the work early."""
    with store.read() as connection:
        due = days.due(connection, _MOST_SUMMED)
    for run in due:
        days.sum_up(store, run)
        if stop.wait(_WRITE_PAUSE_S):
            return
