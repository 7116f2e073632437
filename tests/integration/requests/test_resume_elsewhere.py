"""A run that goes on elsewhere: another backend, other numbers of nodes and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
import redis

from paceline.wire import Launch, State
from paceline_backend.backends import Job
from paceline_backend.control.engines import Engines
from paceline_backend.requests import enlist
from paceline_backend.store import Store, leases, runs, schema, tokens
from paceline_backend.store.upkeep.prune import Keep, prune
from support.engine import TableEngine, become, table_engine
from support.groups import answer, orders, report

BODY = {"script": "/shared/train.py", "nproc": 2}


@pytest.fixture(autouse=True)
def engine() -> Iterator[type[TableEngine]]:
    with table_engine() as made:
        yield made


@pytest.fixture
def worker(store: Store, bus_url: str) -> Engines:
    return Engines(store, "worker")


def begun(client: httpx.Client, **fields: Any) -> str:
    made = client.post("runs", json=BODY | fields)
    assert made.status_code == 201, made.text
    return str(made.json()["id"])


def resumed(client: httpx.Client, run: str, **fields: Any) -> dict[str, Any]:
    answered = client.post(f"runs/{run}/resume", json=fields)
    assert answered.status_code == 202, answered.text
    return dict(answered.json())


def refused(client: httpx.Client, run: str, status: int, **fields: Any) -> str:
    answered = client.post(f"runs/{run}/resume", json=fields)
    assert answered.status_code == status, answered.text
    return str(answered.json()["detail"])


def token_works(store: Store, token: str) -> bool:
    with store.read() as connection:
        holder = tokens.checked(connection, token)
    return holder is not None and holder.refused is None


def test_from_own_nodes_to_an_engine_and_back(
    client: httpx.Client, store: Store, bus: redis.Redis, bus_url: str, worker: Engines
) -> None:
    answer(store, "n1")
    run = begun(client)
    report(store, run, "n1", State.FAILED, exit_code=1, message="no space left")
    shown = resumed(client, run, backend="table", why="Table has more space")
    assert (shown["backend"], shown["node"], shown["first_attempt"]) == ("table", None, 1)
    assert shown["backend_options"] == {"server": str(client.base_url).split("/api")[0]}
    worker.look(bus)
    [order] = TableEngine.orders
    assert (order.run, order.nodes, order.nproc) == (run, 1, 2)
    answer(store, "e1", run=run)
    assert enlist(store, bus_url, run, "e1", "gpu7").needed
    [launch] = [each for each in orders(bus, "e1") if isinstance(each, Launch)]
    assert launch.attempt == 1
    report(store, run, "n1", State.STOPPED)  # of the launch before: it changes nothing
    report(store, run, "e1", State.FAILED, 1, exit_code=1)

    shown = resumed(client, run, backend="local")
    assert (shown["backend"], shown["backend_options"]) == ("local", None)
    assert (shown["backend_jobs"], shown["node"], shown["first_attempt"]) == (None, "n1", 2)
    assert [each.attempt for each in orders(bus, "n1") if isinstance(each, Launch)] == [0, 2]
    assert not token_works(store, order.token)
    changes = client.get("audit", params={"run": run, "action": "run.resume"}).json()["items"]
    assert [change["details"]["backend"] for change in changes] == ["local", "table"]
    assert changes[1]["why"] == "Table has more space"
    history = client.get("nodes/e1/history").json()["runs"]
    assert [each["run"] for each in history] == []  # a run on one node keeps its newest only


def test_what_is_left_in_the_queue_is_stopped(
    client: httpx.Client, store: Store, bus: redis.Redis, worker: Engines
) -> None:
    """The worker had not stopped the job when the run went elsewhere."""
    answer(store, "n1")
    run, other = begun(client, backend="table"), begun(client, backend="table")
    worker.look(bus)
    client.post(f"runs/{run}/stop")
    resumed(client, run, backend="local")
    worker._look_at.clear()
    worker.look(bus)
    assert [job.state for job in TableEngine.jobs.values()] == ["ended", "queued"]
    assert client.get(f"runs/{other}").json()["state"] == "queued"
    report(store, run, "n1", State.FAILED, exit_code=1)
    resumed(client, run, backend="table")
    worker._look_at.clear()
    worker.look(bus)
    assert len({order.label for order in TableEngine.orders}) == 3
    assert client.get(f"runs/{run}").json()["message"] == "waits as job 3 of Table"


@pytest.mark.parametrize("to", ["local", "table"])
def test_what_is_left_on_an_engine_that_was_away_is_stopped(
    client: httpx.Client, store: Store, bus: redis.Redis, bus_url: str, worker: Engines, to: str
) -> None:
    """Also once the run has ended elsewhere, and the control plane was started anew."""
    answer(store, "n1")
    with table_engine("far") as far:
        run = begun(client, backend="far")
        worker.look(bus)
        become("1", "running", of=far)
        far.away = True
        client.post(f"runs/{run}/stop")
        resumed(client, run, backend=to)
        if to == "local":
            report(store, run, "n1", State.FAILED, 1, exit_code=1)
        anew = Engines(store, "worker")
        anew.look(bus)
        assert [job.state for job in far.jobs.values()] == ["running"]
        far.away = False
        anew = Engines(store, "worker")
        anew.look(bus)
        assert [job.state for job in far.jobs.values()] == ["ended"]
        assert [job.state for job in TableEngine.jobs.values()] == ["queued"] * (to == "table")
        assert marked(store) == {("far", run), *([(to, run)] if to == "table" else [])}
        anew._look_at.clear()
        anew.look(bus)
        assert marked(store) == {(to, run)} if to == "table" else marked(store) == set()
        looks = far.looks
        anew._look_at.clear()
        anew.look(bus)
        assert far.looks == looks, "nobody asks for runs that are elsewhere"


def test_what_a_deleted_run_has_left_is_stopped(
    client: httpx.Client, store: Store, bus: redis.Redis, worker: Engines
) -> None:
    run = begun(client, backend="table")
    worker.look(bus)
    TableEngine.away = True
    client.post(f"runs/{run}/stop")
    assert list(prune(store, Keep(runs=0), lambda _: False)) == [run]
    TableEngine.away = False
    for _ in range(2):
        worker._look_at.clear()
        worker.look(bus)
    assert TableEngine.jobs["1"].state == "ended"
    assert marked(store) == set()
    with store.read() as connection:
        [token] = [each for each in tokens.listed(connection) if each["run"] == run]
    assert token["revoked_at"] is not None


@pytest.mark.parametrize("owner", ["worker", "another"])
def test_a_run_that_comes_back_while_its_engine_is_asked(
    client: httpx.Client,
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    worker: Engines,
    monkeypatch: pytest.MonkeyPatch,
    owner: str,
) -> None:
    """What it asks for then is not what it had left, whichever worker submits that."""
    answer(store, "n1")
    run = begun(client, backend="table")
    worker.look(bus)
    client.post(f"runs/{run}/stop")
    resumed(client, run, backend="local")
    report(store, run, "n1", State.FAILED, 1, exit_code=1)
    become("1", "ended")
    with store.read() as connection:
        key = runs.key_of(connection, run)
    worker._claims.give_back()
    assert leases.acquire(store, key, owner, 600, "jobs")
    ask = TableEngine.look

    def slowly(self: TableEngine, prefix: str) -> Sequence[Job]:
        monkeypatch.setattr(TableEngine, "look", ask)
        before = ask(self, prefix)
        resumed(client, run, backend="table")
        Engines(store, "another").look(bus)
        return before if owner == "worker" else ask(self, prefix)

    monkeypatch.setattr(TableEngine, "look", slowly)
    for _ in range(2):
        worker._look_at.clear()
        worker.look(bus)
        assert marked(store) == {("table", run)}
    assert [job.state for job in TableEngine.jobs.values()] == ["ended", "queued"]


def marked(store: Store) -> set[tuple[str, str]]:
    """Which engines may have jobs of which runs."""
    with store.read() as connection:
        return {(row.backend, row.run) for row in connection.execute(schema.engine_runs.select())}


def test_other_numbers_of_nodes_and_ranks(
    client: httpx.Client, store: Store, bus: redis.Redis
) -> None:
    answer(store, "n1", "n2", "n3")
    run = begun(client, nodes_min=2, nodes_max=3, spares=0)
    for node in ("n1", "n2", "n3"):
        report(store, run, node, State.FAILED, exit_code=1)
    shown = resumed(client, run, nodes_min=1, nodes_max=1, nproc=4)
    assert (shown["nodes_min"], shown["nodes_max"], shown["nproc"]) == (1, 1, 4)
    node = shown["node"]
    last = orders(bus, node)[-1]
    assert isinstance(last, Launch)
    assert (last.nproc, last.nodes_max, last.attempt) == (4, 1, shown["first_attempt"])
    report(store, run, node, State.RUNNING, last.attempt)
    report(store, run, node, State.FAILED, last.attempt, exit_code=1)
    assert client.get(f"runs/{run}").json()["state"] == "failed"
    shown = resumed(client, run, nodes_min=2)
    assert (shown["nodes_min"], shown["nodes_max"], shown["nproc"]) == (2, 2, 4)
    rows = client.get(f"runs/{run}/nodes").json()
    launched = [row["node"] for row in rows if row["first_attempt"] == shown["first_attempt"]]
    assert len(launched) == 2


def test_what_is_refused(client: httpx.Client, store: Store) -> None:
    answer(store, "n1")
    run = begun(client, env={"TOKEN": "secret"})
    assert "is pending" in refused(client, run, 409, backend="table")
    report(store, run, "n1", State.FAILED, exit_code=1)
    assert "env: values are not stored" in refused(client, run, 422, backend="table")
    assert "backend: no backend 'tabel'" in refused(client, run, 422, backend="tabel")
    assert "has no processes" in refused(client, run, 422, backend="simulated")
    assert "nodes_min: 3 is more" in refused(client, run, 422, nodes_min=3, nodes_max=2)
    assert "a run has at most" in refused(client, run, 422, nproc=10_000, nodes_max=1000)
    assert "the options are: none" in refused(client, run, 422, backend_options={"queue": "a"})
    assert "backend_options" in refused(client, run, 422, backend="table", backend_options={"a": 1})
    assert "TOKEN" in refused(client, run, 422, nproc=1)
    assert client.get(f"runs/{run}").json()["state"] == "failed"
    driver = begun(client, env={"PACELINE_DRIVER": "1"})
    report(store, driver, "n1", State.FAILED, exit_code=1)
    why = "nodes_max: PACELINE_DRIVER is set, so the script starts its ranks itself"
    assert why in refused(client, driver, 422, nodes_max=2, nproc=1)
    plain = begun(client)
    report(store, plain, "n1", State.FAILED, exit_code=1)
    assert "launch" in refused(client, plain, 422, backend="table", launch=False)
    assert client.get(f"runs/{plain}").json()["backend"] == "local"
