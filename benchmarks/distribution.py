"""How long a segment takes from the leader to thousands of ranks: for `scale.py`.

The leader and its store are those of a run; the ranks are `readers.py`, in a few processes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from paceline.core.terms import Terms
from paceline.node.processes import die_with_parent
from paceline.train.parts import put_part
from paceline.train.plan.leader import Leader

PROCESSES = 4
THREADS = 64  # of each process
PER_RANK = 4  # samples of a rank in a step
STEPS = 4  # of a segment
SPARE_FILES = 200  # that a process opens besides its connections
# Torch's store asks the name server for the name of whoever connects, and answers nobody meanwhile;
# so does whoever connects. A name server that drops questions makes all wait for five seconds at a
# time. That is not what is measured here: glibc's resolver asks nobody.
_NO_NAMES = {"RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class _Timed:
    """The ranks' store, which notes when the leader began and ended to put a segment's parts."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self.began = self.ended = 0.0

    def set(self, key: str, value: bytes) -> None:
        """See `Store.set`."""
        self.began = self.began or time.time()
        self._store.set(key, value)  # type: ignore[arg-type]
        self.ended = time.time()


class Readers:
    """The processes of `readers.py`; a context manager, which ends them.

    Args:
        port: of the ranks' store.
        ranks: how many there are.
        segments: that they read.
        patience_s: for everything.
    """

    def __init__(self, port: int, ranks: int, segments: int, patience_s: float) -> None:
        self._deadline = time.monotonic() + patience_s
        given = {"port": port, "ranks": ranks, "segments": segments, "patience_s": patience_s}
        given |= {"processes": PROCESSES, "threads": THREADS}
        program = [sys.executable, str(Path(__file__).with_name("readers.py"))]
        self._lines: list[SimpleQueue[str]] = []
        self._processes = []
        for first in range(PROCESSES):
            process = subprocess.Popen(
                [*program, json.dumps({**given, "first": first})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=die_with_parent,
            )
            lines: SimpleQueue[str] = SimpleQueue()
            self._processes.append(process)
            self._lines.append(lines)
            threading.Thread(target=_listen, args=[process, lines], daemon=True).start()

    def connect(self) -> float:
        """Lets all connect, the processes side by side; how long that took.

        Raises:
            RuntimeError: as `hear`.
        """
        self.hear("loading")
        began = time.monotonic()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        self.hear("connecting")
        return time.monotonic() - began

    def hear(self, what: str) -> list[Any]:
        """The next line of each process.

        Raises:
            RuntimeError: a process ended, or said nothing in time.
        """
        heard = []
        for process, lines in zip(self._processes, self._lines, strict=True):
            try:
                line = lines.get(timeout=max(0.0, self._deadline - time.monotonic()))
            except Empty:
                raise RuntimeError(f"process {process.pid}: {what} took too long") from None
            if not line:
                raise RuntimeError(f"process {process.pid} ended instead of {what}")
            heard.append(json.loads(line))
        return heard

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _listen(process: subprocess.Popen[str], lines: SimpleQueue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def open_files(most: int) -> None:
    """Lets this process open so many files.

    Raises:
        RuntimeError: the system does not allow it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < most:
        raise RuntimeError(f"{most:,} open files are needed, but the hard limit is {hard:,}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def measure(ranks: int, segments: int, patience_s: float) -> dict[str, Any]:
    """Seconds of each segment until it is planned, put and read by all, and of connecting.

    Args:
        ranks: that read.
        segments: that count; there is one before them.
        patience_s: after which it fails, with a traceback of what hangs.
    """
    os.environ.update(_NO_NAMES)
    open_files(ranks + SPARE_FILES)
    faulthandler.dump_traceback_later(patience_s + 10.0, exit=True)
    listening = socket.create_server(("127.0.0.1", 0), backlog=ranks)
    port = listening.getsockname()[1]
    server = TCPStore(
        "127.0.0.1",
        port,
        None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    store = _Timed(server)
    batch = PER_RANK * ranks
    samples = batch * STEPS * (segments + 1)
    terms = Terms(samples, batch, 0, False, "samples", coast_steps=STEPS)
    sizes = np.round(np.random.default_rng(0).gamma(4.0, 100.0, samples) + 1)
    leader = Leader(terms, ranks, sizes, store)  # type: ignore[arg-type]
    rows = []
    with Readers(port, ranks, segments + 1, patience_s) as readers:
        connected_s = readers.connect()
        for _ in range(segments + 1):
            store.began, began_at = 0.0, time.time()
            own = leader.advance(0)
            put_part(store, own.segment, 0, own)  # type: ignore[arg-type]
            read_at = np.concatenate(readers.hear("reading a segment"))
            rows.append(
                {
                    "plan": store.began - began_at,
                    "put": store.ended - store.began,
                    "read": float(read_at.max()) - began_at,
                    "median rank": float(np.median(read_at)) - began_at,
                }
            )
    faulthandler.cancel_dump_traceback_later()
    return {
        "ranks": ranks,
        "connected_s": connected_s,
        **{f"{name}_s": _of([row[name] for row in rows[1:]]) for name in rows[0]},
    }


def _of(values: list[float]) -> dict[str, float]:
    median, p95 = np.percentile(values, [50, 95]).tolist()
    return {"median": median, "p95": p95}
