"""Keeps live streams as long as who reads them may lag behind, and no longer.

`LIVE_LENGTH` bounds each: a second of a large run that is fast, half an hour of a small one that is
slow. Hundreds of small runs would fill the bus with what nobody asks for any more.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import redis

from paceline.wire import live
from paceline_backend.store import Store, runs

log = logging.getLogger(__name__)

KEPT_S = 60.0  # what came in so long stays,
LEAST = 500  # and so many entries of a run that says little


class Trimmer:
    """Trims the live streams of runs that have not ended. For one thread.

    Args:
        store: knows the runs.
        clock: monotonic time in seconds.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        # By run, of the last minute and a little more: when, and entries ever added by then.
        self._added: dict[str, deque[tuple[float, int]]] = {}

    def look(self, client: redis.Redis) -> None:
        """Trims what came more than `KEPT_S` ago, as far as earlier looks tell.

        Raises:
            redis.RedisError: the bus is away.
            StoreError: or one of its kinds.
        """
        with self._store.read() as connection:
            names = [run.id for run in runs.unfinished(connection)]
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.xinfo_stream(live(name))
        now, before = self._clock(), self._added
        self._added = {}
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        for name, about in zip(names, answers, strict=True):
            # A run that has said nothing has no stream. Redis before 7 does not count.
            if isinstance(about, Exception) or "entries-added" not in about:
                continue
            looks = self._added[name] = before.get(name, deque())
            looks.append((now, int(about["entries-added"])))
            while len(looks) > 1 and looks[1][0] <= now - KEPT_S:
                looks.popleft()
            since, added = looks[0]
            if since <= now - KEPT_S:
                kept = max(LEAST, looks[-1][1] - added)
                pipeline.xtrim(live(name), maxlen=kept, approximate=True)
        pipeline.execute()
