"""`paceline db`, and what stays of runs that are over."""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from paceline.wire import StepBatch
from paceline_backend.control import upkeep
from paceline_backend.store import Store, new_runs, runs, schema, telemetry
from paceline_backend.store.audit import RequestedChange, Requester, record_change
from paceline_backend.store.schema import step_rollups, verdicts
from paceline_backend.store.upkeep import prune as pruning
from paceline_backend.store.upkeep.prune import Keep, prune
from support.command_line import Main, in_process
from support.records import add_run, adopted, hello, record

DAY = 86_400.0


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    monkeypatch.delenv("PACELINE_DATABASE", raising=False)
    return in_process(monkeypatch, capsys)


def url_of(store: Store) -> str:
    return store.url.render_as_string(hide_password=False)


def a_run(store: Store, run: str, ended_days_ago: float | None, steps: int = 120) -> int:
    """A run with rows in several tables; None: it still trains."""
    over = ended_days_ago is not None
    key = add_run(
        store,
        run,
        state="finished" if over else "running",
        ended_at=time.time() - ended_days_ago * DAY if ended_days_ago is not None else None,
    )
    rows = StepBatch([record(step, rank) for step in range(steps) for rank in (0, 1)])
    messages: list[Any] = [hello(), adopted(0, 0), rows]
    telemetry.write(store, [(run, message) for message in messages])
    return key


def ids(store: Store) -> set[str]:
    return {row["id"] for row in runs.page(store)[0]}


def rows_of(store: Store, key: int) -> int:
    with store.read() as connection:
        return sum(
            connection.execute(
                sa.select(sa.func.count()).select_from(table).where(table.c.run == key)
            ).scalar_one()
            for table in schema.metadata.sorted_tables
            if "run" in table.c and isinstance(table.c.run.type, sa.BigInteger)
        )


def judge_all(store: Store) -> None:
    """A verdict of each run; such rows name runs by their public ids and outlast them."""
    with store.write() as connection:
        for run in ids(store):
            row = {"run": run, "at": 0.0, "until": 1.0, "workers": 2, "nodes": {}, "body": {}}
            connection.execute(sa.insert(verdicts).values(row))


def pruned(store: Store, **keep: Any) -> list[str]:
    return list(prune(store, Keep(**keep), lambda _: False))


def test_runs_beyond_an_age_go_with_all_their_rows(store: Store) -> None:
    old = a_run(store, "old", 40.0)
    newer, training = a_run(store, "newer", 20.0), a_run(store, "training", None)
    judge_all(store)
    kept = rows_of(store, newer), rows_of(store, training)
    assert rows_of(store, old) > 0
    assert pruned(store, days=30.0) == ["old"]
    assert ids(store) == {"newer", "training"}
    assert (rows_of(store, old), rows_of(store, newer), rows_of(store, training)) == (0, *kept)


def test_runs_beyond_a_number_go_oldest_first(store: Store) -> None:
    for days in (3.0, 1.0, 4.0, 2.0):
        a_run(store, f"{days:g}", days)
    a_run(store, "training", None)
    assert pruned(store, runs=2) == ["4", "3"]
    assert ids(store) == {"1", "2", "training"}
    assert pruned(store, runs=0) == ["2", "1"], "a run that trains is never deleted"


def test_runs_go_until_the_rows_take_no_more(store: Store) -> None:
    for days in (3.0, 2.0, 1.0):
        a_run(store, f"{days:g}", days, steps=5_000)
    if not store.is_sqlite:
        with store.write() as connection:
            connection.execute(sa.text("SELECT pg_stat_force_next_flush()"))
    with store.read() as connection:
        before = pruning.used_bytes(connection)
    assert before > 3_000_000
    assert pruned(store, bytes=before * 5 // 6) == ["3"]
    with store.read() as connection:
        assert pruning.used_bytes(connection) < before * 5 // 6
    assert pruned(store, bytes=before) == []


def test_what_is_being_deleted_is_hidden_and_deleted_in_the_end(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "_ROWS_PER_DELETE", 50)
    key = a_run(store, "old", 40.0)
    before = rows_of(store, key)
    pauses = iter([False, False, True])
    assert list(prune(store, Keep(days=30.0), lambda _: next(pauses))) == []
    assert 0 < rows_of(store, key) < before
    assert ids(store) == set()
    with pytest.raises(runs.UnknownRunError):
        runs.get(store, "old")
    written = telemetry.write(store, [("old", StepBatch([record(500, 0)]))])
    assert written.unknown == {"old"}, "nothing comes back"
    assert pruned(store, days=1_000.0) == ["old"]
    assert rows_of(store, key) == 0


def test_a_run_that_goes_on_meanwhile_is_not_deleted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = a_run(store, "old", 40.0)
    before, chooses = rows_of(store, key), pruning.next_run

    def resumed_then(store: Store, keep: Keep) -> tuple[int, str] | None:
        chosen = chooses(store, keep)
        if chosen is not None:
            with store.write() as connection:
                new_runs.resume(connection, "old", new_runs.stored(connection, "old")[0])
        return chosen

    monkeypatch.setattr(pruning, "next_run", resumed_then)
    assert pruned(store, days=30.0) == []
    assert (ids(store), rows_of(store, key)) == ({"old"}, before)


def test_a_run_that_is_being_deleted_does_not_go_on(store: Store) -> None:
    a_run(store, "old", 40.0)
    assert list(prune(store, Keep(days=30.0), lambda _: True)) == []
    with store.write() as connection:
        with pytest.raises(runs.UnknownRunError):
            new_runs.stored(connection, "old")
        with pytest.raises(runs.UnknownRunError):
            record_change(connection, RequestedChange("old", Requester("me")), "run.resume")


def test_others_write_while_a_run_is_deleted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause comes after each few rows, with no transaction open: another may write there."""
    monkeypatch.setattr(pruning, "_ROWS_PER_DELETE", 50)
    a_run(store, "old", 40.0)
    a_run(store, "training", None)
    written = []

    def pause(_: float) -> bool:
        step = 1_000 + len(written)
        batch = StepBatch([record(step, 0), record(step, 1)])
        written.append(telemetry.write(store, [("training", batch)]).rows)
        return False

    assert list(prune(store, Keep(days=30.0), pause)) == ["old"]
    assert len(written) > 5
    assert set(written) == {2}


def test_few_long_rows_go_at_once(store: Store) -> None:
    key = a_run(store, "old", 40.0)
    segments = schema.segments
    telemetry.write(store, [("old", adopted(number, number)) for number in range(1, 120)])
    count = sa.select(sa.func.count()).select_from(segments).where(segments.c.run == key)
    left = [120]

    def pause(_: float) -> bool:
        with store.read() as connection:
            left.append(connection.execute(count).scalar_one())
        return False

    assert list(prune(store, Keep(days=30.0), pause)) == ["old"]
    assert sorted(set(left)) == [0, 20, 70, 120]


def test_the_worker_deletes_one_run_at_a_look_for_its_bytes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "used_bytes", lambda _: 2**40)  # it never hears of what is gone
    for days in (3.0, 2.0, 1.0):
        a_run(store, f"{days:g}", days)

    upkeep.prune_runs(store, Keep(bytes=10), threading.Event())
    assert ids(store) == {"2", "1"}


def test_prune_wants_a_limit(main: Main, store: Store) -> None:
    a_run(store, "old", 40.0)
    assert main("db", "prune", "--database", url_of(store))[0] == 2
    code, out, _ = main("db", "prune", "--database", url_of(store), "--keep-days", "30")
    assert (code, out.splitlines()[0]) == (0, "deleted old")
    assert ids(store) == set()
    where = ("--database", url_of(store), "--json")
    a_run(store, "other", 40.0)
    code, out, _ = main("db", "prune", *where, "--keep-days", "30")
    answer = json.loads(out)
    assert (code, answer["deleted"], answer["bytes"] >= 0) == (0, ["other"], True)
    assert json.loads(main("db", "check", *where)[1]) == {"faults": []}


def test_check_finds_a_rollup_that_is_not_true(main: Main, store: Store) -> None:
    a_run(store, "r", 1.0)
    code, out, _ = main("db", "check", "--database", url_of(store))
    assert (code, out.rstrip().endswith("has no faults")) == (0, True)
    with store.write() as connection:
        connection.execute(sa.update(step_rollups).values(step_s_sum=17.0))
    code, out, _ = main("db", "check", "--database", url_of(store))
    assert code == 1
    assert "from step 0 on does not match its steps" in out


def test_upgrade(main: Main, tmp_path: Path) -> None:
    where = ("--data", str(tmp_path))
    assert main("db", "upgrade", *where)[0] == 0
    assert main("db", "check", *where)[0] == 0
    with sqlite3.connect(tmp_path / "paceline.db") as connection:
        connection.execute("DELETE FROM alembic_version")
    code, out, _ = main("db", "check", *where)
    assert code == 1
    assert "the database has no tables: run `paceline db upgrade`" in out
    with sqlite3.connect(tmp_path / "paceline.db") as connection:
        connection.execute("INSERT INTO alembic_version VALUES ('0001')")
    code, out, _ = main("db", "check", *where)
    assert code == 1
    assert "has the tables of another version of Paceline (revision 0001, this version needs" in out


def test_a_mistyped_name_makes_no_database(main: Main, tmp_path: Path) -> None:
    code, _, err = main("db", "check", "--data", str(tmp_path))
    assert (code, "there is no database" in err) == (3, True)
    assert not list(tmp_path.iterdir())


def test_backup_and_restore(main: Main, store: Store, tmp_path: Path) -> None:
    if not store.is_sqlite and shutil.which("pg_dump") is None:
        pytest.skip("pg_dump is not installed")
    where = ("--database", url_of(store))
    a_run(store, "kept", 1.0)
    copy = tmp_path / "copy"
    code, _, err = main("db", "backup", str(copy), *where)
    if "server version mismatch" in err:
        pytest.skip(err)
    assert code == 0, err
    assert copy.stat().st_mode & 0o777 == 0o600
    assert main("db", "backup", str(copy), *where)[0] == 3, "never over a file that is there"
    a_run(store, "later", 1.0)
    code, _, err = main("db", "restore", str(copy), *where)
    assert (code, "--replace" in err) == (3, True)
    code, _, err = main("db", "restore", str(copy), "--replace", *where)
    assert code == 0, err
    assert ids(store) == {"kept"}
    assert main("db", "check", *where)[0] == 0


def test_what_is_no_copy_is_not_restored(main: Main, tmp_path: Path) -> None:
    where = ("--database", f"sqlite:///{tmp_path / 'paceline.db'}")
    file = tmp_path / "file"
    file.write_bytes(b"something else" * 1_000)
    code, _, err = main("db", "restore", str(file), *where)
    assert (code, "is not a backup of a Paceline database" in err) == (3, True)


def test_without_the_programs_of_postgres_it_says_what_to_install(
    main: Main, _postgres: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = _postgres.database()
    Store.open(url).close()
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = main("db", "backup", str(tmp_path / "copy"), "--database", url)
    assert (code, "pg_dump is not installed" in err) == (3, True)
    assert not (tmp_path / "copy").exists()
