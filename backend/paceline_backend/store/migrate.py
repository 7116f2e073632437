"""Create this version's tables with Alembic, and refuse a database whose tables differ.

Until release 1.0 there is one revision, the baseline. Its id changes with the declared tables, so a
database that another commit made is refused if its tables differ in any way.
"""

from __future__ import annotations

import fcntl
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

_PACKAGE = Path(__file__).parents[1]
# Number of the advisory lock in Postgres: the bytes of "pacl".
_ADVISORY_LOCK = 0x7061636C
# Lock for Alembic, because its context is a global variable of the process.
_alembic = threading.Lock()


class OtherTablesError(Exception):
    """The database has a revision that this version does not know; the text is that revision."""


def config(connection: sa.Connection | None = None) -> Config:
    """Return Alembic's configuration for migrations in the connection's transaction.

    The caller commits the transaction.
    """
    wheel, tree = _PACKAGE / "_migrations", _PACKAGE.parents[1] / "migrations"
    made = Config()
    made.set_main_option(
        "script_location", str(wheel if wheel.exists() else tree).replace("%", "%%")
    )
    made.attributes["connection"] = connection
    return made


def to_head(engine: sa.Engine, writer: sa.Engine) -> None:
    """Create the tables. If they exist already, take no lock and change nothing.

    `writer` is the same database as `engine`, for transactions that write.

    Raises:
        OtherTablesError: another version made the database; nothing was changed.
    """
    with engine.connect() as connection:
        if _at_head(connection):
            return
    with _alembic, _alone(writer) as connection:
        if _at_head(connection):
            return
        command.upgrade(config(connection), "head")


def revision(connection: sa.Connection) -> str | None:
    """Return the revision of a database; None if it has no tables yet."""
    return MigrationContext.configure(connection).get_current_revision()


def head() -> str:
    """Return the revision that this version migrates to."""
    return str(_scripts().get_current_head())


@functools.cache
def _scripts() -> ScriptDirectory:
    """Load the revisions once, because Alembic executes all their files to list them."""
    return ScriptDirectory.from_config(config())


def _at_head(connection: sa.Connection) -> bool:
    scripts = _scripts()
    known = {revision.revision for revision in scripts.walk_revisions()}
    current = set(MigrationContext.configure(connection).get_current_heads())
    if unknown := current - known:
        raise OtherTablesError(", ".join(sorted(unknown)))
    return current == set(scripts.get_heads())


@contextmanager
def _alone(writer: sa.Engine) -> Iterator[sa.Connection]:
    """Open a transaction that excludes migrations by other processes."""
    if writer.dialect.name != "sqlite":
        with writer.begin() as connection:
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
            yield connection
        return
    # Two processes that enable WAL mode at the same time do not wait for each other, even with a
    # busy timeout, so one of them would fail. Lock the directory, because SQLite itself uses locks
    # of the file.
    directory = os.open(Path(str(writer.url.database)).resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        with writer.connect() as plain:
            raw = plain.connection.driver_connection
            assert raw is not None
            raw.execute("PRAGMA journal_mode = WAL")
        with writer.begin() as connection:
            yield connection
    finally:
        os.close(directory)
