"""Answers that take long to find, given again to those who ask soon after."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

_MOST = 32  # answers that are kept: each may hold some megabytes
_LEAST_S = 0.1  # of a processor's time: answers that take less are not kept
_TIMES = 5.0  # an answer is kept for so many times as long as finding it took

Answer = TypeVar("Answer")


class Reused:
    """Answers by what was asked. Who asks what is being looked for gets what that search finds.

    So all browsers that follow a run together take at most a sixth of a core for each answer. One
    that takes a second of a processor's time is given again for 5 s. Those of small runs take
    milliseconds, and are found anew.

    Args:
        most: answers that are kept; the ones not asked for longest go.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._sought: dict[Hashable, Future[Any]] = {}
        self._kept: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()  # until when, and it

    def get(self, asked: Hashable, find: Callable[[], Answer]) -> Answer:
        """An answer that another request found lately, or what `find` gives.

        Args:
            asked: names the answer: the same for all who would find the same.
            find: looks for it; what it raises is raised, and not kept. What it gives is shared, so
                nobody may change it.
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
        began_s = time.thread_time()  # not by the clock: a busy machine makes no answer costly
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
            if took_s >= _LEAST_S:
                self._kept[asked] = (time.monotonic() + _TIMES * took_s, answer)
                if len(self._kept) > self._most:
                    self._kept.popitem(last=False)
        mine.set_result(answer)
        return answer

    def _drop(self, now: float) -> None:
        """Forgets what is too old."""
        for asked in [asked for asked, (until, _) in self._kept.items() if until <= now]:
            del self._kept[asked]
