"""Signal that something happens on this control plane, so that an idle worker hardly needs the CPU.

Most rounds of the worker's `Periodic`s find nothing to do while no run is active and no client
changes anything. `IdleMonitor` calls that *quiet*: the last entry on `CHANGES` is older than
`QUIET_AFTER_S`, and no run is active. The web process adds an entry after each request that may
have changed something, and ingest adds one for each change that open pages show. While it is quiet,
each `Periodic` pauses for `QUIET_S` between its rounds, and the first change ends these pauses.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing
from typing import Any

import redis

from paceline.core.outage import Outage
from paceline.wire import CHANGES
from paceline.wire.bus import connect
from paceline_backend.store import Store, StoreError, runs

log = logging.getLogger(__name__)

QUIET_AFTER_S = 30.0
QUIET_S = 10.0
# Maximum delay after which `IdleMonitor.run` notices that it should stop.
_BLOCK_S = 1.0


class IdleMonitor:
    """Monitor that finds out when nothing happens on this control plane. It is thread-safe.

    Args:
        store: holds the runs.
        bus_url: the bus whose changes are followed.
    """

    def __init__(self, store: Store, bus_url: str) -> None:
        self._store = store
        self._bus_url = bus_url
        # Nothing has happened for `QUIET_AFTER_S`, and no run is active.
        self.quiet = False
        self._changed = threading.Condition()

    def run(self, stop: threading.Event) -> None:
        """Follow the changes until `stop` is set. Call this in a thread of its own."""
        outage = Outage(log, "following changes: waiting", "following changes: working again")
        position, quiet_at = "$", time.monotonic() + QUIET_AFTER_S
        try:
            with closing(connect(self._bus_url, keep=True)) as client:
                while not stop.is_set():
                    try:
                        newest = _newest(client, position)
                        outage.over()
                    except redis.RedisError as error:
                        # A bus that restarts loses users, and changes may have been missed.
                        newest = "$"
                        stop.wait(outage.failed(error))
                    if newest is not None:
                        position = newest
                        quiet_at = time.monotonic() + QUIET_AFTER_S
                        self._set(quiet=False)
                    elif time.monotonic() >= quiet_at:
                        quiet_at = time.monotonic() + QUIET_AFTER_S
                        self._set(quiet=not self.is_any_active())
        except Exception:
            # Without this thread, the worker works as if something happened all the time.
            log.exception("following changes failed: no pause is longer than usual from now on")
        finally:
            self.end()

    def end(self) -> None:
        """End all pauses, because the worker stops."""
        self._set(quiet=False)

    def pause(self, seconds: float, quiet_s: float, stop: threading.Event) -> bool:
        """Wait for `seconds`, or up to `quiet_s` while it is quiet. Return whether to stop."""
        if stop.wait(seconds):
            return True
        with self._changed:
            self._changed.wait_for(lambda: not self.quiet, max(0.0, quiet_s - seconds))
        return stop.is_set()

    def _set(self, *, quiet: bool) -> None:
        with self._changed:
            self.quiet = quiet
            self._changed.notify_all()

    def is_any_active(self) -> bool:
        """Return whether any run has not ended; True if the database does not answer."""
        try:
            with self._store.read() as connection:
                return bool(runs.unfinished(connection))
        except StoreError:
            return True


def _newest(client: redis.Redis, position: str) -> str | None:
    """Return the ID of the newest change after `position`; None: there is none within `_BLOCK_S`.

    The first call, at `$`, returns the newest change that there is.
    """
    if position == "$":
        entries: Any = client.xrevrange(CHANGES, count=1)
        return entries[0][0].decode() if entries else "0-0"
    answer: Any = client.xread({CHANGES: position}, block=int(_BLOCK_S * 1e3))
    return answer[0][1][-1][0].decode() if answer else None
