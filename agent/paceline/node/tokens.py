"""Storage of the token of a server on this machine, in a file that only the server's user can read.

A server that was started without a token generates one. While the server runs, it keeps the token
in a file named after its address, and locks the file. The command line, agents and demos read the
token from the file. Once the server has ended, for whatever reason, the lock is gone. Then clients
ignore the file, so that they do not send the token to another program that listens on the port.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

_LONGEST_TOKEN = 4096


def kept(server: str) -> str | None:
    """Return the token of a server that this user runs on this machine at the given address.

    Return None if there is no such server, or if it stores no token.
    """
    try:
        path = _place(server)
        if path is None:
            return None
        with path.open() as file:
            about = os.fstat(file.fileno())
            if about.st_uid != os.getuid() or about.st_mode & 0o077 or not _locked(file.fileno()):
                return None
            return file.read(_LONGEST_TOKEN).strip() or None
    except (OSError, UnicodeDecodeError):
        return None


@contextmanager
def keeping(server: str, token: str) -> Iterator[Path]:
    """Return a context in which a server's admin token is stored for clients of the same user.

    Raise an OSError if the file cannot be written.
    """
    path = _place(server)
    if path is None:
        raise OSError(f"{server} is not the address of a server")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The file may be left over from a server that was killed.
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # A forked child that outlives the server must not keep the file locked.
        os.register_at_fork(after_in_child=file.close)
        file.write(f"{token}\n")
        file.flush()
        try:
            yield path
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _place(server: str) -> Path | None:
    try:
        parts = urlsplit(server)
        host, port = parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None
    if not host or not port or "/" in host:
        return None
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    # Machines may share the home directory, but each has its own loopback interface.
    machine = Path(home) / "paceline" / "servers" / socket.gethostname()
    return machine / f"{'127.0.0.1' if host == 'localhost' else host}_{port}"


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
