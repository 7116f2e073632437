"""Migrations make the declared tables, also when several processes do it at once."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy.schema import CreateIndex, CreateTable

from paceline_backend.store import Store, StoreError, schema
from paceline_backend.store import migrate as _migrate
from support.waiting import DEADLINE_S

OPEN = """
import sys
from paceline_backend.store import Store
print("ready", flush=True)
sys.stdin.readline()
Store.open(sys.argv[1]).close()
"""


@pytest.fixture
def database_url(empty_database_url: str) -> str:
    return empty_database_url


def _differences(store: Store) -> list[object]:
    with store.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, schema.metadata))


def _tables(store: Store) -> set[str]:
    with store.read() as connection:
        return set(sa.inspect(connection).get_table_names())


def test_migrations_reproduce_the_declared_schema(database_url: str) -> None:
    with Store(database_url) as store:
        with store.write() as connection:
            command.upgrade(_migrate.config(connection), "head")
        assert _differences(store) == []
        assert _tables(store) == set(schema.metadata.tables) | {"alembic_version"}


def test_migrated_sqlite_is_the_declared_schema_in_all_details(tmp_path: Path) -> None:
    """What Alembic does not compare: WITHOUT ROWID, ON DELETE, key and column order, defaults."""

    def details(engine: sa.Engine) -> dict[str, list[Any]]:
        tables = {}
        with engine.connect() as connection:
            run = connection.exec_driver_sql
            for (name,) in run("SELECT name FROM sqlite_master WHERE type = 'table'").all():
                tables[name] = [
                    run(f"PRAGMA {what}({name})").all()
                    for what in ("table_list", "table_xinfo", "foreign_key_list")
                ]
                indexes = run(f"PRAGMA index_list({name})").all()
                tables[name].append(sorted(tuple(index)[1:] for index in indexes))  # of any order
            indexes = run("SELECT name, sql FROM sqlite_master WHERE type = 'index'").all()
        tables.pop("alembic_version", None)
        return tables | {name: [sql] for name, sql in indexes if "alembic" not in name}

    with (
        Store(f"sqlite:///{tmp_path / 'declared.db'}") as declared,
        Store(f"sqlite:///{tmp_path / 'migrated.db'}") as migrated,
    ):
        with declared.write() as connection:
            schema.metadata.create_all(connection)
        with migrated.write() as connection:
            command.upgrade(_migrate.config(connection), "head")
        assert details(migrated.engine) == details(declared.engine)


def test_failed_migration_leaves_nothing(database_url: str) -> None:
    with Store(database_url) as store:
        with store.write() as connection:
            connection.execute(sa.text("CREATE TABLE steps (mine INTEGER)"))
        with pytest.raises(StoreError, match="steps"):
            Store.open(database_url)
        assert _tables(store) == {"steps"}


@pytest.mark.parametrize("revision", ["0001", "9999"])
def test_database_of_another_version_is_refused(database_url: str, revision: str) -> None:
    with Store.open(database_url) as store:
        with store.write() as connection:
            connection.execute(
                sa.text("UPDATE alembic_version SET version_num = :revision"),
                {"revision": revision},
            )
        with pytest.raises(StoreError, match=rf"\(revision {revision}, .* with a new data folder"):
            Store.open(database_url)
        assert _differences(store) == []


def fingerprint(metadata: sa.MetaData, *statements: str) -> str:
    """Return 12 hexadecimal digits that any change of tables or statements changes.

    It covers the DDL for SQLite and for Postgres. `statements` run after the tables are created.
    """
    ddl = list(statements)
    for url in ("sqlite://", "postgresql+psycopg://"):
        dialect = sa.make_url(url).get_dialect()()
        for table in sorted(metadata.tables.values(), key=lambda table: table.name):
            ddl.append(str(CreateTable(table).compile(dialect=dialect)))
            indexes = (CreateIndex(index).compile(dialect=dialect) for index in table.indexes)
            ddl += sorted(map(str, indexes))
    return hashlib.sha256("\n".join(ddl).encode()).hexdigest()[:12]


def test_any_change_of_the_tables_changes_the_revision() -> None:
    def declared(*columns: sa.Column[Any], **options: Any) -> str:
        metadata = sa.MetaData()
        sa.Table("other", metadata, sa.Column("key", sa.Integer, primary_key=True))
        sa.Table("t", metadata, sa.Column("id", sa.Integer, primary_key=True), *columns, **options)
        return fingerprint(metadata)

    def column(kind: Any = sa.Integer, *extra: Any, name: str = "a", **options: Any) -> str:
        return declared(sa.Column(name, kind, *extra, **options))

    others = [
        declared(),
        column(name="b"),
        column(sa.BigInteger),
        column(sa.BigInteger().with_variant(sa.Integer, "sqlite")),  # differs in Postgres alone
        column(nullable=False),
        column(unique=True),
        column(index=True),
        column(server_default="0"),
        column(sa.Integer, sa.ForeignKey("other.key")),
        column(sa.Integer, sa.ForeignKey("other.key", ondelete="CASCADE")),
        declared(sa.Column("a", sa.Integer), sqlite_with_rowid=False),
        declared(sa.Column("a", sa.Integer), sa.Column("b", sa.Integer)),
        declared(sa.Column("b", sa.Integer), sa.Column("a", sa.Integer)),
    ]
    assert column() == column()
    assert len({column(), *others}) == 1 + len(others)


def test_the_revision_is_the_fingerprint_of_the_tables() -> None:
    """After a change of the tables, write the new fingerprint into the baseline."""
    [baseline] = _migrate._scripts().walk_revisions()
    assert baseline.revision == fingerprint(schema.metadata, *baseline.module.POSTGRES)


def test_processes_that_open_at_once_wait_for_each_other(database_url: str) -> None:
    openers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", OPEN, database_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for opener in openers:
        assert opener.stdout is not None
        assert opener.stdout.readline() == "ready\n"
    for opener in openers:
        assert opener.stdin is not None
        opener.stdin.write("\n")
        opener.stdin.flush()
    assert [
        (opener.communicate(timeout=DEADLINE_S)[1], opener.returncode) for opener in openers
    ] == [("", 0)] * 2
    with Store.open(database_url) as store:
        assert _differences(store) == []


def test_threads_that_open_at_once_wait_for_each_other(database_url: str) -> None:
    with ThreadPoolExecutor(4) as threads:
        for store in threads.map(Store.open, [database_url] * 4):
            store.close()
