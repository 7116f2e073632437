"""Work that the worker repeats until it ends: one `Periodic` for each task except ingest.

A round is one call of the task's function. A failed round is logged and repeated after a pause, so
that it cannot end the worker, which plans runs. An outage of the database or the bus is logged once
at its start and once at its end. A series of other errors is logged likewise, the first error with
its traceback. The state that a round keeps in memory must therefore be valid after a round that
failed halfway.

Most rounds find nothing to do while no run is active and no client changes anything. `IdleMonitor`
calls that *quiet*: the last entry on `CHANGES` is older than `QUIET_AFTER_S`, and no run is active.
The web process adds an entry after each request that may have changed something, and ingest adds
one for each change that open pages show. In quiet times, each `Periodic` pauses for its `quiet_s`
between rounds, so that an idle worker hardly needs the CPU. Work for runs that have processes also
pauses while runs only wait for an engine or for nodes. The first change ends these pauses.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from enum import IntEnum
from typing import Any

import redis

from paceline.core.outage import Outage
from paceline.wire import CHANGES
from paceline.wire.bus import connect
from paceline.wire.states import UNDER_WAY
from paceline_backend.store import Store, StoreError, runs

log = logging.getLogger(__name__)

QUIET_AFTER_S = 30.0
QUIET_S = 10.0
# Maximum delay after which `IdleMonitor.run` notices that it should stop.
_CHANGES_BLOCK_S = 1.0


class Workload(IntEnum):
    """Amount of work on the control plane in the last `QUIET_AFTER_S` seconds."""

    # Nothing has changed, and no run is active.
    QUIET = 0
    # Nothing has changed, and the active runs have no processes yet.
    WAITING = 1
    # Something has changed, or a run has processes.
    BUSY = 2


class Periodic:
    """Loop that calls a function until the worker ends.

    Args:
        name: name of the work in log messages.
        every_s: pause between two rounds, in seconds.
        end: function that is called once, after the last round.
        quiet_s: pause in seconds while there is nothing to do.
        needless: the highest `Workload` at which this task has nothing to do.
    """

    def __init__(
        self,
        name: str,
        every_s: float,
        work: Callable[[], object],
        end: Callable[[], None] | None = None,
        *,
        quiet_s: float = QUIET_S,
        needless: Workload = Workload.QUIET,
    ) -> None:
        self.name = name
        self._every_s = every_s
        self._work = work
        self._end = end
        self._quiet_s = quiet_s
        self._needless = needless

    def run(self, stop: threading.Event, idle: IdleMonitor | None = None) -> None:
        """Run one round after the other, with a pause between two rounds, until `stop` is set.

        Without `idle`, all pauses have their usual length.
        """
        outage = Outage(log, f"{self.name}: waiting", f"{self.name}: working again")
        pause_s = 0.0
        while not self._pause(pause_s, stop, idle):
            pause_s = self._every_s
            try:
                self._work()
                outage.succeeded()
            except (StoreError, redis.RedisError) as error:
                pause_s = max(pause_s, outage.failed(error))
            except Exception as error:
                if not outage.active:
                    log.exception("%s failed, and will be repeated", self.name)
                pause_s = max(pause_s, outage.failed(error))
        if self._end is not None:
            self._end()

    def _pause(self, seconds: float, stop: threading.Event, idle: IdleMonitor | None) -> bool:
        if idle is None or seconds == 0:
            return stop.wait(seconds)
        return idle.pause(seconds, self._quiet_s, stop, self._needless)


class IdleMonitor:
    """Monitor of the `Workload` of this control plane. Thread-safe."""

    def __init__(self, store: Store, bus_url: str) -> None:
        self._store = store
        self._bus_url = bus_url
        self.activity = Workload.BUSY
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
                        outage.succeeded()
                    except redis.RedisError as error:
                        # A bus that restarts loses users, and changes may have been missed, so an
                        # outage counts as a change.
                        newest = "$"
                        stop.wait(outage.failed(error))
                    if newest is not None:
                        position = newest
                        quiet_at = time.monotonic() + QUIET_AFTER_S
                        self._set(Workload.BUSY)
                    elif time.monotonic() >= quiet_at:
                        quiet_at = time.monotonic() + QUIET_AFTER_S
                        self._set(self.activity_of_runs())
        except Exception:
            # If this thread fails, the workload stays BUSY, so that no pause of the worker is too
            # long.
            log.exception(
                "the idle monitor failed: from now on, the worker checks for work as often as when "
                "it is busy"
            )
        finally:
            self.end()

    def end(self) -> None:
        """End all pauses, because the worker stops."""
        self._set(Workload.BUSY)

    def pause(
        self, seconds: float, quiet_s: float, stop: threading.Event, needless: Workload
    ) -> bool:
        """Wait for `seconds`, or for up to `quiet_s` as long as the workload is at most `needless`.

        Return True if `stop` is set.
        """
        if stop.wait(seconds):
            return True
        with self._changed:
            self._changed.wait_for(lambda: self.activity > needless, max(0.0, quiet_s - seconds))
        return stop.is_set()

    def _set(self, activity: Workload) -> None:
        with self._changed:
            self.activity = activity
            self._changed.notify_all()

    def activity_of_runs(self) -> Workload:
        """Return the workload that follows from the runs' states alone.

        Return BUSY if the database does not answer.
        """
        try:
            with self._store.read() as connection:
                states = {run.state for run in runs.unfinished(connection)}
        except StoreError:
            return Workload.BUSY
        if not states:
            return Workload.QUIET
        return Workload.WAITING if states.isdisjoint(UNDER_WAY) else Workload.BUSY


def _newest(client: redis.Redis, position: str) -> str | None:
    """Return the ID of the newest change after `position`.

    Return None if no change arrives within `_CHANGES_BLOCK_S`. If `position` is `$`, return the ID
    of the newest change on the stream at once, or 0-0 if the stream has no change.
    """
    if position == "$":
        entries: Any = client.xrevrange(CHANGES, count=1)
        return entries[0][0].decode() if entries else "0-0"
    answer: Any = client.xread({CHANGES: position}, block=int(_CHANGES_BLOCK_S * 1e3))
    return answer[0][1][-1][0].decode() if answer else None
