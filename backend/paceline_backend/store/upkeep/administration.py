"""Back up, restore and check a database, and replace the server's secret, for `paceline db`.

A backup is a copy of a database in use, made with SQLite's backup API or PostgreSQL's programs. A
check covers the file, its schema's revision, and whether roll-ups match the steps.

Keys, passwords on the bus and cookies are derived from the secret. `paceline db rotate-secret`
replaces it while no server runs. Agents keep their tokens, which are stored as hashes and do not
depend on the secret, and use them to get new keys. Two kinds of tokens depend on the secret and are
revoked here: the server's own token, and the tokens of runs.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa

from paceline.core.errors import PacelineError
from paceline.wire.states import ACTIVE
from paceline_backend.store import migrate, tokens
from paceline_backend.store.audit import Requester, record
from paceline_backend.store.database import Connection, Store
from paceline_backend.store.rollups.metrics import BLOCK
from paceline_backend.store.schema import meta, runs, step_rollups, steps


class BackupError(PacelineError):
    """A backup could not be made or restored."""


def backup(store: Store, file: Path) -> None:
    """Write a snapshot of the database to a new file that only its owner can read.

    Raises:
        BackupError: the file already exists, or the copy failed. A file with a failed copy is
            deleted.
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
    """Restore a `backup` file in one transaction: other processes see all of it or nothing.

    Raises:
        BackupError: the database has tables and `replace` is false, or the file is not a backup of
            the same kind of database.
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
        raise BackupError(f"{file} is damaged: use another backup")
    _copy(file, _path(store))


def _copy(source: Path, target: Path) -> None:
    try:
        with (
            closing(sqlite3.connect(f"file:{source.resolve()}?mode=ro", uri=True)) as read,
            closing(sqlite3.connect(target, timeout=30)) as written,
        ):
            # Copy all pages at once: otherwise, each commit of another process restarts the copy.
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
    """Run a program of PostgreSQL, with the password in its environment.

    Other users of the machine can read the arguments of a process, but not its environment.
    """
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


# Maximum number of reported faults of each kind.
_MOST_FAULTS = 20


def faults(store: Store) -> Iterator[str]:
    """Yield a description of each fault of the database; nothing if it has no fault."""
    with store.read() as connection:
        known, head = migrate.revision(connection), migrate.head()
        if known is None:
            yield "the database has no tables: run `paceline db upgrade`"
            return
        if known != head:
            yield (
                f"the database has the tables of another version of Paceline (revision {known}, "
                f"this version needs {head}): start with a new data folder or an empty database"
            )
            return
        if store.is_sqlite:
            yield from _file(connection)
        yield from _wrong_rollups(connection)


def _file(connection: sa.Connection) -> Iterator[str]:
    for (line,) in connection.exec_driver_sql(f"PRAGMA integrity_check({_MOST_FAULTS})"):
        if line != "ok":
            yield f"the file is damaged: {line}"
    orphans = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchmany(_MOST_FAULTS)
    for table, _, parent, _ in orphans:
        yield f"{table} has a row that refers to a missing row of {parent}"


def _wrong_rollups(connection: sa.Connection) -> Iterator[str]:
    s, r = steps.c, step_rollups.c
    block = (s.step - s.step % sa.literal_column(str(BLOCK))).label("block")
    row = (
        sa.select(s.run, block, sa.func.count().label("count"), sa.func.sum(s.step_s).label("sum"))
        .group_by(s.run, block)
        .subquery()
        .c
    )
    wrong = sa.or_(
        sa.func.coalesce(row.count, 0) != BLOCK,
        sa.func.abs(r.step_s_sum - row.sum) > 1e-9 * sa.func.abs(row.sum),
    )
    query = sa.select(r.run, r.step).select_from(
        step_rollups.outerjoin(row.run.table, (r.run == row.run) & (r.step == row.block))
    )
    for run, step in connection.execute(query.where(wrong).limit(_MOST_FAULTS)):
        yield f"the roll-up of the run with key {run} from step {step} on does not match its steps"


def active_runs(connection: Connection) -> list[str]:
    """Return the active runs. A new secret would disconnect them: ranks keep their old keys."""
    query = sa.select(runs.c.id).where(runs.c.state.in_(ACTIVE)).order_by(runs.c.key)
    return list(connection.execute(query).scalars())


def rotate_secret(store: Store, by: Requester) -> None:
    """Replace the secret and revoke the tokens that are derived from it."""
    with store.write() as connection:
        query = sa.update(meta).where(meta.c.name == "secret")
        connection.execute(query.values(value=secrets.token_hex(32)))
        tokens.revoke_derived(connection)
        record(connection, by, "secret.rotate")
