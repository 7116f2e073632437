"""Rows that no release stores any more, in a database of an older one: readers go on without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import sqlalchemy as sa

from paceline.core.emulation import Emulation
from paceline.wire import Segment
from paceline.wire.parts import digest
from paceline_backend.insight.replay import replay
from paceline_backend.planning.load import load
from paceline_backend.store import Store, new_runs, runs, schema
from paceline_backend.store.new_runs import NewRun
from support import poison
from support.forecasts import Training, drawn
from support.records import hello, record
from support.web import serving

pytestmark = pytest.mark.timeout(400)  # forecasts have a low priority
ROUTES = (
    "",
    "/view",
    "/workers",
    "/steps",
    "/worker-steps",
    "/segments",
    "/coasts",
    "/rounds",
    "/synchronisation",
    "/coverage",
    "/report",
    "/attribution",
    "/whatif",
)


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store.open(database_url) as opened:
        yield opened


@pytest.fixture
def run(store: Store) -> str:
    """A run of two ranks and some 40 steps."""
    training = Training(drawn(400, 0.5), Emulation([1e-5, 2e-5], [0.001, 0.001]), global_batch=16)
    training.train(40)
    with store.write() as connection:
        new = NewRun("old", "train.py", 2, "bsp", {})
        made = new_runs.create(connection, new, by="test")
    training.store(store, made)
    return made


def key_of(store: Store, run: str) -> int:
    with store.read() as connection:
        return runs.key_of(connection, run)


def insert_records(store: Store, run: int) -> None:
    """Records of ranks and steps that there are not."""
    rows = [
        {"run": run} | msgspec.structs.asdict(record(step, rank, segment=step // 4))
        for step, rank in [(38, 2), (39, 2), (39, -1), (39, 2**31 - 1), (-4, 0), (-4, 1), (60, 7)]
    ]
    with store.write() as connection:
        connection.execute(sa.insert(schema.worker_steps), rows)


def insert_segments(store: Store, run: int) -> int:
    """Segments that cannot be used, after those that ran; how many."""
    bodies = poison.bodies()
    rows = [
        {
            "run": run,
            "attempt": 0,
            "seq": 1_000 + k,
            "epoch": 0,
            "first_step": 34 + k % 4,
            "steps": 2,
            "policy": "bsp",
            "version": 0,
            "source": "controller",
            "moved": 0,
            "plan_s": 0.0,
            "adopted_at": 1.0,
            "body": body,
            "synchroniser": "hierarchical",
        }
        for k, body in enumerate(bodies.values())
    ]
    with store.write() as connection:
        connection.execute(sa.insert(schema.segments), rows)
    return len(rows)


def answers(client: httpx.Client, run: str) -> dict[str, int]:
    """Status of each route that reads a run."""
    return {
        route: client.get(f"/api/v1/runs/{run}{route}", timeout=300).status_code for route in ROUTES
    }


def test_routes_answer_in_spite_of_ranks_and_steps_that_there_are_not(
    store: Store, run: str, bus_url: str
) -> None:
    with serving(store, bus_url) as client:
        covered = client.get(f"/api/v1/runs/{run}/coverage").json()
        insert_records(store, key_of(store, run))
        assert set(answers(client, run).values()) == {200}
        assert client.get(f"/api/v1/runs/{run}/coverage").json() == covered
        report = client.get(f"/api/v1/runs/{run}/report").json()
        assert len(report["fluid"]["a_s"]) == 2


def test_routes_answer_in_spite_of_segments_that_cannot_be_used(
    store: Store, run: str, bus_url: str
) -> None:
    with serving(store, bus_url) as client:
        covered = client.get(f"/api/v1/runs/{run}/coverage").json()
        assert insert_segments(store, key_of(store, run)) > 30
        assert set(answers(client, run).values()) == {200}
        assert client.get(f"/api/v1/runs/{run}/coverage").json() == covered


def test_routes_answer_in_spite_of_a_hello_that_cannot_be_used(
    store: Store, run: str, bus_url: str
) -> None:
    changes: list[dict[str, Any]] = [{"world": 0}, {"sizes": b"123"}, {"global_batch": 0}]
    with serving(store, bus_url) as client:
        for change in changes:
            body = msgspec.msgpack.encode(hello(**change))
            with store.write() as connection:
                name = digest(body)
                connection.execute(sa.update(schema.hello_parts).values(hello=name, data=body))
                connection.execute(sa.update(schema.runs).values(hello=name))
            assert set(answers(client, run).values()) == {200}, change


def test_history_and_replay_go_on_without_rows_that_cannot_be_used(store: Store, run: str) -> None:
    key = key_of(store, run)
    before = replay(store, run)
    insert_records(store, key)
    insert_segments(store, key)
    assert replay(store, run) == before
    with store.read() as connection:
        loaded = load(connection, key)
    assert loaded is not None
    state, window = loaded
    assert not state.lost
    assert window.newest >= 39
    assert {len(rows) for rows in window._rows.values()} == {2}


def test_some_segments_are_read_by_types_alone() -> None:
    """Else the tests above would show nothing."""
    read = 0
    for body in poison.bodies().values():
        try:
            msgspec.msgpack.decode(body, type=Segment)
        except (ValueError, RecursionError):
            continue
        read += 1
    assert read > 20
