"""Leases: one owner at a time, also among real processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import sqlalchemy as sa

from paceline.node.processes import die_with_parent
from paceline_backend.control import leases
from paceline_backend.store import Store, runs, schema
from paceline_backend.store.leases import reap
from support.records import add_run
from support.waiting import DEADLINE_S, until


def owners(store: Store) -> dict[int, str]:
    with store.read() as connection:
        query = sa.select(schema.leases.c.run, schema.leases.c.owner)
        return {row.run: row.owner for row in connection.execute(query)}


def test_a_lease_has_one_owner(store: Store) -> None:
    run = add_run(store, "r")
    mine = leases.acquire(store, run, "me", 60)
    assert mine is not None
    assert mine.held()
    assert leases.acquire(store, run, "you", 60) is None
    assert leases.acquire(store, run, "me", 60) is not None, "its owner may take it again"
    leases.release(store, mine)
    assert not mine.held()
    assert leases.acquire(store, run, "you", 60) is not None
    leases.release(store, mine)
    assert owners(store) == {run: "you"}, "only the owner releases"


def test_who_plans_a_run_keeps_nobody_from_acting_for_its_jobs(store: Store) -> None:
    run = add_run(store, "r")
    plans, acts = leases.acquire(store, run, "me", 60), leases.acquire(store, run, "me", 60, "jobs")
    assert plans is not None
    assert acts is not None
    leases.release(store, plans)
    assert leases.acquire(store, run, "you", 60) is not None
    assert leases.acquire(store, run, "you", 60, "jobs") is None
    assert leases.extend(store, [acts], 60, "jobs") == []
    assert leases.extend(store, [plans], 60) == [plans]


def test_an_expired_lease_is_free(store: Store) -> None:
    run = add_run(store, "r")
    mine = leases.acquire(store, run, "me", 0.2)
    assert mine is not None
    yours = until(lambda: leases.acquire(store, run, "you", 60), "expiry")
    assert yours is not None
    assert not mine.held(), "the old owner stops believing in it before another can have it"
    assert leases.extend(store, [mine], 60) == [mine]
    assert not mine.held()
    assert owners(store) == {run: "you"}


def test_extension_keeps_it(store: Store) -> None:
    runs = [add_run(store, name) for name in "ab"]
    held = [leases.acquire(store, run, "me", 0.3) for run in runs]
    mine = [lease for lease in held if lease is not None]
    assert leases.extend(store, mine, 60) == []
    until(lambda: all(lease.held() for lease in mine), "extension")
    with store.read() as connection:
        before = connection.scalars(sa.select(schema.leases.c.expires_at)).all()
    assert leases.extend(store, mine[:1], 120) == []
    with store.read() as connection:
        query = sa.select(schema.leases.c.expires_at).order_by(schema.leases.c.run)
        after = connection.scalars(query).all()
    assert after[0] > before[0] + 50
    assert after[1] in before


def test_a_lease_is_shown_as_alive_by_the_databases_clock(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = add_run(store, "r")
    with store.write() as connection:
        row = {"purpose": "plan", "run": key, "owner": "me", "expires_at": 100.0}
        connection.execute(sa.insert(schema.leases).values(row))
    for now, alive in ((99.0, True), (101.0, False)):
        monkeypatch.setattr(runs, "now", lambda _, now=now: now)
        assert runs.get(store, "r")["controller"] == {"owner": "me", "alive": alive}


def test_reaping_deletes_what_ended_and_expired(store: Store) -> None:
    ended, live, expired = (
        add_run(store, name, state=state)
        for name, state in (("ended", "finished"), ("live", "finished"), ("expired", "running"))
    )
    leases.acquire(store, ended, "me", -1)
    leases.acquire(store, live, "me", 60)
    leases.acquire(store, expired, "me", -1)
    leases.acquire(store, ended, "me", -1, "jobs")
    assert reap(store) == 2
    assert set(owners(store)) == {live, expired}


_CONTENDER = """
import sys
from paceline_backend.control import leases
from paceline_backend.store import Store
database, owner, *runs = sys.argv[1:]
with Store.open(database) as store:
    print("ready", flush=True)
    sys.stdin.readline()
    for run in runs:
        if leases.acquire(store, int(run), owner, 60):
            print(run, flush=True)
"""


def test_processes_that_contend_share_the_runs_out(store: Store, database_url: str) -> None:
    runs = [add_run(store, f"r{i}") for i in range(40)]
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", _CONTENDER, database_url, f"owner-{i}", *map(str, runs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        for i in range(3)
    ]
    for contender in contenders:
        assert contender.stdout is not None
        assert contender.stdout.readline() == "ready\n"
    for contender in contenders:
        assert contender.stdin is not None
        contender.stdin.write("go\n")
        contender.stdin.flush()
    won = {}
    for i, contender in enumerate(contenders):
        output, _ = contender.communicate(timeout=DEADLINE_S)
        assert contender.returncode == 0
        for run in output.split():
            assert int(run) not in won, "two owners at once"
            won[int(run)] = f"owner-{i}"
    assert won == owners(store)
    assert set(won) == set(runs)
