"""Synthetic ranks that read their parts of the plan and nothing else: for `scale.py`.

Each has a connection of its own to the ranks' store, and reads as `train/plan/fetcher.py` does:
waits for its part, gets it and deletes it. What is emulated: a thread stands for several ranks,
which it goes through in their order. So at most as many parts are waited for at once as there are
threads. A time is when the rank has its part, and so includes the wait for the thread.

It connects when it reads a line. One line on its standard output says that it is loaded, the next
that all are connected, and then there is one for each segment: the Unix times at which these ranks
had their parts.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from paceline.train.meeting import reach
from paceline.train.parts import get_part, part_key

_HOST = "127.0.0.1"


def _connected(port: int, ranks: Sequence[int], patience_s: float) -> list[TCPStore]:
    """A connection for each rank, one after the other."""
    stores = []
    for rank in ranks:
        store = reach(rank, _HOST, port)
        store.set_timeout(timedelta(seconds=patience_s))
        stores.append(store)
    return stores


def _read(
    stores: Sequence[TCPStore], ranks: Sequence[int], segments: int, had: SimpleQueue[Any]
) -> None:
    """Reads the parts of some ranks, segment by segment."""
    try:
        for segment in range(segments):
            times = []
            for store, rank in zip(stores, ranks, strict=True):
                get_part(store, segment, rank)
                times.append(time.time())
                store.delete_key(part_key(segment, rank))
            had.put((segment, times))
    except Exception as error:
        had.put(error)


def main() -> None:
    """Connects, then reads as many segments as it was told."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    faulthandler.dump_traceback_later(given["patience_s"], exit=True)  # whatever hangs
    ranks = range(given["first"], given["ranks"], given["processes"])
    print(json.dumps(len(ranks)), flush=True)
    sys.stdin.readline()
    stores = _connected(given["port"], ranks, given["patience_s"])
    print(json.dumps(len(stores)), flush=True)
    count, segments = min(given["threads"], len(ranks)), given["segments"]
    had: SimpleQueue[Any] = SimpleQueue()
    for k in range(count):
        parts = (stores[k::count], ranks[k::count], segments, had)
        threading.Thread(target=_read, args=parts, daemon=True).start()
    times: list[list[float]] = [[] for _ in range(segments)]
    for _ in range(count * segments):
        heard = had.get()
        if isinstance(heard, Exception):
            raise heard
        segment, of_thread = heard
        times[segment] += of_thread
        if len(times[segment]) == len(ranks):
            print(json.dumps(times[segment]), flush=True)


if __name__ == "__main__":
    main()
