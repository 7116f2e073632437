"""Ingest in a process of its own: it shares no interpreter with controllers, so neither waits.

ingest = IngestProcess(settings, owner)  # before any thread is started
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

from paceline.node.processes import die_with_parent
from paceline_backend import backends
from paceline_backend.control.ingest import Ingest, IngestStats
from paceline_backend.server import tracing
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store, StoreError

log = logging.getLogger(__name__)

# A batch of ingest makes tens of thousands of objects, none of them in a circle. With Python's own
# bounds, the search for circles takes a third of ingest's time.
GARBAGE = (50_000, 20, 20)
_SEND_S = 0.05  # pause between two messages about what ingest has done
_LOOK_S = 0.25  # how long `IngestProcess.run` may take to notice that it should stop
_END_S = 20.0  # that the child may take to end, once it is asked to

_State = tuple[IngestStats, bool]  # and whether it is behind


class IngestProcess:
    """A child process that ingests, and ends with this process.

    The child is a fork, which is there at once and shares the memory of what is imported. Make it
    while this process has one thread and neither database nor bus open.

    Args:
        settings: which database and bus.
        owner: name of the consumer; no other may have it.
    """

    def __init__(self, settings: Settings, owner: str) -> None:
        self.stats = IngestStats()
        self.behind = False  # as `Ingest.behind`
        backends.names()  # imports them all, for the child, too: both need them at once
        fork = multiprocessing.get_context("fork")
        self._child, childs_end = fork.Pipe()
        self._process = fork.Process(
            target=_work, args=(settings, owner, childs_end, self._child), daemon=True
        )
        self._process.start()
        childs_end.close()

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return self._process.pid

    def run(self, stop: threading.Event) -> None:
        """Follows what the child does until `stop` is set, then lets it end.

        Raises:
            RuntimeError: the child ended by itself.
        """
        try:
            while not stop.is_set():
                if self._child.poll(_LOOK_S):
                    self.stats, self.behind = self._child.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            code = self._process.exitcode
            raise RuntimeError(f"the process that ingests ended with code {code}") from error
        finally:
            self._child.close()  # asks the child to end
        self._process.join(_END_S)
        if self._process.is_alive():  # in a statement that does not end: telemetry waits on the bus
            log.warning("the process that ingests did not end within %g s: killed", _END_S)
            self._process.kill()
            self._process.join()


def _work(settings: Settings, owner: str, parent: Connection, parents_end: Connection) -> None:
    """The child, until the parent closes its end or dies."""
    parents_end.close()
    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):  # the parent handles them
        signal.signal(number, signal.SIG_IGN)
    tracing.configure("worker")
    gc.set_threshold(*GARBAGE)
    gc.freeze()  # modules stay: they are not searched for garbage while ingest works
    try:
        with Store.open(settings.database) as store:
            asked = _ingest(Ingest(store, settings.bus, owner), parent)
    except StoreError as error:
        log.error("ingest cannot begin: %s", error)
        asked = False
    tracing.end()
    sys.exit(0 if asked else 1)


def _ingest(ingest: Ingest, parent: Connection) -> bool:
    """Ingest until the parent asks for the end or dies; False if ingest failed before."""
    stop, sent = threading.Event(), _Sent(ingest, parent)
    ingest.on_step = sent.send

    def watch() -> None:
        with suppress(EOFError, OSError):
            parent.recv()  # the parent says nothing: this is its end
        stop.set()

    threading.Thread(target=watch, name="parent", daemon=True).start()
    try:
        ingest.run(stop)
    except Exception:
        log.exception("ingest failed")
    return stop.is_set()


class _Sent:
    """The newest report of an ingest to the parent process."""

    def __init__(self, ingest: Ingest, parent: Connection) -> None:
        self._ingest, self._parent = ingest, parent
        self._known: _State | None = None
        self._at = 0.0

    def send(self) -> None:
        """Send what has changed, at most every `_SEND_S`."""
        now, at = (replace(self._ingest.stats), self._ingest.behind), time.monotonic()
        if now == self._known or at < self._at + _SEND_S:
            return
        with suppress(OSError):  # the parent has ended, and so does ingest
            self._parent.send(now)
        self._known, self._at = now, at
