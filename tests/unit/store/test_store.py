"""Opening a database: URLs and files that are refused, and how SQLite is set up."""

from __future__ import annotations

import socket
import sqlite3
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
    with pytest.raises(StoreUnavailableError, match=r"missing/x\.db.*check that its directory"):
        Store.open(f"sqlite:///{tmp_path}/missing/x.db")
    with pytest.raises(StoreUnavailableError, match=r"file/x\.db.*check that its directory"):
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


def test_errors_of_statements_that_bypass_sqlalchemy_are_translated(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'x.db'}") as store:
        for statement, error in {
            "INSERT INTO steps (run, step) VALUES (1, 1)": StoreRefusedError,
            "SELECT * FROM nothing": StoreUnavailableError,
        }.items():
            with pytest.raises(StoreError) as caught, store.write() as connection:
                driver = connection.connection.driver_connection
                assert driver is not None
                driver.execute(statement)
            assert type(caught.value) is error
