"""Looks after the bus: who floods it is switched off, and it is told."""

from __future__ import annotations

import logging
import threading

import redis

from paceline.core.outage import Outage
from paceline.wire.bus import connect
from paceline_backend.server.floods import Bounds, Flood, Guard, user_of
from paceline_backend.store import Store, StoreError, runs

LOOK_S = 0.25  # a thief writes some 300 MB a second

log = logging.getLogger(__name__)


def watch(store: Store, bus_url: str, stop: threading.Event, bounds: Bounds | None = None) -> None:
    """Guards the streams of all runs and nodes until `stop` is set."""
    outage = Outage(log, "nobody looks for floods on the bus", "floods are looked for again")
    bounds = bounds or Bounds()
    with connect(bus_url, keep=True) as client:
        guard = Guard(client, bounds)
        while not stop.wait(LOOK_S):
            try:
                for flood in guard.look_at_all():
                    if flood.news:
                        _tell(store, flood, bounds)
                for user in guard.switch_on():
                    log.info("%s may write to the bus again", user)
                outage.over()
            except redis.RedisError as error:
                outage.failed(error)


def _tell(store: Store, flood: Flood, bounds: Bounds) -> None:
    words = (
        f"{flood.entries:,} entries of {flood.bytes:,} bytes waited on the bus, more than "
        f"{bounds.entries:,} of {bounds.bytes:,} bytes"
    )
    if flood.dropped:
        words += f"; {flood.dropped:,} of them were dropped"
    if flood.off:
        words += f"; who writes them is off for {bounds.off_s:g} s"
    log.warning("%s floods the bus: %s", user_of(flood.stream), words)
    if flood.run is None:
        return
    try:
        with store.write() as connection:
            runs.tell(connection, flood.run, f"its telemetry flooded the bus: {words}")
    except StoreError as error:
        log.warning("run %s: the flood is not noted: %s", flood.run, error)
