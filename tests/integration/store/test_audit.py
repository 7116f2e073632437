"""The audit log and runs' revisions."""

from __future__ import annotations

import threading

import pytest

from paceline_backend.store import Store, audit, runs
from paceline_backend.store.audit import RequestedChange, Requester, RevisionError
from support.records import add_run

ADA = Requester("ada", "operator", "10.0.0.7", "dashboard", "too slow")
BOB = Requester("bob", "admin")


@pytest.fixture
def store(store: Store) -> Store:
    add_run(store, "r")
    return store


def test_a_change_counts_the_revision_and_is_kept_with_who_and_why(store: Store) -> None:
    assert runs.get(store, "r")["revision"] == 0
    with store.write() as connection:
        details = {"policy": "chronica"}
        made = audit.record_change(connection, RequestedChange("r", ADA), "run.policy", details)
    assert made == runs.get(store, "r")["revision"] == 1
    with store.read() as connection:
        [row], following = audit.page(connection, audit.ChangeFilter("r"))
    assert following is None
    del row["at"], row["key"]
    assert row == {
        "who": "ada",
        "scope": "operator",
        "address": "10.0.0.7",
        "via": "dashboard",
        "why": "too slow",
        "action": "run.policy",
        "run": "r",
        "revision": 1,
        "target": "",
        "details": details,
    }


def test_who_comes_second_is_told_who_was_first(store: Store) -> None:
    with store.write() as connection:
        audit.record_change(connection, RequestedChange("r", ADA, expected=0), "run.stop")
    with pytest.raises(RevisionError) as raised, store.write() as connection:
        audit.record_change(connection, RequestedChange("r", BOB, expected=0), "run.policy")
    error = raised.value
    assert error.change is not None
    assert (error.revision, error.change["who"], error.change["action"]) == (1, "ada", "run.stop")
    assert "changed by ada (run.stop)" in str(error)
    with store.read() as connection:
        assert [row["who"] for row in audit.page(connection)[0]] == ["ada"]


def test_of_two_changes_at_once_one_passes(store: Store) -> None:
    outcomes: list[str] = []
    barrier = threading.Barrier(2)

    def change(by: Requester) -> None:
        barrier.wait()
        try:
            with store.write() as connection:
                audit.record_change(connection, RequestedChange("r", by, expected=0), "run.auto")
            outcomes.append("passed")
        except RevisionError:
            outcomes.append("refused")

    threads = [threading.Thread(target=change, args=(by,)) for by in (ADA, BOB)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["passed", "refused"]
    assert runs.get(store, "r")["revision"] == 1


def test_a_change_that_fails_leaves_no_row(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.write() as connection:
        audit.record_change(connection, RequestedChange("r", ADA), "run.policy")
        raise ZeroDivisionError
    assert runs.get(store, "r")["revision"] == 0
    with store.read() as connection:
        assert audit.page(connection) == ([], None)


def test_a_run_that_does_not_exist(store: Store) -> None:
    with pytest.raises(runs.UnknownRunError), store.write() as connection:
        audit.record_change(connection, RequestedChange("none", ADA, expected=0), "run.stop")


def test_pages_go_on_below_the_last_row(store: Store) -> None:
    with store.write() as connection:
        for number in range(5):
            audit.record(connection, ADA, "token.create", target=f"t{number}")
        audit.record(connection, BOB, "token.revoke", target="t0")
    by_ada = audit.ChangeFilter(who="ada")
    with store.write() as connection:
        first, cursor = audit.page(connection, by_ada, limit=3)
        assert cursor is not None
        audit.record(connection, ADA, "token.create", target="later")
        second, end = audit.page(connection, by_ada, limit=3, cursor=cursor)
        by_action, _ = audit.page(connection, audit.ChangeFilter(action="token.revoke"))
        none, _ = audit.page(connection, audit.ChangeFilter(since=first[0]["at"] + 3600))
    assert [row["target"] for row in [*first, *second]] == ["t4", "t3", "t2", "t1", "t0"]
    assert end is None
    assert [row["who"] for row in by_action] == ["bob"]
    assert none == []
    with pytest.raises(runs.CursorError), store.read() as connection:
        audit.page(connection, cursor="nonsense")
