"""Forecasts in a separate process, so that neither page requests nor planning wait for them."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import TypeVar

from paceline_backend.insight.whatif.answer import Forecast
from paceline_backend.store import Store

T = TypeVar("T")
# Niceness of the child. On a busy machine, the child then gets a third of the CPU time of a process
# with normal priority.
_NICE = 5


class Forecaster:
    """Child process of low priority that makes one forecast at a time. Thread-safe.

    The child starts with `start` or with the first forecast, which takes seconds. It ends with
    `close` or with this process, even in the middle of a forecast.
    """

    def __init__(self, database: str) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._pool: ProcessPoolExecutor | None = None
        # The child exits when this connection is closed.
        self._alive: Connection | None = None

    def start(self) -> None:
        """Start the child before the first forecast is due, without waiting for it. Idempotent."""
        with self._lock:
            if self._pool is None:
                self._submit(_load)

    def submit(
        self, run: str, steps: int, presets: Sequence[str] | None = None, *, relaxed: bool = True
    ) -> Future[Forecast]:
        """Submit a forecast; the future raises the errors of `whatif.forecast.forecast`."""
        call = functools.partial(_forecast, self._database, run, steps, presets, relaxed)
        with self._lock:
            try:
                return self._submit(call)
            except BrokenProcessPool:
                self._end()
                return self._submit(call)

    def close(self) -> None:
        """Stop the child; a running forecast fails. Idempotent."""
        with self._lock:
            self._end()

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        if self._pool is not None:
            return self._pool.submit(call)
        spawn = multiprocessing.get_context("spawn")
        ends, self._alive = spawn.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(1, spawn, _begin, (ends,))
        made = self._pool.submit(call)
        # Close this end of the connection, because the child has its own copy of it.
        ends.close()
        return made

    def _end(self) -> None:
        if self._alive is not None:
            self._alive.close()
            self._alive = None
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def __enter__(self) -> Forecaster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _begin(parent: Connection) -> None:
    # Ignore SIGINT, because the parent handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICE)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    with contextlib.suppress(EOFError):
        parent.recv_bytes()
    os._exit(0)


def _load() -> None:
    import paceline_backend.insight.whatif.forecast  # noqa: F401


def _forecast(
    database: str, run: str, steps: int, presets: Sequence[str] | None, relaxed: bool
) -> Forecast:
    from paceline_backend.insight.whatif.forecast import forecast

    return forecast(_store(database), run, steps=steps, presets=presets, relaxed=relaxed)


@functools.cache
def _store(database: str) -> Store:
    return Store(database)
