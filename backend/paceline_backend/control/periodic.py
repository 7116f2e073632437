"""Work that the worker repeats until it ends: apart from ingest, it is a list of `Periodic`.

A failed round is logged and repeated after a pause, so that it cannot end the worker, which plans
runs. An outage of the database or the bus is logged once at its start and once at its end. A series
of other errors is logged likewise, the first error with its traceback. The state that a round keeps
in memory must therefore be valid after a round that failed halfway.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import redis

from paceline.core.outage import Outage
from paceline_backend.control.idle import QUIET_S, IdleMonitor
from paceline_backend.store import StoreError

log = logging.getLogger(__name__)


class Periodic:
    """Loop over a function until the worker ends.

    Args:
        name: name of the work in log messages.
        every_s: pause between two rounds, in seconds.
        work: one round.
        end: called once, after the last round.
        quiet_s: pause in seconds while nothing happens on the control plane.
    """

    def __init__(
        self,
        name: str,
        every_s: float,
        work: Callable[[], object],
        end: Callable[[], None] | None = None,
        *,
        quiet_s: float = QUIET_S,
    ) -> None:
        self.name = name
        self._every_s = every_s
        self._work = work
        self._end = end
        self._quiet_s = quiet_s

    def run(self, stop: threading.Event, idle: IdleMonitor | None = None) -> None:
        """Run the first round at once and the others after a pause each, until `stop` is set.

        Without `idle`, all pauses have their usual length.
        """
        outage = Outage(log, f"{self.name}: waiting", f"{self.name}: working again")
        pause_s = 0.0
        while not self._pause(pause_s, stop, idle):
            pause_s = self._every_s
            try:
                self._work()
                outage.over()
            except (StoreError, redis.RedisError) as error:
                pause_s = max(pause_s, outage.failed(error))
            except Exception as error:
                if not outage.active:
                    log.exception("%s: a round failed", self.name)
                pause_s = max(pause_s, outage.failed(error))
        if self._end is not None:
            self._end()

    def _pause(self, seconds: float, stop: threading.Event, idle: IdleMonitor | None) -> bool:
        if idle is None or seconds == 0:
            return stop.wait(seconds)
        return idle.pause(seconds, self._quiet_s, stop)
