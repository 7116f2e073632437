"""Opening a database, its transactions, and what its errors become."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from paceline_backend.store import (
    Store,
    StoreRefusedError,
    meta,
    schema,
)
from support.records import add_run
from support.waiting import DEADLINE_S


def test_plain_postgresql_url_is_enough(database_url: str) -> None:
    with Store.open(database_url.replace("+psycopg", "")) as store, store.read() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(schema.runs)).scalar() == 0


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
        tag = {"run": 999, "tag": "mine"}
        with pytest.raises(StoreRefusedError), store.write() as connection:
            connection.execute(sa.insert(schema.run_tags).values(tag))


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


@pytest.mark.parametrize("read", [meta.secret, meta.control_id])
def test_processes_that_open_a_new_database_at_once_have_one_secret_and_id(
    database_url: str, monkeypatch: pytest.MonkeyPatch, read: Callable[[Store], bytes | str]
) -> None:
    """Both find none, and store one: that of the first counts for both."""
    write, found_none, values = Store.write, threading.Barrier(2), []

    def write_together(store: Store) -> Any:
        found_none.wait(DEADLINE_S)
        return write(store)

    def open_and_read() -> None:
        with Store.open(database_url) as store:
            values.append(read(store))

    with Store.open(database_url):
        pass  # its tables are there
    with monkeypatch.context() as patched:
        patched.setattr(Store, "write", write_together)
        threads = [threading.Thread(target=open_and_read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with Store.open(database_url) as store:
        assert values == [read(store)] * 2
