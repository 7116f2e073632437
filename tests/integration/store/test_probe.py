"""Whether the database takes writes: asked by a write."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from paceline_backend.store import Store, StoreUnavailableError, schema
from paceline_backend.store.meta import Probe
from support.disks import SmallDisk
from support.records import add_run


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "paceline.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{path}") as opened:
        add_run(opened, "r")
        yield opened


def reads(store: Store) -> list[str]:
    with store.read() as connection:
        return [row.id for row in connection.execute(sa.select(schema.runs.c.id))]


def test_it_writes(database_url: str) -> None:
    with Store.open(database_url) as store:
        assert Probe(store).error() is None
        query = sa.select(schema.meta.c.value).where(schema.meta.c.name == "probe")
        with store.read() as connection:
            assert float(connection.execute(query).scalar_one()) > 0


def test_a_database_that_may_only_be_read(database_url: str) -> None:
    with Store.open(database_url) as store:
        add_run(store, "r")
        read_only = (
            "PRAGMA query_only = ON"
            if store.is_sqlite
            else "SET default_transaction_read_only = on"
        )

        @sa.event.listens_for(store.engine, "checkout")
        def forbid(connection: sqlite3.Connection, *_: object) -> None:
            connection.cursor().execute(read_only)
            if not store.is_sqlite:
                connection.commit()

        assert reads(store) == ["r"]
        assert "read" in str(Probe(store).error())


def test_a_full_disk(small_disk: SmallDisk) -> None:
    with Store.open(f"sqlite:///{small_disk.path / 'paceline.db'}") as store:
        probe = Probe(store, clock=Clock())
        assert probe.error() is None
        small_disk.fill()
        assert "full" in str(probe.error())
        assert reads(store) == []
        small_disk.empty()
        assert probe.error() is None


def test_another_writer_is_waited_for_no_longer_than_asked(store: Store, path: Path) -> None:
    probe = Probe(store, wait_s=0.05, clock=Clock())
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    assert "locked" in str(probe.error())
    other.execute("ROLLBACK")
    other.close()
    assert probe.error() is None
    with store.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 30_000


def test_frequent_questions_get_the_last_answer(store: Store, path: Path) -> None:
    now = 0.0
    probe = Probe(store, every_s=1.0, clock=lambda: now)
    assert probe.error() is None
    path.rename(path.with_suffix(".away"))
    now = 0.9
    assert probe.error() is None
    now = 1.0
    assert probe.error() is not None


def test_a_deleted_file_takes_nothing(store: Store, path: Path) -> None:
    """SQLite would go on, and all of it would be lost at the next start."""
    probe = Probe(store, clock=Clock())
    assert probe.error() is None
    path.rename(path.with_suffix(".away"))
    assert "its file was deleted" in str(probe.error())
    with pytest.raises(StoreUnavailableError, match="was deleted"):
        add_run(store, "s")
    with pytest.raises(StoreUnavailableError, match="was deleted"):
        reads(store)
    assert not path.exists(), "no empty database was made in its place"
    path.write_bytes(b"")
    with pytest.raises(StoreUnavailableError, match="was replaced"):
        reads(store)
    path.with_suffix(".away").rename(path)
    assert probe.error() is None
    assert reads(store) == ["r"]
