"""Supervision of the control plane: the bus, the web process and the worker.

These three are child processes of `paceline server`, whose process restarts them when they end.
The bus is a program of its own. Web and worker are forks of the supervisor: they start at once,
and the three share the memory of the modules that the supervisor has imported. The supervisor
therefore has one thread, and no database or bus open, whenever it starts a child.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import httpx
import redis

from paceline.core.errors import PacelineError
from paceline.node import private
from paceline.node.processes import die_with_parent, rename
from paceline.wire.bus import connect
from paceline_backend.server import tracing
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.server.settings import Settings

log = logging.getLogger(__name__)

_DATABASE = "paceline.db"
# Exit code after SIGINT; see docs/internals.md.
_INTERRUPTED = 130
_TICK_S = 0.2
_STOP_S = 10.0
# Maximum time that an orphaned bus may take to save its data and exit.
_PORT_S = 5.0  # seconds
_READY_S = 180.0
_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
# A process that ran for longer than this is restarted after the shortest pause.
_STEADY_S = 30.0  # seconds


def embedded_database(data: Path) -> str:
    """Return the URL of the database in a data directory."""
    return f"sqlite:///{data / _DATABASE}"


class DataDirectory:
    """Directory of the embedded database and bus, locked by one server; a context manager.

    Raises:
        PacelineError: the directory cannot be written, another user owns something in it, or
            another server uses it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        try:
            private.check_data(self.path)
            self.path.mkdir(0o700, parents=True, exist_ok=True)
            self._lock = (self.path / "server.lock").open("a+")
        except OSError as error:
            raise PacelineError(
                f"the data directory {path} cannot be written ({error.strerror}); "
                "choose another with --data"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise PacelineError(
                f"another paceline server uses the data directory {path}; "
                "stop it, or choose another with --data"
            ) from error
        # A fork that outlives the server for a moment must not keep the directory locked.
        os.register_at_fork(after_in_child=self._lock.close)

    @property
    def database(self) -> str:
        """URL of the embedded database."""
        return embedded_database(self.path)

    def bus(self, host: str = "127.0.0.1") -> EmbeddedBus:
        """Return the embedded bus, not yet started.

        The bus keeps its port across restarts, so that agents and ranks can reconnect. `host` is a
        further address to listen on.

        Raises:
            PacelineError: another program uses the port.
        """
        directory = self.path / "bus"
        directory.mkdir(0o700, exist_ok=True)
        recorded = directory / "port"
        port = int(recorded.read_text()) if recorded.exists() else None
        if port is not None:
            _end_orphan(EmbeddedBus(directory, port))
        bus = EmbeddedBus(directory, port, host)
        recorded.write_text(f"{bus.port}\n")
        return bus

    def __enter__(self) -> DataDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()


def _end_orphan(bus: EmbeddedBus) -> None:
    """Stop a bus that outlived its server.

    No other server uses this bus, because this process holds the lock on the bus's directory.
    """
    port, directory = bus.port, bus.directory
    deadline = time.monotonic() + _PORT_S
    while _listening(port):
        if time.monotonic() > deadline:
            raise PacelineError(
                f"port {port}, which the bus of this data directory uses, is taken by another "
                f"program: stop that program, or remove {directory / 'port'} to choose another "
                "port (running trainings then lose their connection)"
            )
        try:
            with connect(bus.url, timeout_s=1) as client:
                if client.config_get("dir").get("dir") == str(directory):
                    client.shutdown()
        except redis.RedisError:
            log.debug("port %d is still being freed, or does not belong to a bus", port)
        time.sleep(0.05)


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def listen(settings: Settings) -> socket.socket:
    """Return a listening socket.

    The web process inherits the socket, so that no request is refused while that process restarts.

    Raises:
        PacelineError: the port is in use, or the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        address = (settings.host, settings.port)
        listener = socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        raise PacelineError(
            f"cannot listen on {settings.host} port {settings.port} ({error.strerror}); choose "
            "another with --port, or stop the program that uses it"
        ) from error
    # Connections inherit this option. asyncio sets it only on sockets whose protocol number is set,
    # but `create_server` leaves that number at 0. Without the option, the body of each response
    # would be sent 40 ms late, after the acknowledgement of its header.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_fork = multiprocessing.get_context("fork")


@dataclass
class _Child:
    name: str
    work: Callable[[], int]
    process: multiprocessing.process.BaseProcess | None = None
    started: float = 0.0
    failures: int = 0
    not_before: float = field(default=0.0)

    def tend(self) -> None:
        now = time.monotonic()
        if self.process is not None and (code := self.process.exitcode) is not None:
            self.process.close()
            self.process = None
            self.failures = 0 if now - self.started > _STEADY_S else self.failures
            pause = _BACKOFF_S[min(self.failures, len(_BACKOFF_S) - 1)]
            self.failures += 1
            self.not_before = now + pause
            log.warning("%s ended with code %d: restarting in %.1f s", self.name, code, pause)
        if self.process is None and now >= self.not_before:
            self.started = now
            # Block signals until the child has its own handlers; a signal that arrives earlier
            # stays pending.
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            process = _fork.Process(target=self._work, name=f"paceline-{self.name}")
            try:
                process.start()
            except OSError as error:
                # Memory or process numbers may be exhausted for a while.
                self.not_before = now + _BACKOFF_S[-1]
                log.error("%s cannot be started: %s; retrying", self.name, error)
            else:
                self.process = process
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _work(self) -> None:
        die_with_parent()
        rename(f"paceline-{self.name}")
        # Ctrl-C must reach only the supervisor, which then stops the children in sequence.
        os.setsid()
        # Programs that the child starts must not read the server's terminal.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        code = 1
        try:
            code = self.work()
        except PacelineError as error:
            log.error("%s: %s", self.name, error)
        finally:
            tracing.end_soon(code)
        sys.exit(code)

    def terminate(self) -> None:
        if self.process is not None:
            self.process.terminate()

    def wait(self) -> None:
        if self.process is None:
            return
        self.process.join(_STOP_S)
        if self.process.exitcode is None:
            log.warning("%s did not stop in time: killed", self.name)
            self.process.kill()
            self.process.join()
        self.process.close()
        self.process = None


class ServerSupervisor:
    """Supervisor that keeps the parts of a control plane running until a signal arrives.

    `parts` are the functions that the web process and the worker run, by name; each returns an exit
    code. `bus` is the embedded bus, not yet started; None: the bus is external.
    """

    def __init__(
        self, settings: Settings, bus: EmbeddedBus | None, parts: Mapping[str, Callable[[], int]]
    ) -> None:
        self.settings = settings
        self.bus = bus
        self._bus_retry_at = 0.0
        self._stop = threading.Event()
        self._code = 0
        self._children = [_Child(name, work) for name, work in parts.items()]

    def run(self) -> int:
        """Run until SIGINT or SIGTERM.

        Call this on the main thread, because child processes are killed when the thread that
        started them ends. No other thread may exist, because a forked process has only a copy of
        the calling thread.

        Returns:
            Exit code: 130 after SIGINT, 0 after SIGTERM.

        Raises:
            PacelineError: the bus does not start, or the server does not become ready.
        """
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        # This process may have inherited SIG_IGN for SIGCHLD. The kernel would then discard the
        # exit codes of its children, and an ended child would look as if it were still running.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Modules stay loaded, so exclude them from garbage collection: a collection in a child
        # would write to, and so copy, their memory.
        gc.collect()
        gc.freeze()
        try:
            if self.bus is not None:
                self.bus.start()
            for child in self._children:
                child.tend()
            self._await_ready()
            while not self._stop.wait(_TICK_S):
                self._tend()
        finally:
            for child in self._children:
                child.terminate()
            for child in self._children:
                child.wait()
            if self.bus is not None:
                self.bus.stop()
        return self._code

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._code = _INTERRUPTED if number == signal.SIGINT else 0
        self._stop.set()

    def _tend(self) -> None:
        bus = self.bus
        if bus is not None and not bus.alive() and time.monotonic() >= self._bus_retry_at:
            log.warning("the embedded bus ended: restarting on port %d", bus.port)
            try:
                bus.start()
            except PacelineError as error:
                log.error("%s", error)
                self._bus_retry_at = time.monotonic() + _BACKOFF_S[-1]
        for child in self._children:
            child.tend()

    def _await_ready(self) -> None:
        headers = {"Host": "localhost"}
        deadline = time.monotonic() + _READY_S
        last = "no answer"
        url = f"{self.settings.url}/readyz"
        while not self._stop.wait(0.1):
            self._tend()
            try:
                # Open a connection for each request, because `_tend` may fork, and the forked
                # process would keep an open connection open. Do not verify the certificate: it need
                # not contain the name of the local address.
                answer = httpx.get(url, headers=headers, trust_env=False, verify=False)
                if answer.is_success:
                    sys.stdout.write(f"Paceline on {self.settings.url}\n")
                    sys.stdout.flush()
                    return
                last = answer.text
            except httpx.TransportError as error:
                last = str(error)
            if time.monotonic() > deadline:
                raise PacelineError(f"not ready after {_READY_S:.0f} s: {last}")
