"""One database: how it is opened, its two kinds of transactions, what its errors mean."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.pool import ConnectionPoolEntry

from paceline.core.errors import PacelineError
from paceline_backend.store import migrate as _migrate

Connection = sa.Connection  # what `Store.read` and `Store.write` give

_BUSY_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 5
_WRITES = "paceline_writes"  # execution option: the transaction will write


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

    @classmethod
    def open(cls, url: str) -> Store:
        """A store migrated to this release's tables; several processes may do this at once.

        Raises:
            StoreError: not a usable URL, or the database is from a newer release.
            StoreUnavailableError: it cannot be reached, opened or written.
        """
        store = cls(url)
        try:
            with store._translated():
                _migrate.to_head(store.engine, store._writer)
        except _migrate.NewerDatabaseError as error:
            store.close()
            raise StoreError(
                f"database {store.name} is from a newer release (revision {error}); "
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
        with self._translated(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction that writes; committed at its end, rolled back when the block raises.

        Raises:
            StoreError: or one of its kinds.
        """
        with self._translated(), self._writer.begin() as connection:
            yield connection

    def close(self) -> None:
        """Closes all connections."""
        self.engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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


def insert(connection: sa.Connection, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT of the connection's dialect, which knows ON CONFLICT."""
    is_sqlite = connection.dialect.name == "sqlite"
    return sqlite.insert(table) if is_sqlite else postgresql.insert(table)


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
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _postgres_engine(url: sa.URL) -> sa.Engine:
    return sa.create_engine(
        url,
        connect_args=_unless_in(
            url, application_name="paceline", connect_timeout=_CONNECT_TIMEOUT_S
        ),
        pool_size=10,
        max_overflow=40,
        pool_pre_ping=True,  # a restarted server costs no failed call
    )


def _unless_in(url: sa.URL, **defaults: object) -> dict[str, object]:
    """Driver arguments that the URL does not give itself."""
    return {key: value for key, value in defaults.items() if key not in url.query}
