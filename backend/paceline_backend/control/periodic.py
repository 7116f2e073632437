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
from paceline_backend.store import StoreError

log = logging.getLogger(__name__)


class Periodic:
    """Loop over a function until the worker ends.

    Args:
        name: name of the work in log messages.
        every_s: pause between two rounds, in seconds.
        work: one round. It returns False if it found nothing to do.
        end: called once, after the last round.
        idle_s: pause in seconds after a round that found nothing to do. None means `every_s`.
    """

    def __init__(
        self,
        name: str,
        every_s: float,
        work: Callable[[], object],
        end: Callable[[], None] | None = None,
        *,
        idle_s: float | None = None,
    ) -> None:
        self.name = name
        self._every_s = every_s
        self._work = work
        self._end = end
        self._idle_s = every_s if idle_s is None else idle_s

    def run(self, stop: threading.Event) -> None:
        """Run the first round at once and the others after a pause each, until `stop` is set."""
        outage = Outage(log, f"{self.name}: waiting", f"{self.name}: working again")
        pause_s = 0.0
        while not stop.wait(pause_s):
            pause_s = self._every_s
            try:
                if self._work() is False:
                    pause_s = self._idle_s
                outage.over()
            except (StoreError, redis.RedisError) as error:
                pause_s = max(pause_s, outage.failed(error))
            except Exception as error:
                if not outage.active:
                    log.exception("%s: a round failed", self.name)
                pause_s = max(pause_s, outage.failed(error))
        if self._end is not None:
            self._end()
