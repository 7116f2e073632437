"""One database: how it is opened, its two kinds of transactions, what its errors mean."""

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
Connection = sa.Connection  # what `Store.read` and `Store.write` give

_BUSY_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 5
# Execution options: the transaction will write; how long it may wait for others that do.
_WRITES, _WAIT_S = "paceline_writes", "paceline_wait_s"


# A value that exceeds a limit of Postgres, as an index's, is an OperationalError of psycopg.
_REFUSALS = (psycopg.DataError, psycopg.IntegrityError, psycopg.errors.ProgramLimitExceeded)


class StoreError(PacelineError):
    """The database cannot do what was asked; the message names the database."""


class StoreUnavailableError(StoreError):
    """The database does not answer, is locked or full: the same call may succeed later."""


class StoreRefusedError(StoreError):
    """The database refuses these values, now and later: out of range, duplicate, not a number."""


class Store:
    """A database whose tables exist; `Store.open` makes them. Thread-safe; calls block.

    `engine` is SQLAlchemy's. Prefer `read` and `write`: they translate errors, and on SQLite what
    begins as a reader and then writes may fail at once ("database is locked") instead of waiting
    for its turn.

    Args:
        url: ``sqlite:///path`` or ``postgresql://user:password@host:port/database``.

    Raises:
        StoreError: not such a URL.
    """

    def __init__(self, url: str) -> None:
        self.url = _parse(url)
        self.name = self.url.render_as_string(hide_password=True)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.engine = _sqlite_engine(self.url) if self.is_sqlite else _postgres_engine(self.url)
        self._writer = self.engine.execution_options(**{_WRITES: True})
        self._file: tuple[int, int] | None = None  # of SQLite: which file this is

    @classmethod
    def open(cls, url: str) -> Store:
        """Open a store and migrate it; several processes may do this at once.

        Raises:
            StoreError: not a usable URL, or the database is from a newer version.
            StoreUnavailableError: it cannot be reached, opened or written.
        """
        store = cls(url)
        try:
            with store._translated():
                _migrate.to_head(store.engine, store._writer)
        except _migrate.NewerDatabaseError as error:
            store.close()
            raise StoreError(
                f"database {store.name} is from a newer version of Paceline (revision {error}): "
                "upgrade paceline"
            ) from error
        except BaseException:
            store.close()
            raise
        return store

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A transaction that only reads. On SQLite it sees one state of the database throughout.

        Raises:
            StoreError: or one of its kinds.
        """
        self._check_file()
        with self._translated(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self, wait_s: float | None = None) -> Iterator[sa.Connection]:
        """A transaction that writes; committed at its end, rolled back when the block raises.

        Args:
            wait_s: how long to wait for other writers; None: as long as the database's URL says.

        Raises:
            StoreError: or one of its kinds.
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
        """Free share of the file system with the database; None: it is another machine's."""
        if not self.is_sqlite:
            return None
        try:
            usage = shutil.disk_usage(Path(str(self.url.database)).parent)
        except OSError:
            return None
        return usage.free / usage.total

    def close(self) -> None:
        """Closes all connections."""
        self.engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_file(self) -> None:
        """Makes sure that what is written now can be read after a restart.

        SQLite goes on with a file that was deleted: all that goes there is lost with the process.

        Raises:
            StoreUnavailableError: the file is gone, or there is another one.
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
            happened = "was deleted" if file is None else "was replaced by another one"
            raise StoreUnavailableError(
                f"database {self.name}: its file {happened} while it was in use; put it back, or "
                "start the server again"
            )

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """The one place where database errors become ours. COPY raises psycopg's own."""
        try:
            yield
        except (exc.DBAPIError, psycopg.Error) as error:
            raise self._error(error) from error
        except exc.TimeoutError as error:  # all pooled connections are busy
            raise StoreUnavailableError(f"database {self.name}: {error}") from error
        except OverflowError as error:  # sqlite3's, for an integer of more than 64 bits
            raise StoreRefusedError(f"database {self.name}: {error}") from error

    def _error(self, error: exc.DBAPIError | psycopg.Error) -> StoreError:
        original = error.orig if isinstance(error, exc.DBAPIError) else error
        text = f"database {self.name}: {str(original).strip()}"
        if isinstance(original, sqlite3.OperationalError) and "open" in str(original):
            text += "; does its directory exist, and may this user write there?"
        if (
            isinstance(error, (exc.DataError, exc.IntegrityError))
            or isinstance(original, _REFUSALS)
            or str(original).startswith("Error binding parameter")  # of sqlite3
        ):
            return StoreRefusedError(text)
        if isinstance(error, (exc.OperationalError, exc.InterfaceError)) or isinstance(
            original, (psycopg.OperationalError, psycopg.InterfaceError)
        ):
            return StoreUnavailableError(text)
        return StoreError(text)


@dataclass
class Commits:
    """How many transactions were committed in a context and the threads that it called."""

    count: int = 0


_commits: ContextVar[Commits | None] = ContextVar("commits", default=None)


@contextmanager
def counting_commits() -> Iterator[Commits]:
    """Count the transactions that the block commits, such as the execution of one request."""
    commits = Commits()
    before = _commits.set(commits)
    try:
        yield commits
    finally:
        _commits.reset(before)


def insert(connection: sa.Connection, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT of the connection's dialect, which knows ON CONFLICT."""
    is_sqlite = connection.dialect.name == "sqlite"
    return sqlite.insert(table) if is_sqlite else postgresql.insert(table)


def in_chunks(items: Sequence[T], sizes: Sequence[int]) -> Iterator[Sequence[T]]:
    """All items in their order, in parts of few sizes, so that few statements are prepared.

    Args:
        items: to cut.
        sizes: descending; the last is 1.
    """
    done = 0
    for size in sizes:
        end = done + (len(items) - done) // size * size
        for at in range(done, end, size):
            yield items[at : at + size]
        done = end


def now(connection: sa.Connection) -> float:
    """Unix time, by the database's clock: the one that all who use a database can compare with."""
    if connection.dialect.name == "postgresql":
        return float(connection.scalar(sa.text("SELECT extract(epoch FROM clock_timestamp())")))
    return time.time()  # SQLite is a file of this machine: all its users see this clock.


def _parse(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except exc.ArgumentError as error:
        raise StoreError(
            "the database URL cannot be read: use sqlite:///path or "
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
        connection.isolation_level = None  # the driver opens no transactions of its own
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = NORMAL")  # safe in WAL mode: to_head sets that

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        options = connection.get_execution_options()
        with _waiting(connection, options.get(_WAIT_S)):
            connection.exec_driver_sql("BEGIN IMMEDIATE" if _WRITES in options else "BEGIN")

    return engine


@contextmanager
def _waiting(connection: sa.Connection, wait_s: float | None) -> Iterator[None]:
    """Within it SQLite waits for other writers for so long; None: for as long as ever."""
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
        pool_pre_ping=True,  # a restarted server costs no failed call
    )

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        wait_s = connection.get_execution_options().get(_WAIT_S)
        if wait_s is not None:
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = {int(1e3 * wait_s)}")

    return engine


def _unless_in(url: sa.URL, **defaults: object) -> dict[str, object]:
    """Driver arguments that the URL does not give itself."""
    return {key: value for key, value in defaults.items() if key not in url.query}
