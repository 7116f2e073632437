"""Migration of a database to the tables of this version, by Alembic."""

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
_ADVISORY_LOCK = 0x7061636C  # "pacl"
_alembic = threading.Lock()  # its context is a global of the process


class NewerDatabaseError(Exception):
    """The database has a revision that this version does not know; the text is that revision."""


def config(connection: sa.Connection | None = None) -> Config:
    """Alembic's configuration.

    Args:
        connection: in whose transaction migrations run; who passes it commits.
    """
    wheel, tree = _PACKAGE / "_migrations", _PACKAGE.parents[1] / "migrations"
    made = Config()
    made.set_main_option(
        "script_location", str(wheel if wheel.exists() else tree).replace("%", "%%")
    )
    made.attributes["connection"] = connection
    return made


def to_head(engine: sa.Engine, writer: sa.Engine) -> None:
    """Migrates; does nothing, and takes no lock, at head.

    Args:
        engine: for reading.
        writer: the same database, for transactions that write.

    Raises:
        NewerDatabaseError: nothing was changed.
    """
    with engine.connect() as connection:
        if _at_head(connection):
            return
    with _alembic, _alone(writer) as connection:
        if _at_head(connection):
            return
        command.upgrade(config(connection), "head")


def revision(connection: sa.Connection) -> str | None:
    """The revision of a database; None: it has no tables yet."""
    return MigrationContext.configure(connection).get_current_revision()


def head() -> str:
    """Return the revision that this version migrates to."""
    return str(_scripts().get_current_head())


@functools.cache
def _scripts() -> ScriptDirectory:
    """The revisions. Alembic executes all their files when it is asked for the first time."""
    return ScriptDirectory.from_config(config())


def _at_head(connection: sa.Connection) -> bool:
    scripts = _scripts()
    known = {revision.revision for revision in scripts.walk_revisions()}
    current = set(MigrationContext.configure(connection).get_current_heads())
    if unknown := current - known:
        raise NewerDatabaseError(", ".join(sorted(unknown)))
    return current == set(scripts.get_heads())


@contextmanager
def _alone(writer: sa.Engine) -> Iterator[sa.Connection]:
    """A transaction that no other process migrates beside."""
    if writer.dialect.name != "sqlite":
        with writer.begin() as connection:
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
            yield connection
        return
    # WAL is a lasting property of the file. Two processes that turn it on at once do not wait for
    # each other, whatever the busy timeout: so lock the directory (the file's locks are SQLite's).
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
