"""REST over a real socket, database and bus."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import sqlalchemy as sa

from paceline import __version__, policies
from paceline.wire import (
    PROTOCOL_VERSION,
    Kill,
    Launch,
    Message,
    NodeState,
    RunChanged,
    RunState,
    State,
    StepBatch,
    StopTraining,
    commands,
    control,
    decode,
    live,
)
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.server.heartbeat import Beat, beat
from paceline_backend.store import Store, schema, telemetry
from support.records import add_run, adopted, hello, record
from support.waiting import until
from support.web import ANY, serving

V1 = "/api/v1"


@pytest.fixture(autouse=True)
def _a_node_stays_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "paceline_backend.store.nodes.NODE_ALIVE_S", 3600
    )  # the machine may be busy


@pytest.fixture
def dead_bus(store: Store, tmp_path: Path) -> Iterator[httpx.Client]:
    """A server whose bus has gone."""
    with EmbeddedBus(tmp_path / "bus") as bus:
        url = bus.url
    with serving(store, url) as opened:
        yield opened


def register(store: Store, node: str, runs: list[str], ago_s: float = 0.0) -> None:
    state = NodeState(node, f"{node}.local", 8, 2**30, [], time.time(), "0.1.0", runs)
    telemetry.write(store, [("", state)])
    heartbeat_at = schema.nodes.c.heartbeat_at - ago_s
    with store.write() as connection:
        query = sa.update(schema.nodes).where(schema.nodes.c.id == node)
        connection.execute(query.values(heartbeat_at=heartbeat_at))


def entries(bus_url: str, stream: str) -> list[tuple[str, Message]]:
    with redis.Redis.from_url(bus_url) as bus:
        return [decode(fields) for _, fields in bus.xrange(stream)]


def create(client: httpx.Client, **body: Any) -> httpx.Response:
    content = json.dumps({"script": "/x/train.py", "nproc": 2, **body})  # lone surrogates escaped
    return client.post(f"{V1}/runs", content=content, headers={"Content-Type": "application/json"})


def test_version(client: httpx.Client, store: Store, bus_url: str) -> None:
    answer = client.get(f"{V1}/version").json()
    control = answer.pop("id")
    assert answer == {"version": __version__, "protocol": PROTOCOL_VERSION, "bus": bus_url}
    with serving(store, bus_url) as moved:
        assert moved.get(f"{V1}/version").json()["id"] == control, "wherever it listens"


def test_policies_say_what_they_change_in_the_training(client: httpx.Client) -> None:
    answer = {policy["name"]: policy for policy in client.get(f"{V1}/policies").json()}
    for name, policy in answer.items():
        made = policies.make(name)
        assert (policy["changes"] == "training") == made.relaxed
        assert (policy["changes"] == "nothing") == (made.plain_batches and not made.relaxed)
    some = {name: answer[name]["changes"] for name in ("bsp", "chronica", "rna")}
    assert some == {"bsp": "nothing", "chronica": "batches", "rna": "training"}
    changing = {n: policy["changes_with"] for n, policy in answer.items() if policy["changes_with"]}
    assert changing == {"paceline": {"mode": {"free": "batches"}}}


def test_create_without_launch(client: httpx.Client, bus_url: str) -> None:
    made = create(client, launch=False, policy="chronica", args=["--x"], node="here")
    assert made.status_code == 201
    run = made.json()
    assert (run["name"], run["state"], run["policy"], run["version"]) == (
        "train",
        "pending",
        "chronica",
        0,
    )
    assert (run["node"], run["args"], run["emulated"]) == ("here", ["--x"], None)
    assert client.get(f"{V1}/runs/{run['id']}").json() == run
    (switch,) = client.get(f"{V1}/runs/{run['id']}/switches").json()
    assert (switch["version"], switch["policy"], switch["requested_by"]) == (
        0,
        "chronica",
        "configured",
    )
    assert entries(bus_url, commands("here")) == []


def test_a_run_begins_with_our_own_policy_unless_told(client: httpx.Client) -> None:
    assert create(client, launch=False).json()["policy"] == "paceline"


def test_launch_goes_to_the_least_busy_live_node(
    client: httpx.Client, store: Store, bus_url: str
) -> None:
    register(store, "gone", [], ago_s=7200)
    register(store, "busy", ["a", "b"])
    register(store, "idle", ["c"])
    nodes = client.get(f"{V1}/nodes").json()
    assert [(node["id"], node["alive"]) for node in nodes] == [
        ("busy", True),
        ("idle", True),
        ("gone", False),
    ]
    run = create(client, env={"K": "v"}, cwd="/x", max_restarts=2).json()
    assert run["node"] == "idle"
    env = {"K": "v", "PACELINE_FIRST_POLICY": '{"paceline":{}}'}
    launch = Launch("/x/train.py", [], 2, env, "/x", 2)
    assert entries(bus_url, commands("idle")) == [(run["id"], launch)]
    assert create(client, node="busy").json()["node"] == "busy"
    refused = create(client, node="gone")
    assert refused.status_code == 409
    assert "busy, idle" in refused.json()["detail"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"nproc": 0}, "nproc"),
    ({"nproc": "many"}, "nproc"),
    ({"script": ""}, "script"),
    ({"nprocs": 4}, "nprocs"),
    ({"env": {"A": 1}}, "env.A"),
    ({"env": {"A=B": "x"}}, "env.A=B"),
    ({"env": {"A": "\0"}}, "env.A"),
    ({"args": ["fine", "a\0b"]}, "args.1"),
    ({"cwd": "\0"}, "cwd"),
    ({"name": "\0"}, "name"),
    ({"env": {"\ud800": "x"}}, "env.\ufffd\ufffd\ufffd"),
    ({"parameters": {"windw": 3}}, "parameters"),
]


def test_bad_input_names_the_field(client: httpx.Client) -> None:
    for body, field in BAD:
        refused = create(client, launch=False, **body)
        assert refused.status_code == 422, body
        assert refused.headers["content-type"] == "application/problem+json"
        problem = refused.json()
        assert [error["field"] for error in problem["errors"]] == [field]
        assert problem["detail"]
    assert client.get(f"{V1}/runs").json()["items"] == []


def test_a_misspelt_policy_gets_a_suggestion(client: httpx.Client) -> None:
    problem = create(client, launch=False, policy="cronica").json()
    assert (problem["status"], problem["suggestion"]) == (422, "chronica")
    assert "did you mean 'chronica'" in problem["detail"]
    assert "suggestion" not in create(client, launch=False, policy="zzzzzz").json()


def test_a_parameter_of_ranks_has_a_value_for_each(client: httpx.Client) -> None:
    wrong = {"policy": "static-batching", "parameters": {"capacity": [1, 2, 3]}}
    right = {"policy": "static-batching", "parameters": {"capacity": [1, 2]}}
    assert create(client, launch=False, nproc=2, **wrong).status_code == 422
    run = create(client, launch=False, nproc=2, **right).json()["id"]
    refused = client.post(f"{V1}/runs/{run}/policy", json=wrong, headers=ANY)
    assert refused.status_code == 422
    assert refused.json()["detail"].startswith("parameters.capacity: 3 values given, but the run")
    assert client.post(f"{V1}/runs/{run}/policy", json=right, headers=ANY).status_code == 202


def test_what_is_not_there_is_a_problem(client: httpx.Client) -> None:
    for method, path in (
        ("GET", "/api/v1/nothing"),
        ("GET", "/api"),
        ("POST", "/api/v2/runs"),
        ("GET", "/api/v1/runs/none/events"),
    ):
        refused = client.request(method, path, headers=ANY)
        assert refused.status_code == 404, path
        assert refused.headers["content-type"] == "application/problem+json"
        problem = refused.json()
        assert (problem["status"], problem["title"]) == (404, "Not Found")


def test_switch(client: httpx.Client, store: Store, bus_url: str) -> None:
    run = create(client, launch=False).json()["id"]
    body = {"policy": "chronica", "by": "me"}
    made = client.post(f"{V1}/runs/{run}/policy", json=body, headers=ANY)
    assert made.status_code == 202
    switch = made.json()
    assert (switch["version"], switch["policy"], switch["requested_by"]) == (
        1,
        "chronica",
        "configured",
    )
    assert switch["effective_step"] is None
    again = client.post(f"{V1}/runs/{run}/policy", json={"policy": "bsp"}, headers=ANY).json()
    assert again["version"] == 2
    assert [s["version"] for s in client.get(f"{V1}/runs/{run}/switches").json()] == [0, 1, 2]
    answer = client.get(f"{V1}/runs/{run}").json()
    assert (answer["policy"], answer["version"]) == ("bsp", 2)
    messages = entries(bus_url, live(run))
    assert messages[0] == (run, RunChanged())
    telemetry.write(store, [(run, RunState(State.FINISHED, time.time(), "n"))])
    late = client.post(f"{V1}/runs/{run}/policy", json={"policy": "bsp"}, headers=ANY)
    assert late.status_code == 409
    assert len(client.get(f"{V1}/runs/{run}/switches").json()) == 3


@pytest.mark.parametrize("backend", ["local", "simulated"])
def test_every_relaxed_preset_may_be_asked_for(
    client: httpx.Client, store: Store, backend: str
) -> None:
    """With any preset's batches; another's name is refused, and the parameter named."""
    add_run(store, "r", state="running", backend=backend)
    relaxed = [name for name in policies.names() if policies.make(name).relaxed]
    assert {"paceline-relaxed", "rna"} <= set(relaxed)
    listed = {
        preset["name"]: preset["parameters"] for preset in client.get(f"{V1}/policies").json()
    }
    for name in relaxed:
        assert "chronica" in listed[name]["batches"]["enum"]
        for batches, status in (("chronica", 202), (name, 422)):
            body = {"policy": name, "parameters": {"batches": batches}}
            answer = client.post(f"{V1}/runs/r/policy", json=body, headers=ANY)
            assert answer.status_code == status
            if status == 422:
                assert "parameters.batches" in answer.json()["detail"]


def test_stop(client: httpx.Client, store: Store, bus_url: str) -> None:
    add_run(store, "r", node="n1", state="running")
    gently = client.post(f"{V1}/runs/r/stop", headers=ANY)
    assert (gently.status_code, gently.json()["id"]) == (202, "r")
    ((_, message),) = entries(bus_url, control("r"))
    assert isinstance(message, StopTraining)
    assert entries(bus_url, commands("n1")) == []
    client.post(f"{V1}/runs/r/stop", json={"force": True}, headers=ANY)
    ((_, message),) = entries(bus_url, commands("n1"))
    assert isinstance(message, Kill)
    telemetry.write(store, [("r", RunState(State.STOPPED, time.time(), "n1"))])
    assert client.post(f"{V1}/runs/r/stop", headers=ANY).status_code == 409


def test_stop_before_the_start(client: httpx.Client, store: Store, bus_url: str) -> None:
    unplaced = create(client, launch=False).json()["id"]
    client.post(f"{V1}/runs/{unplaced}/policy", json={"policy": "chronica"}, headers=ANY)
    assert client.post(f"{V1}/runs/{unplaced}/stop", headers=ANY).json()["state"] == "stopped"
    assert entries(bus_url, live(unplaced))[-1] == (unplaced, RunChanged()), "open pages hear of it"
    with redis.Redis.from_url(bus_url) as bus:
        assert bus.ttl(live(unplaced)) > 0
    register(store, "n1", [])
    placed = create(client).json()["id"]
    assert client.post(f"{V1}/runs/{placed}/stop", headers=ANY).json()["state"] == "stopped", (
        "its agent may have died before it read the launch"
    )
    assert isinstance(entries(bus_url, commands("n1"))[-1][1], Kill)
    add_run(store, "starting", node="n1", state="starting")
    assert client.post(f"{V1}/runs/starting/stop", headers=ANY).json()["state"] == "starting"
    assert entries(bus_url, commands("n1"))[-1][0] == "starting"


def test_commands_that_nobody_reads_do_not_pile_up(
    client: httpx.Client, store: Store, bus_url: str
) -> None:
    register(store, "n1", [])
    with redis.Redis.from_url(bus_url) as bus:
        pipeline = bus.pipeline()
        for _ in range(3_000):
            pipeline.xadd(commands("n1"), {"any": "thing"})
        pipeline.execute()
        run = create(client).json()["id"]
        assert bus.xlen(commands("n1")) < 1_200
        assert decode(bus.xrevrange(commands("n1"), count=1)[0][1])[0] == run


def test_without_a_bus_nothing_is_written(dead_bus: httpx.Client, store: Store) -> None:
    register(store, "n1", [])
    for body in ({}, {"launch": False}):
        refused = create(dead_bus, **body)
        assert refused.status_code == 503
        assert refused.headers["content-type"] == "application/problem+json"
    assert dead_bus.get(f"{V1}/runs").json()["items"] == []
    add_run(store, "r", node="n1", state="running")
    refused = dead_bus.post(f"{V1}/runs/r/policy", json={"policy": "bsp"}, headers=ANY)
    assert refused.status_code == 503
    assert dead_bus.get(f"{V1}/runs/r").json()["version"] == 0
    assert dead_bus.post(f"{V1}/runs/r/stop", headers=ANY).status_code == 503
    assert dead_bus.get(f"{V1}/runs/r/audit").json()["items"] == []
    assert dead_bus.get(f"{V1}/runs/r/view").status_code == 200, "history needs no bus"
    ready = dead_bus.get("/readyz")
    assert (ready.status_code, ready.json()["database"]) == (503, "ok")
    assert 'paceline_up{part="bus"} 0.0' in dead_bus.get("/metrics").text


def test_a_view_is_compressed_for_whom_it_may_be(client: httpx.Client, store: Store) -> None:
    add_run(store, "r")
    records = [record(step, rank) for step in range(30) for rank in range(2)]
    telemetry.write(store, [("r", hello()), ("r", StepBatch(records))])
    answer = client.get(f"{V1}/runs/r/view", params={"points": 6, "columns": 6})
    assert answer.headers["Content-Encoding"] == "gzip"
    plain = client.get(
        f"{V1}/runs/r/view",
        params={"points": 6, "columns": 6},
        headers={"Accept-Encoding": "identity"},
    )
    assert "Content-Encoding" not in plain.headers
    view, again = answer.json(), plain.json()
    for each in (view, again):
        each["run"].pop("eta_at")  # follows the clock
    assert again == view
    assert (view["heat"]["bucket"], view["heat"]["rows"]) == (6, 2)
    part = client.get(f"{V1}/runs/r/view", params={"from": 3, "to": 5}).json()
    assert part["worker_steps"]["step"] == [3, 4, 5]


def test_view_before_the_first_step(client: httpx.Client, store: Store) -> None:
    add_run(store, "r")
    telemetry.write(store, [("r", hello()), ("r", adopted(0, 0))])
    for which in ({"last": 5}, {"since": -1}):
        view = client.get(f"{V1}/runs/r/view", params=which).json()
        assert (view["begins"], view["steps"]["step"]) == (None, [])
        assert [segment["seq"] for segment in view["segments"]] == [0]


@pytest.mark.parametrize("number", [2**63, 10**20])
def test_numbers_beyond_the_databases_are_refused(
    client: httpx.Client, store: Store, number: int
) -> None:
    add_run(store, "r")
    cursor = base64.urlsafe_b64encode(b"%d" % number).decode().rstrip("=")
    for path, query in (
        ("/runs/r/steps", {"from": number}),
        ("/runs/r/segments", {"to": number}),
        ("/runs/r/worker-steps", {"ranks": f"0,{number}"}),
        ("/runs", {"cursor": cursor}),
        ("/runs/r/view", {"since": number}),
    ):
        refused = client.get(f"{V1}{path}", params=query)
        assert refused.status_code == 422, path
        assert refused.json()["errors"][0]["field"] == next(iter(query))


def test_ready_with_a_worker(client: httpx.Client, bus_url: str) -> None:
    assert client.get("/readyz").json()["worker"].startswith("no worker")
    with redis.Redis.from_url(bus_url) as bus:
        beat(bus, Beat("w", 12, 3, 7, 1767225600.0))
    ready = client.get("/readyz")
    assert (ready.status_code, set(ready.json().values())) == (200, {"ok"})
    text = client.get("/metrics").text
    assert 'paceline_ingest_rows_total{worker="w"} 12.0' in text
    assert 'paceline_ingest_batches_total{worker="w"} 3.0' in text
    assert 'paceline_ingest_lag{worker="w"} 7.0' in text
    assert 'paceline_ingest_last_commit_timestamp_seconds{worker="w"} 1.7672256e+09' in text
    assert 'paceline_runs{state="running"} 0.0' in text


@pytest.mark.parametrize("path", ["/readyz", "/metrics"])
def test_who_asks_often_opens_no_further_connection(
    store: Store, tmp_path: Path, path: str
) -> None:
    """The bus is this test's own: nobody else connects."""
    with EmbeddedBus(tmp_path / "bus") as own, serving(store, own.url) as client:
        client.get(path)
        with redis.Redis.from_url(own.url) as bus:
            before = connections(bus)
            for _ in range(50):
                client.get(path)
            assert connections(bus) == before


def connections(bus: redis.Redis) -> tuple[int, int]:
    """How many there are, and how many there ever were."""
    info: Any = bus.info("stats")
    return len(bus.client_list()), info["total_connections_received"]


def test_a_bus_that_was_restarted_is_ready_at_once(store: Store, tmp_path: Path) -> None:
    """The connection that was open before is of no use any more."""
    with EmbeddedBus(tmp_path / "bus") as own, serving(store, own.url) as client:
        assert client.get("/readyz").json()["bus"] == "ok"
        own.kill()
        assert client.get("/readyz").json()["bus"] == "does not answer"
        own.start()
        assert client.get("/readyz").json()["bus"] == "ok"
        own.kill()
        own.start()
        assert client.get("/readyz").json()["bus"] == "ok"


def test_not_ready_unless_database_and_bus_take_writes(
    client: httpx.Client, store: Store, bus_url: str
) -> None:
    with redis.Redis.from_url(bus_url) as bus:
        beat(bus, Beat("w", 12, 3, 7, 1767225600.0))
        assert client.get("/readyz").status_code == 200
        bus.config_set("maxmemory", 1)
        try:
            ready = client.get("/readyz")
        finally:
            bus.config_set("maxmemory", 0)
        assert (ready.status_code, ready.json()["bus"]) == (503, "does not answer")
    Path(str(store.url.database)).unlink()
    deleted = until(lambda: _unready(client), "the next question")
    assert deleted["database"] == "does not answer"
    assert str(store.url.database) not in str(deleted), "strangers may ask"


def _unready(client: httpx.Client) -> dict[str, str] | None:
    ready = client.get("/readyz")
    return ready.json() if ready.status_code == 503 else None


def test_openapi_has_an_example_for_every_body(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    paths = document["paths"]
    assert all(path.startswith(("/api/v1", "/healthz", "/readyz", "/metrics")) for path in paths)
    schemas = document["components"]["schemas"]
    for name in (
        "RunCreate",
        "PolicySwitch",
        "Stop",
        "RunInfo",
        "SwitchInfo",
        "WorkerSummary",
        "EpochCoverage",
        "RoundInfo",
    ):
        schema = schemas[name]
        fields = schema["properties"].values()
        assert "examples" in schema or all("examples" in f or "$ref" in str(f) for f in fields), (
            name
        )
