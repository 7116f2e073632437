"""The worker's care for the database: roll-ups and sums by day that are due, and pruning."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from itertools import chain, islice

from paceline.core.outage import Outage
from paceline_backend.store import Store, StoreError
from paceline_backend.store.history import days
from paceline_backend.store.rollups import fill
from paceline_backend.store.upkeep.prune import Keep, prune

log = logging.getLogger(__name__)

_EVERY_S = 5.0  # roll-ups
_PRUNE_EVERY_S = 60.0
_MOST_SUMMED = 50  # runs in one look
_PAUSE_S = 0.05  # between two transactions: ingest takes its turns


def run(store: Store, keep: Keep, stop: threading.Event) -> None:
    """Works until `stop` is set. Waits out a database that is away."""
    outage = Outage(log, "the database is looked after later", "the database is looked after again")
    prune_at = time.monotonic()
    run: int | None = 0
    while True:
        try:
            while time.monotonic() < prune_at and (run := fill.fill(store, run or 0)) is not None:
                if stop.wait(_PAUSE_S):
                    return
            sum_up(store, stop)
            if time.monotonic() >= prune_at:
                _prune(store, keep, stop)
                prune_at = time.monotonic() + _PRUNE_EVERY_S
            outage.over()
        except StoreError as error:
            outage.failed(error)
        if stop.wait(_EVERY_S):
            return


def _prune(store: Store, keep: Keep, stop: threading.Event) -> None:
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
