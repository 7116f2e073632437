"""Copy a database while it is in use, with SQLite's backup API or PostgreSQL's programs."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa

from paceline.core.errors import PacelineError
from paceline_backend.store.database import Store


class BackupError(PacelineError):
    """A backup could not be made or restored."""


def backup(store: Store, file: Path) -> None:
    """Write a snapshot of the database to a new file that only its owner can read.

    Raises:
        BackupError: the file exists, or the copy failed; then the file is deleted.
    """
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError as error:
        raise BackupError(f"{file} already exists: choose another file") from error
    except OSError as error:
        raise BackupError(f"cannot write {file}: {error.strerror}") from error
    try:
        if store.is_sqlite:
            _copy(_path(store), file)
        else:
            _postgres("pg_dump", store, "--format=custom", f"--file={file}")
    except BaseException:
        file.unlink()
        raise


def restore(store: Store, file: Path, *, replace: bool) -> None:
    """Restore a file of `backup` in one transaction, so that others see all of it or nothing.

    `replace` allows overwriting existing tables.

    Raises:
        BackupError: there are tables, or the file is no backup of a database of this kind.
    """
    if not file.is_file():
        raise BackupError(f"there is no file {file}")
    if not replace and _in_use(store):
        raise BackupError(f"database {store.name} has tables: use --replace to overwrite them")
    if not store.is_sqlite:
        options = ("--clean", "--if-exists", "--no-owner", "--single-transaction")
        _postgres("pg_restore", store, *options, str(file))
        return
    with closing(sqlite3.connect(f"file:{file.resolve()}?mode=ro", uri=True)) as source:
        try:
            whole = source.execute("PRAGMA quick_check").fetchone() == ("ok",)
            source.execute("SELECT version_num FROM alembic_version")
        except sqlite3.DatabaseError as error:
            raise BackupError(f"{file} is not a backup of a Paceline database: {error}") from error
    if not whole:
        raise BackupError(f"{file} is damaged")
    _copy(file, _path(store))


def _copy(source: Path, target: Path) -> None:
    try:
        with (
            closing(sqlite3.connect(f"file:{source.resolve()}?mode=ro", uri=True)) as read,
            closing(sqlite3.connect(target, timeout=30)) as written,
        ):
            # All pages at once: in parts, each commit of another process would restart the copy.
            read.backup(written, pages=-1)
    except sqlite3.Error as error:
        raise BackupError(f"cannot copy {source} to {target}: {error}") from error


def _path(store: Store) -> Path:
    return Path(str(store.url.database))


def _in_use(store: Store) -> bool:
    if store.is_sqlite and not _path(store).exists():
        return False
    with store.read() as connection:
        return "alembic_version" in sa.inspect(connection).get_table_names()


def _postgres(program: str, store: Store, *options: str) -> None:
    """Run a program of PostgreSQL; it gets the password in the environment, which is private."""
    path = shutil.which(program)
    if path is None:
        raise BackupError(
            f"{program} is not installed: install PostgreSQL's client (postgresql-client) "
            "of the server's version or newer"
        )
    url = store.url.set(drivername="postgresql", password=None)
    name = url._replace(password=None).render_as_string(hide_password=False)
    env = dict(os.environ)
    if store.url.password is not None:
        env["PGPASSWORD"] = str(store.url.password)
    done = subprocess.run(
        [path, f"--dbname={name}", "--no-password", *options],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BackupError(f"{program} failed: {done.stderr.strip()}")
