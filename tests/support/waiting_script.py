"""A rank whose processes wait for a piece that never comes; it prints its number of children.

With the argument "late", the second of them begins when the rank is dead.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import psutil

from paceline.core.streaming.reading import Claim
from paceline.data import Stream
from paceline.train.streams.processes import in_processes
from support.streams import shard, size_of

RANK = os.getpid()  # also in its processes, which are forked


def begin(process: int) -> None:
    while process == 1 and sys.argv[1:] == ["late"] and os.getppid() == RANK:
        time.sleep(0.01)


def main() -> None:
    first = [Claim(0, 0, 8)]

    def claim(shards: int) -> Claim | None:
        if not first:
            threading.Event().wait()
        return first.pop()

    reading = Stream.shards([0, 1], shard, size=size_of).reading
    samples = in_processes(reading, 0, claim, {"num_workers": 2, "worker_init_fn": begin})
    next(samples)
    print(len(psutil.Process().children()), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
