"""Answers that take long to find, given again to those who ask soon after."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

_MOST = 256  # answers that are kept
_LEAST_S = 0.1  # of a processor's time: answers that take less are found anew
_TIMES = 5.0  # an answer is given again for so many times as long as finding it took

Answer = TypeVar("Answer")


@dataclass
class _Kept:
    """One answer.

    Args:
        lock: held while it is looked for.
        until: when it becomes too old, by `time.monotonic`.
        answer: the answer itself.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    until: float = 0.0
    answer: Any = None


class Reused:
    """Answers by what was asked. Who asks what is being looked for waits, and looks not again.

    So all browsers that follow a run together take at most a sixth of a core for each answer. One
    that takes a second of a processor's time is never older than 6 s of that processor. Those of
    small runs take milliseconds, and are always new.

    Args:
        most: answers that are kept; the ones not asked for longest go.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    def get(self, asked: Hashable, find: Callable[[], Answer]) -> Answer:
        """An answer that another request found lately, or what `find` gives.

        Args:
            asked: names the answer: the same for all who would find the same.
            find: looks for it; what it raises is raised, and not kept. What it gives is shared, so
                nobody may change it.
        """
        with self._lock:
            kept = self._kept.setdefault(asked, _Kept())
            self._kept.move_to_end(asked)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        with kept.lock:
            if time.monotonic() >= kept.until:
                began_s = time.thread_time()
                kept.answer = find()
                took_s = time.thread_time() - began_s
                kept.until = time.monotonic() + (_TIMES * took_s if took_s >= _LEAST_S else 0.0)
            answer: Answer = kept.answer
            return answer
