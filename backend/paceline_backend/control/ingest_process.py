"""Ingest in a child process, so that it and the controllers do not share an interpreter lock.

The worker creates an `IngestProcess` before it starts any thread:

    ingest = IngestProcess(settings, owner)
    threading.Thread(target=ingest.run, args=[stop]).start()
    ingest.stats.rows
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

from paceline.node.processes import die_with_parent, rename
from paceline_backend import backends
from paceline_backend.control.ingest import Ingest, IngestStats
from paceline_backend.server import tracing
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store, StoreError

log = logging.getLogger(__name__)

# A batch of ingest creates tens of thousands of objects, none of them in a reference cycle. With
# Python's default thresholds, the search for cycles takes a third of ingest's time.
GARBAGE = (50_000, 20, 20)
# Minimum pause between two reports of the child.
_SEND_S = 0.05
# Maximum delay after which `IngestProcess.run` notices that it should stop.
_STOP_CHECK_S = 0.25
# If the child does not end within this time, it is killed.
_END_S = 20.0  # seconds

# State of the child: the counters of ingest, and `Ingest.behind`.
_State = tuple[IngestStats, bool]


class IngestProcess:
    """Child process that ingests telemetry, and ends when its parent ends.

    The child is a fork: it starts at once and shares the memory of imported modules. Create it
    while this process has one thread and neither database nor bus open.
    """

    def __init__(self, settings: Settings, owner: str) -> None:
        self.stats = IngestStats()
        # Last known value of `Ingest.behind` in the child.
        self.behind = False
        # Import all backends before the fork, because both processes need them immediately.
        backends.names()
        fork = multiprocessing.get_context("fork")
        self._child, childs_end = fork.Pipe()
        self._process = fork.Process(
            target=_work, args=(settings, owner, childs_end, self._child), daemon=True
        )
        self._process.start()
        childs_end.close()

    @property
    def pid(self) -> int | None:
        """PID of the child."""
        return self._process.pid

    def run(self, stop: threading.Event) -> None:
        """Receive the child's reports until `stop` is set, then end the child.

        Raises:
            RuntimeError: the child ended without being asked to.
        """
        try:
            while not stop.is_set():
                if self._child.poll(_STOP_CHECK_S):
                    self.stats, self.behind = self._child.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            code = self._process.exitcode
            raise RuntimeError(f"the ingest process exited with code {code}") from error
        finally:
            # The child ends when its pipe closes.
            self._child.close()
        self._process.join(_END_S)
        # A child that hangs, for example in a long SQL statement, can be killed without loss:
        # telemetry that it has not stored stays on the bus.
        if self._process.is_alive():
            log.warning("the ingest process did not exit within %g s: killed", _END_S)
            self._process.kill()
            self._process.join()


def _work(settings: Settings, owner: str, parent: Connection, parents_end: Connection) -> None:
    """Run the child until the parent closes its end of the pipe or dies."""
    parents_end.close()
    die_with_parent()
    rename("paceline-ingest")
    # The parent handles signals and then closes the pipe.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    tracing.configure("worker")
    gc.set_threshold(*GARBAGE)
    # Modules stay loaded, so the garbage collector need not search them.
    gc.freeze()
    try:
        with Store.open(settings.database) as store:
            asked = _ingest(Ingest(store, settings.bus, owner), parent)
    except StoreError as error:
        log.error("ingest cannot start: %s", error)
        asked = False
    tracing.end()
    sys.exit(0 if asked else 1)


def _ingest(ingest: Ingest, parent: Connection) -> bool:
    """Ingest until the parent asks for the end or dies; return False if ingest failed before."""
    stop, sent = threading.Event(), _Sent(ingest, parent)
    ingest.on_step = sent.send

    def watch() -> None:
        with suppress(EOFError, OSError):
            # The parent never sends anything, so this call ends with an error when the pipe closes.
            parent.recv()
        stop.set()

    threading.Thread(target=watch, name="parent", daemon=True).start()
    try:
        ingest.run(stop)
    except Exception:
        log.exception("ingest failed")
    return stop.is_set()


class _Sent:
    def __init__(self, ingest: Ingest, parent: Connection) -> None:
        self._ingest, self._parent = ingest, parent
        self._known: _State | None = None
        self._at = 0.0

    def send(self) -> None:
        now, at = (replace(self._ingest.stats), self._ingest.behind), time.monotonic()
        if now == self._known or at < self._at + _SEND_S:
            return
        # If the parent has ended, ingest ends soon, too.
        with suppress(OSError):
            self._parent.send(now)
        self._known, self._at = now, at
