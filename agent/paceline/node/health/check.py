"""A speed test of this machine: a few seconds of arithmetic, copying, and writing to the disk.

``python -m paceline.node.health.check DIRECTORY`` prints a `NodeCheck` as JSON. The agent starts
this process (`Checker`) only while no rank trains on this node, because test and ranks would slow
each other down.
"""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.node import machine
from paceline.node.processes import die_with_parent
from paceline.wire import NodeCheck

# Time limit in seconds for the measuring process, which usually takes about three seconds.
MEASURING_LIMIT_S = 60.0

# Seconds to wait for the end of a killed measuring process.
_REAP_S = 0.5
# Seconds without ranks before a measurement. A node that has just been started or has just ended a
# run may get another run at once, which would cancel the measurement.
_IDLE_BEFORE_S = 10.0
_REPEATS = 5
_EDGE = 512
_PRODUCTS = 8
_MOST_MEASURING_THREADS = 64
# Size of the copied array in bytes. It is far larger than a core's part of the processor's caches.
_COPIED = 64 << 20
_WRITTEN = 32 << 20
_log = logging.getLogger(__name__)


def measure(directory: Path) -> NodeCheck:
    """Measure this machine for about three seconds, including the disk with the given directory.

    The measurement writes a file into the directory and deletes it.
    """
    return NodeCheck(_compute(), _memory(), _disk(directory), time.time())


def _median_s(work: Callable[[], None]) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _compute() -> float:
    import numpy as np

    count = min(machine.cores(), _MOST_MEASURING_THREADS)
    matrices = [np.full((_EDGE, _EDGE), 1e-3, np.float32) for _ in range(count)]

    def multiply(matrix: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> None:
        result = np.empty_like(matrix)
        for _ in range(_PRODUCTS):
            np.matmul(matrix, matrix, out=result)

    def on_all() -> None:
        threads = [threading.Thread(target=multiply, args=(matrix,)) for matrix in matrices]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return _PRODUCTS * 2 * _EDGE**3 / _median_s(on_all) / 1e9


def _memory() -> float:
    import numpy as np

    source, target = np.ones(_COPIED, np.uint8), np.empty(_COPIED, np.uint8)
    return _COPIED / _median_s(lambda: np.copyto(target, source)) / 1e9


def _disk(directory: Path) -> float | None:
    path = directory / f".check-{os.getpid()}"
    block = os.urandom(1 << 20)
    try:
        begin = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(_WRITTEN // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return _WRITTEN / (time.perf_counter() - begin) / 1e6
    except OSError as error:
        _log.warning("cannot measure the disk of %s: %s", directory, error)
        return None
    finally:
        path.unlink(missing_ok=True)


class Checker:
    """A measurement of the machine, in a child process of the agent. No method blocks for long."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._kill_at = 0.0
        self._idle_since = time.monotonic()
        # True if the machine should be measured as soon as no rank trains here.
        self.due = True
        self.newest: NodeCheck | None = None

    def poll(self, *, idle: bool) -> None:
        """Begin, end or cancel a measurement; `idle` is True if no rank trains on this node."""
        if not idle:
            self._idle_since = time.monotonic()
        if self._process is not None and not idle:
            self.close()
            self.due = True
        elif self._process is not None:
            self._check_process(self._process)
        elif self.due and time.monotonic() - self._idle_since >= _IDLE_BEFORE_S:
            self._begin()

    def close(self) -> None:
        """Cancel the measurement that is under way."""
        if self._process is not None:
            self._process.kill()
            assert self._process.stdout is not None
            self._process.stdout.close()
            with suppress(OSError):
                (self._directory / f".check-{self._process.pid}").unlink(missing_ok=True)
            # A disk that hangs may block the end of the process.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_S)
            self._process = None

    def _begin(self) -> None:
        self.due = False
        self._kill_at = time.monotonic() + MEASURING_LIMIT_S
        threads = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "paceline.node.health.check", str(self._directory)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env={**os.environ, **threads},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            _log.warning("cannot measure this machine: %s", error)

    def _check_process(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            if time.monotonic() > self._kill_at:
                self.close()
                self.due = True
                _log.warning(
                    "cannot measure this machine: it took more than %g s", MEASURING_LIMIT_S
                )
            return
        output, _ = process.communicate()
        self._process = None
        try:
            self.newest = msgspec.json.decode(output, type=NodeCheck)
            _log.info("measured this machine: %s", self.newest)
        except msgspec.DecodeError:
            _log.warning(
                "cannot measure this machine: the measuring process ended with code %d",
                process.returncode,
            )


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(measure(Path(sys.argv[1]))))
