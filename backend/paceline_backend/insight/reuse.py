"""Cache of expensive answers to requests, which are reused for identical requests shortly after."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

# Maximum number of answers in the cache, because each may take some megabytes.
_MOST_ANSWERS = 32
# Minimum CPU time of an answer that is cached.
_LEAST_CPU_S = 0.1  # seconds of CPU time
# An answer is cached for this multiple of the CPU time that its computation took.
_CACHED_TIMES = 5.0

Answer = TypeVar("Answer")


class Reused:
    """Cache that also shares a computation in progress among concurrent requests.

    An answer that takes one second of CPU time is reused for 5 s. So the same request costs at most
    a sixth of a core, regardless of the number of browsers that repeat it.

    If there are more than `most` answers, the least recently used answer is dropped.
    """

    def __init__(self, most: int = _MOST_ANSWERS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._sought: dict[Hashable, Future[Any]] = {}
        # Expiry time (monotonic clock) and answer, by the key of the request.
        self._kept: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()

    def get(self, asked: Hashable, find: Callable[[], Answer]) -> Answer:
        """Return the cached answer to the request with the key `asked`, or compute it with `find`.

        Exceptions of `find` are raised and not cached. Other callers may get the same answer
        object, so a caller must not change it.
        """
        with self._lock:
            self._drop(time.monotonic())
            if asked in self._kept:
                self._kept.move_to_end(asked)
                kept: Answer = self._kept[asked][1]
                return kept
            sought = self._sought.get(asked)
            if sought is None:
                mine: Future[Answer] = Future()
                self._sought[asked] = mine
        if sought is not None:
            shared: Answer = sought.result()
            return shared
        # Measure CPU time, because on a busy machine, wall time would make all answers look
        # expensive.
        began_s = time.thread_time()
        try:
            answer = find()
        except BaseException as error:
            with self._lock:
                del self._sought[asked]
            mine.set_exception(error)
            raise
        took_s = time.thread_time() - began_s
        with self._lock:
            del self._sought[asked]
            if took_s >= _LEAST_CPU_S:
                self._kept[asked] = (time.monotonic() + _CACHED_TIMES * took_s, answer)
                if len(self._kept) > self._most:
                    self._kept.popitem(last=False)
        mine.set_result(answer)
        return answer

    def _drop(self, now: float) -> None:
        for asked in [asked for asked, (until, _) in self._kept.items() if until <= now]:
            del self._kept[asked]
