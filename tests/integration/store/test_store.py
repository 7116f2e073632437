"""Opening a database, its transactions, and what its errors become."""

from __future__ import annotations

import socket
import sqlite3
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from paceline_backend.store import (
    Store,
    StoreError,
    StoreRefusedError,
    StoreUnavailableError,
    schema,
)
from support.records import add_run


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("no url at all", "sqlite:///path or"),
        ("mysql://me:secret@host/db", r"mysql://me:\*\*\*@host/db: only sqlite"),
        ("sqlite://", "must be a file"),
        ("sqlite:///:memory:", "must be a file"),
    ],
)
def test_unusable_urls_are_refused(url: str, says: str) -> None:
    with pytest.raises(StoreError, match=says):
        Store.open(url)


def test_path_that_cannot_be_opened(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("this is text, and long enough to be mistaken for a database header" * 9)
    with pytest.raises(StoreUnavailableError, match=r"missing/x\.db.*does its directory exist"):
        Store.open(f"sqlite:///{tmp_path}/missing/x.db")
    with pytest.raises(StoreUnavailableError, match=r"file/x\.db.*does its directory exist"):
        Store.open(f"sqlite:///{file}/x.db")
    with pytest.raises(StoreError, match=r"/file: file is not a database"):
        Store.open(f"sqlite:///{file}")


def test_unreachable_postgres_names_it_without_the_password() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"postgresql://me:secret@127.0.0.1:{probe.getsockname()[1]}/db"
        with pytest.raises(StoreUnavailableError, match=r"me:\*\*\*@127") as caught:
            Store.open(url)
    assert "secret" not in str(caught.value)


def test_plain_postgresql_url_is_enough(database_url: str) -> None:
    with Store.open(database_url.replace("+psycopg", "")) as store, store.read() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(schema.runs)).scalar() == 0


def test_sqlite_is_set_up_for_several_processes(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'x.db'}") as store, store.read() as connection:
        settings = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert settings == {
        "journal_mode": "wal",
        "synchronous": 1,
        "foreign_keys": 1,
        "busy_timeout": 30_000,
    }


def test_write_commits_and_a_raising_block_rolls_back(database_url: str) -> None:
    with Store.open(database_url) as store:
        add_run(store, "kept")
        with pytest.raises(RuntimeError), store.write() as connection:
            connection.execute(sa.update(schema.runs).values(name="changed"))
            raise RuntimeError
        with store.read() as connection:
            assert connection.execute(sa.select(schema.runs.c.name)).scalar() == "kept"


def test_values_that_a_database_refuses(database_url: str) -> None:
    with Store.open(database_url) as store:
        add_run(store, "r")
        with pytest.raises(StoreRefusedError):
            add_run(store, "r")
        with pytest.raises(StoreRefusedError):
            add_run(store, "s", dropped=2**63)
        lease = {"run": 999, "owner": "me", "expires_at": 0.0}
        with pytest.raises(StoreRefusedError), store.write() as connection:
            connection.execute(sa.insert(schema.leases).values(lease))


def test_writers_that_read_first_take_turns(database_url: str) -> None:
    """A reader that turns writer would fail at once on SQLite, and lose counts."""
    with Store.open(database_url) as store:
        add_run(store, "r")
        errors: list[BaseException] = []

        def count() -> None:
            try:
                for _ in range(20):
                    with store.write() as connection:
                        query = sa.select(schema.runs.c.dropped).with_for_update()
                        dropped = connection.execute(query).scalar_one()
                        connection.execute(sa.update(schema.runs).values(dropped=dropped + 1))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=count) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        with store.read() as connection:
            assert connection.execute(sa.select(schema.runs.c.dropped)).scalar() == 60


def test_locked_sqlite_is_unavailable_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with Store.open(f"sqlite:///{path}?timeout=0.05") as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match="locked"):
            add_run(store, "r")
        with store.read() as connection:  # readers do not wait for writers
            assert connection.execute(sa.select(schema.runs.c.id)).all() == []
        other.execute("ROLLBACK")
        other.close()
        add_run(store, "r")
