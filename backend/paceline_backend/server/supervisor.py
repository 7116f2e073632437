"""Supervision: the bus, the web process and the worker, kept alive as children of one process."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import httpx
import redis

from paceline.core.errors import PacelineError
from paceline.node import private
from paceline.node.processes import die_with_parent
from paceline.wire.bus import connect
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.server.settings import Settings

log = logging.getLogger(__name__)

_DATABASE = "paceline.db"
_INTERRUPTED = 130  # exit code, docs/internals.md
_TICK_S = 0.2
_STOP_S = 10.0
_PORT_S = 5.0  # for an orphaned bus to save its data and go
_READY_S = 180.0
_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_STEADY_S = 30.0  # a process that lived so long starts again after the shortest pause


def embedded_database(data: Path) -> str:
    """URL of the database in a data directory."""
    return f"sqlite:///{data / _DATABASE}"


class DataDirectory:
    """The directory of the embedded default, held by one server at a time; a context manager.

    Args:
        path: made if missing.

    Raises:
        PacelineError: it cannot be written, another user owns something in it, or another server
            uses it.
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

    @property
    def database(self) -> str:
        """URL of the embedded database."""
        return embedded_database(self.path)

    def bus(self, host: str = "127.0.0.1") -> EmbeddedBus:
        """The embedded bus, not yet started, on its old port: agents and ranks come back to it.

        Args:
            host: further address to listen on.

        Raises:
            PacelineError: that port is taken by something else.
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
    """Ends a bus that outlived the server whose lock on its directory we hold now."""
    port, directory = bus.port, bus.directory
    deadline = time.monotonic() + _PORT_S
    while _listening(port):
        if time.monotonic() > deadline:
            raise PacelineError(
                f"port {port}, the bus of this data directory, is in use by another program: "
                f"end it, or remove {directory / 'port'} (running trainings then lose touch)"
            )
        try:
            with connect(bus.url, timeout_s=1) as client:
                if client.config_get("dir").get("dir") == str(directory):
                    client.shutdown()
        except redis.RedisError:
            log.debug("port %d is being freed, or is not a bus", port)
        time.sleep(0.05)


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def listen(settings: Settings) -> socket.socket:
    """A listening socket. The web process inherits it: no call is refused while that restarts.

    Raises:
        PacelineError: the port is in use, or the address is not ours.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        address = (settings.host, settings.port)
        listener = socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        raise PacelineError(
            f"cannot listen on {settings.host} port {settings.port} ({error.strerror}); "
            "choose another with --port, or end the program that uses it"
        ) from error
    # Connections inherit it. asyncio sets it only where a socket names its protocol, which sockets
    # of `create_server` do not: each answer's body would wait 40 ms for its header to be confirmed.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@dataclass
class _Child:
    """One process that shall run, and when it may start again."""

    name: str
    command: list[str]
    env: dict[str, str]
    fds: tuple[int, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    failures: int = 0
    not_before: float = field(default=0.0)

    def tend(self) -> None:
        """Starts it if it does not run and its pause is over."""
        now = time.monotonic()
        if self.process is not None and (code := self.process.poll()) is not None:
            self.process = None
            self.failures = 0 if now - self.started > _STEADY_S else self.failures
            pause = _BACKOFF_S[min(self.failures, len(_BACKOFF_S) - 1)]
            self.failures += 1
            self.not_before = now + pause
            log.warning("%s ended with code %d: starts again in %.1f s", self.name, code, pause)
        if self.process is None and now >= self.not_before:
            self.started = now
            self.process = subprocess.Popen(
                self.command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                pass_fds=self.fds,
                start_new_session=True,  # Ctrl-C reaches the supervisor, which stops all in order
                preexec_fn=die_with_parent,
            )

    def terminate(self) -> None:
        """SIGTERM."""
        if self.process is not None:
            self.process.terminate()

    def wait(self) -> None:
        """Waits until it has ended; SIGKILL if that takes too long."""
        if self.process is None:
            return
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            log.warning("%s does not end: killed", self.name)
            self.process.kill()
            self.process.wait()
        self.process = None


class Supervisor:
    """Keeps the parts of a control plane alive until it is told to stop.

    Args:
        settings: for the children.
        listener: the web process's socket.
        bus: the embedded one, not yet started; None: somebody else runs it.
        name: of the worker.
    """

    def __init__(
        self, settings: Settings, listener: socket.socket, bus: EmbeddedBus | None, name: str
    ) -> None:
        self.settings = settings
        self.bus = bus
        self._bus_retry_at = 0.0
        self._stop = threading.Event()
        self._code = 0
        # Not as arguments: every user of the machine can read those.
        env = {
            **os.environ,
            "PACELINE_DATABASE": settings.database,
            "PACELINE_BUS": settings.bus,
            **settings.tokens,
            "PACELINE_MAX_BODY_BYTES": str(settings.max_body_bytes),
            "PACELINE_TLS_CERT": str(settings.tls_cert or ""),
            "PACELINE_TLS_KEY": str(settings.tls_key or ""),
            "PACELINE_MAX_STREAMS": str(settings.max_streams),
            "PACELINE_PATH_PREFIX": settings.path_prefix,
            "PACELINE_TRUST_NETWORK": "1" if settings.trust_network else "0",
            "PACELINE_WEBHOOK_TO": settings.webhook_origins.text,
            "PACELINE_HOUR_PRICE": settings.hour_price.text if settings.hour_price else "",
            **settings.proxies.options(),
            **settings.limits,
        }
        serve = [sys.executable, "-m", "paceline_backend.cli", "--only"]
        where = ["--host", settings.host, "--port", str(settings.port)]
        fd = listener.fileno()
        self._children = [
            _Child("web", [*serve, "web", *where, "--fd", str(fd)], env, (fd,)),
            _Child("worker", [*serve, "worker", "--name", name], env),
        ]

    def run(self) -> int:
        """Works until SIGINT or SIGTERM; on the main thread, as children die with their thread.

        Returns:
            Exit code: 130 after SIGINT, 0 after SIGTERM.

        Raises:
            PacelineError: the bus does not start, or the server does not become ready.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
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
            log.warning("the embedded bus ended: starts again on port %d", bus.port)
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
        # Whether the certificate fits its name is for clients to judge.
        own = httpx.Client(
            base_url=self.settings.url, headers=headers, trust_env=False, verify=False
        )
        with own as http:
            while not self._stop.wait(0.1):
                self._tend()
                try:
                    answer = http.get("/readyz")
                    if answer.is_success:
                        sys.stdout.write(f"Paceline on {self.settings.url}\n")
                        sys.stdout.flush()
                        return
                    last = answer.text
                except httpx.TransportError as error:
                    last = str(error)
                if time.monotonic() > deadline:
                    raise PacelineError(f"not ready after {_READY_S:.0f} s: {last}")
