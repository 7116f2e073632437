"""Runs that go on after their end: what is refused, what is stored, what their node is told."""

from __future__ import annotations

import time
from typing import Any

import httpx
import msgspec
import pytest
import redis
import sqlalchemy as sa

from paceline.wire import (
    Launch,
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
from paceline.wire.bus import publish
from paceline.wire.sealing import unseal
from paceline_backend.backends.local import Local
from paceline_backend.requests import sessions
from paceline_backend.store import Store, nodes, schema, telemetry
from support.records import add_run, adopted, hello, record

EMULATED = {"a_s": [1e-5, 2e-5], "b_s": [0.0, 0.0]}


@pytest.fixture
def store(store: Store) -> Store:
    beat(store)
    return store


def beat(store: Store, *, left: bool = False) -> None:
    node = NodeState("n1", "n1.local", 8, 2**30, [], time.time(), "0.1.0", [], left)
    telemetry.write(store, [("", node)])
    with store.write() as connection:
        nodes.expect(connection, "n1")  # its agent has a session


def say(store: Store, *messages: Any) -> None:
    telemetry.write(store, [("r", message) for message in messages])


def state(name: State, attempt: int = 0, **fields: Any) -> RunState:
    return RunState(name, time.time(), "n1", attempt, **fields)


def failed(store: Store, **columns: Any) -> None:
    """A run that trained five steps in attempt 0 and failed in attempt 1 before its Hello."""
    add_run(store, "r", node="n1", cwd="/here", max_restarts=1, **columns)
    rows = [record(step, rank) for step in range(5) for rank in range(2)]
    say(store, hello(emulated=EMULATED), StepBatch(rows), state(State.RUNNING, 1))
    say(store, state(State.FAILED, 1, exit_code=137, message="rank 0 was killed by SIGKILL"))


def launches(bus_url: str, store: Store) -> list[Launch]:
    """As the node's agent opens them."""
    with redis.Redis.from_url(bus_url) as bus:
        entries: Any = bus.xrange(commands("n1"))
    key = sessions.keys(store, ["n1"]).of_node("n1")
    return [
        msgspec.structs.replace(message, env=unseal(message.sealed, key).env, sealed=b"")
        for _, f in entries
        if isinstance(message := decode(f)[1], Launch)
    ]


def test_a_run_is_not_resumed_by_an_agent_without_a_session(
    client: httpx.Client, store: Store, bus_url: str
) -> None:
    failed(store)
    with store.write() as connection:
        connection.execute(sa.update(schema.nodes).values(signed=False))
    answer = client.post("runs/r/resume")
    assert answer.status_code == 409
    assert "node n1: its agent has no session" in answer.json()["detail"]
    assert "`paceline resume r` on its machine" in answer.json()["detail"]
    assert client.get("runs/r").json()["state"] == "failed"
    assert launches(bus_url, store) == []
    assert client.post("runs/r/resume", json={"launch": False}).status_code == 202


def test_a_failed_run_goes_on_on_its_node(client: httpx.Client, store: Store, bus_url: str) -> None:
    failed(store, args=["--epochs", "3"], env={"PACELINE_EMULATE": "{}"})
    with redis.Redis.from_url(bus_url) as bus:
        publish(bus, control("r"), StopTraining("of the time before", 0), "r")
    answer = client.post("runs/r/resume", json={"max_restarts": 4})
    assert answer.status_code == 202
    run = answer.json()
    assert (run["state"], run["first_attempt"], run["max_restarts"]) == ("pending", 2, 4)
    assert (run["ended_at"], run["exit_code"], run["message"]) == (None, None, None)
    [launch] = launches(bus_url, store)
    env = {"PACELINE_EMULATE": '{"a_s": [1e-05, 2e-05], "b_s": [0.0, 0.0]}'}
    assert launch == Launch("train.py", ["--epochs", "3"], 2, env, "/here", 4, attempt=2)
    with redis.Redis.from_url(bus_url) as bus:
        assert not bus.exists(control("r")), "its leader would stop at once"
        [(_, fields)] = bus.xrange(live("r"))
        assert decode(fields) == ("r", RunChanged())


def test_its_end_in_an_earlier_attempt_may_be_told_later(
    client: httpx.Client, store: Store
) -> None:
    """Its node was away, the run was taken for lost, and goes on: then the old report comes."""
    failed(store)
    client.post("runs/r/resume")
    say(store, state(State.FAILED, 1, message="told again"), hello(attempt=1))
    assert client.get("runs/r").json()["state"] == "pending"
    say(store, state(State.STARTING, 2))
    assert client.get("runs/r").json()["state"] == "starting"
    say(store, hello(attempt=2, step=3), state(State.FAILED, 2, message="again"))
    now = client.get("runs/r").json()
    assert (now["state"], now["message"], now["attempt"]) == ("failed", "again", 2)
    assert client.post("runs/r/resume").json()["first_attempt"] == 3


def test_a_lost_run_goes_on_above_all_attempts_that_it_may_have_had(
    client: httpx.Client, store: Store
) -> None:
    """Its node was cut off: how often it started its ranks again, nobody has heard."""
    add_run(store, "r", node="n1", state="failed", lost=True, max_restarts=3, first_attempt=2)
    assert client.post("runs/r/resume").json()["first_attempt"] == 6


def test_steps_done_again_are_told(client: httpx.Client, store: Store) -> None:
    failed(store)
    client.post("runs/r/resume")
    say(store, hello(attempt=2, step=3, started_at=200.0), hello(attempt=2, step=3))
    say(store, StepBatch([record(3, rank, 2) for rank in range(2)]))
    assert client.get("runs/r/attempts").json() == [
        {"attempt": 0, "started_at": 100.0, "step": 0, "reached": 0, "again": 0},
        {"attempt": 2, "started_at": 200.0, "step": 3, "reached": 5, "again": 2},
    ]


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"state": "finished"}, "run r has finished: nothing is left to train; start another run"),
        ({"backend": "simulated"}, "run r is simulated: only a run with processes can be resumed"),
        ({"script": ""}, "run r has no known script: start it as another run"),
        (
            {"node": "n2"},
            "node: n2 has no agent that answers; available nodes: n1; "
            "to resume a run of `paceline run`, use `paceline resume r` on its machine",
        ),
        (
            {"first_attempt": 32_760, "attempts": 32_768},
            "run r has had 32768 attempts: a run has at most 32,768; start another run",
        ),
    ],
)
def test_refusals_say_why(
    client: httpx.Client, store: Store, bus_url: str, columns: dict[str, Any], why: str
) -> None:
    add_run(store, "r", **{"state": "failed", "node": "n1", **columns})
    answer = client.post("runs/r/resume")
    assert (answer.status_code, answer.json()["detail"]) == (409, why)
    assert client.get("runs/r").json()["state"] == columns.get("state", "failed")
    assert launches(bus_url, store) == []


def test_values_of_the_environment_are_asked_for(
    client: httpx.Client, store: Store, bus_url: str
) -> None:
    """They are not stored."""
    failed(store, env={"B": "1", "A": "2", "PACELINE_EMULATE": "{}"})
    refused = client.post("runs/r/resume", json={"env": {"B": "3"}})
    assert refused.status_code == 422
    assert "was started with values of A, which are not stored" in refused.json()["detail"]
    assert client.post("runs/r/resume", json={"env": {"B": "3", "A": "4"}}).status_code == 202
    [launch] = launches(bus_url, store)
    assert (launch.env["A"], launch.env["B"]) == ("4", "3")


def test_a_drivers_run_goes_on_as_one(client: httpx.Client, store: Store, bus_url: str) -> None:
    failed(store, env=["PACELINE_DRIVER"])
    assert client.get("runs/r").json()["driver"]
    assert client.post("runs/r/resume").status_code == 202
    [launch] = launches(bus_url, store)
    assert launch.env["PACELINE_DRIVER"] == "1"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"nodes_max": 2}, "nodes_max: PACELINE_DRIVER is set, so the script starts its ranks "),
        ({"restart_hung_s": 60}, "restart_hung_s: PACELINE_DRIVER is set, so the script starts "),
    ],
)
def test_what_nobody_can_do_for_a_drivers_ranks_is_refused(
    client: httpx.Client, fields: dict[str, Any], why: str
) -> None:
    body = {"script": "/train.py", "nproc": 1, "env": {"PACELINE_DRIVER": "1"}, **fields}
    refused = client.post("runs", json=body)
    assert refused.status_code == 422
    assert why in refused.json()["detail"]


def test_a_run_that_cannot_be_started_again_has_failed(
    client: httpx.Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> None:
        raise redis.ConnectionError("gone")

    failed(store)
    monkeypatch.setattr(Local, "start", start)
    assert client.post("runs/r/resume").status_code == 503
    now = client.get("runs/r").json()
    assert (now["state"], now["message"]) == (
        "failed",
        "the bus became unreachable before its launch",
    )


@pytest.mark.parametrize(
    ("fields", "epoch", "end", "status"),
    [
        ({"epochs": 3}, 2, False, 202),
        ({"epochs": 3}, 1, True, 202),
        ({"epochs": 3}, 2, True, 409),
        ({"epochs": None}, 0, False, 409),
    ],
)
def test_a_run_that_was_stopped_gently_has_finished_and_goes_on(
    client: httpx.Client, store: Store, fields: dict[str, Any], epoch: int, end: bool, status: int
) -> None:
    """Its script came to its last lines, but not to the end of its epochs."""
    add_run(store, "r", node="n1")
    last = adopted(0, 0, epoch=epoch, epoch_end=end)
    say(store, hello(**fields), last, state(State.FINISHED, exit_code=0))
    assert client.post("runs/r/resume").status_code == status
