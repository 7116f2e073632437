"""Flood protection of the bus: disables users that flood it, and records that in their runs."""

from __future__ import annotations

import logging

from paceline_backend.server.floods import Bounds, Flood, Guard, user_of
from paceline_backend.store import Store, StoreError, runs

log = logging.getLogger(__name__)


def look(store: Store, guard: Guard) -> None:
    """Check the streams of all runs and nodes once."""
    for flood in guard.look_at_all():
        if flood.news:
            _tell(store, flood, guard.bounds)
    for user in guard.switch_on():
        log.info("%s may write to the bus again", user)


def _tell(store: Store, flood: Flood, bounds: Bounds) -> None:
    words = (
        f"{flood.entries:,} entries ({flood.bytes:,} bytes) were waiting on the bus; the limits "
        f"are {bounds.entries:,} entries and {bounds.bytes:,} bytes"
    )
    if flood.dropped:
        words += f"; {flood.dropped:,} of them were dropped"
    if flood.off:
        words += f"; their sender is blocked for {bounds.off_s:g} s"
    log.warning("%s floods the bus: %s", user_of(flood.stream), words)
    if flood.run is None:
        return
    try:
        with store.write() as connection:
            runs.tell(connection, flood.run, f"its telemetry flooded the bus: {words}")
    except StoreError as error:
        log.warning("run %s: the flood could not be recorded: %s", flood.run, error)
