"""Open a database, run transactions on it, and translate its errors.

Errors of drivers leave this module only as `StoreError` or one of its subclasses.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psycopg
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.pool import ConnectionPoolEntry

from paceline.core.errors import PacelineError
from paceline_backend.store import migrate as _migrate

T = TypeVar("T")
Connection = sa.Connection

_BUSY_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 5
# Names of execution options: whether the transaction writes, and how long it may wait for other
# writers.
_WRITES, _WAIT_S = "paceline_writes", "paceline_wait_s"


# Errors of drivers after which a retry cannot succeed. psycopg raises `ProgramLimitExceeded`, an
# OperationalError, if a value exceeds a limit of Postgres, such as the size of an index row.
_REFUSALS = (
    *(psycopg.DataError, psycopg.IntegrityError, psycopg.errors.ProgramLimitExceeded),
    *(sqlite3.DataError, sqlite3.IntegrityError),
)
# Errors of drivers, other than `_REFUSALS`, after which a retry may succeed.
_OUTAGES = (
    *(psycopg.OperationalError, psycopg.InterfaceError),
    *(sqlite3.OperationalError, sqlite3.InterfaceError),
)


class StoreError(PacelineError):
    """The database cannot execute a request; the message names the database."""


class StoreUnavailableError(StoreError):
    """The database does not respond, is locked or full. A retry may succeed."""


class StoreRefusedError(StoreError):
    """The database rejects the values: out of range, duplicate, not a number. Do not retry."""


class Store:
    """A database whose tables exist (`Store.open` creates them). Thread-safe; calls block.

    `engine` is an engine of SQLAlchemy. Prefer `read` and `write`, which translate errors. `write`
    also waits for other writers of SQLite. A transaction of `engine` that reads and then writes can
    fail at once ("database is locked").

    Args:
        url: ``sqlite:///path`` or ``postgresql://user:password@host:port/database``.

    Raises:
        StoreError: the URL is invalid.
    """

    def __init__(self, url: str) -> None:
        self.url = _parse(url)
        self.name = self.url.render_as_string(hide_password=True)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.engine = _sqlite_engine(self.url) if self.is_sqlite else _postgres_engine(self.url)
        self._writer = self.engine.execution_options(**{_WRITES: True})
        # Device and inode of SQLite's file.
        self._file: tuple[int, int] | None = None

    @classmethod
    def open(cls, url: str) -> Store:
        """Open a store, and create its tables if it has none.

        Several processes may do this concurrently.

        Raises:
            StoreError: the URL is unusable, or another version of Paceline made the database.
            StoreUnavailableError: the database cannot be reached, opened or written.
        """
        store = cls(url)
        try:
            with store._translated():
                _migrate.to_head(store.engine, store._writer)
        except _migrate.OtherTablesError as error:
            store.close()
            raise StoreError(
                f"database {store.name} has the tables of another version of Paceline (revision "
                f"{error}, this version needs {_migrate.head()}), and before release 1.0 tables "
                "are not migrated: start with a new data folder (--data) or an empty database "
                "(--database)"
            ) from error
        except BaseException:
            store.close()
            raise
        return store

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Open a transaction that only reads. On SQLite it sees one snapshot of the database."""
        self._check_file()
        with self._translated(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self, wait_s: float | None = None) -> Iterator[sa.Connection]:
        """Open a transaction that writes: commit at its end, roll back if the block raises.

        `wait_s` is the maximum time in seconds to wait for other writers; None keeps the limit of
        the connection.
        """
        self._check_file()
        writer = self._writer
        if wait_s is not None:
            writer = writer.execution_options(**{_WAIT_S: wait_s})
        with self._translated(), writer.begin() as connection:
            yield connection
        if (commits := _commits.get()) is not None:
            commits.count += 1

    def free_share(self) -> float | None:
        """Return the free fraction of the database's file system; None if it is on another host."""
        if not self.is_sqlite:
            return None
        try:
            usage = shutil.disk_usage(Path(str(self.url.database)).parent)
        except OSError:
            return None
        return usage.free / usage.total

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_file(self) -> None:
        """Raise `StoreUnavailableError` if SQLite's file was deleted or replaced.

        SQLite would continue to write to a deleted file, and lose these writes when the process
        ends.
        """
        if not self.is_sqlite:
            return
        try:
            status = Path(str(self.url.database)).stat()
            file = (status.st_dev, status.st_ino)
        except OSError:
            file = None
        self._file = self._file or file
        if file != self._file:
            happened = "was deleted" if file is None else "was replaced"
            raise StoreUnavailableError(
                f"database {self.name}: its file {happened} while it was in use; put it back, or "
                "restart the server"
            )

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate database errors to `StoreError`.

        Statements that bypass SQLAlchemy, such as COPY, raise the drivers' own errors.
        """
        try:
            yield
        except (exc.DBAPIError, psycopg.Error, sqlite3.Error) as error:
            raise self._error(error) from error
        # SQLAlchemy raises this error if all pooled connections are busy.
        except exc.TimeoutError as error:
            raise StoreUnavailableError(f"database {self.name}: {error}") from error
        # sqlite3 raises this error for an integer of more than 64 bits.
        except OverflowError as error:
            raise StoreRefusedError(f"database {self.name}: {error}") from error

    def _error(self, error: exc.DBAPIError | psycopg.Error | sqlite3.Error) -> StoreError:
        original = error.orig if isinstance(error, exc.DBAPIError) else error
        text = f"database {self.name}: {str(original).strip()}"
        if isinstance(original, sqlite3.OperationalError) and "open" in str(original):
            text += "; check that its directory exists and is writable"
        if isinstance(original, _REFUSALS) or str(original).startswith("Error binding parameter"):
            return StoreRefusedError(text)
        if isinstance(original, _OUTAGES):
            return StoreUnavailableError(text)
        return StoreError(text)


@dataclass
class Commits:
    """Number of transactions that a `counting_commits` block commits.

    Transactions in other threads count if the thread runs in a copy of the context, as in
    Starlette's thread pool.
    """

    count: int = 0


_commits: ContextVar[Commits | None] = ContextVar("commits", default=None)


@contextmanager
def counting_commits() -> Iterator[Commits]:
    """Count the transactions that the block commits, to find out whether it changed anything."""
    commits = Commits()
    before = _commits.set(commits)
    try:
        yield commits
    finally:
        _commits.reset(before)


def insert(connection: sa.Connection, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    """Return an INSERT of the connection's dialect, which supports ON CONFLICT."""
    is_sqlite = connection.dialect.name == "sqlite"
    return sqlite.insert(table) if is_sqlite else postgresql.insert(table)


def in_chunks(items: Sequence[T], sizes: Sequence[int]) -> Iterator[Sequence[T]]:
    """Yield all items in order, in chunks of the given sizes.

    A query whose text depends on the size of the chunk then has only a few different texts, so
    that prepared statements are reused. `sizes` is descending; the last size is 1.
    """
    done = 0
    for size in sizes:
        end = done + (len(items) - done) // size * size
        for at in range(done, end, size):
            yield items[at : at + size]
        done = end


def now(connection: sa.Connection) -> float:
    """Return Unix time by the database's clock, which all processes of a database share."""
    if connection.dialect.name == "postgresql":
        return float(connection.scalar(sa.text("SELECT extract(epoch FROM clock_timestamp())")))
    # SQLite is a file of this machine: all its users share this clock.
    return time.time()


def _parse(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except exc.ArgumentError as error:
        raise StoreError(
            "invalid database URL: use sqlite:///path or "
            "postgresql://user:password@host:port/database"
        ) from error
    name = parsed.render_as_string(hide_password=True)
    if parsed.drivername in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "postgresql+psycopg"):
        raise StoreError(f"database {name}: only sqlite:/// and postgresql:// are supported")
    if parsed.drivername == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise StoreError(
            f"database {name}: several processes share it, so it must be a file: sqlite:///path"
        )
    return parsed


def _sqlite_engine(url: sa.URL) -> sa.Engine:
    engine = sa.create_engine(
        url, connect_args=_unless_in(url, timeout=_BUSY_TIMEOUT_S), pool_size=10, max_overflow=40
    )

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
        # Without an isolation level, the driver opens no transactions itself.
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys = ON")
        # This setting cannot corrupt a database in WAL mode, which `to_head` sets.
        connection.execute("PRAGMA synchronous = NORMAL")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        options = connection.get_execution_options()
        with _waiting(connection, options.get(_WAIT_S)):
            connection.exec_driver_sql("BEGIN IMMEDIATE" if _WRITES in options else "BEGIN")

    return engine


@contextmanager
def _waiting(connection: sa.Connection, wait_s: float | None) -> Iterator[None]:
    """Set how long SQLite waits for other writers within the block; None changes nothing."""
    if wait_s is None:
        yield
        return
    before = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(1e3 * wait_s)}")
    try:
        yield
    finally:
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {before}")


def _postgres_engine(url: sa.URL) -> sa.Engine:
    engine = sa.create_engine(
        url,
        connect_args=_unless_in(
            url, application_name="paceline", connect_timeout=_CONNECT_TIMEOUT_S
        ),
        pool_size=10,
        max_overflow=40,
        # Check pooled connections before use, so that no call fails after a restart of Postgres.
        pool_pre_ping=True,
    )

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        wait_s = connection.get_execution_options().get(_WAIT_S)
        if wait_s is not None:
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = {int(1e3 * wait_s)}")

    return engine


def _unless_in(url: sa.URL, **defaults: object) -> dict[str, object]:
    return {key: value for key, value in defaults.items() if key not in url.query}
