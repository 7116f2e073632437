"""A run's policy over REST: what is in force, who switched and why, and what a second is told."""

from __future__ import annotations

import threading

import httpx
import numpy as np
import pytest
from starlette.requests import HTTPConnection

from paceline_backend.api import preconditions, switching
from paceline_backend.api.identity import Identity
from paceline_backend.store import Store, switches, telemetry
from support.records import add_run, hello
from support.training import Training
from support.web import ANY

RUN = "/api/v1/runs/r"


@pytest.fixture(autouse=True)
def _run(store: Store) -> None:
    add_run(store, "r", node="n1", state="running")


def test_the_policy_in_force_and_the_one_to_follow(
    client: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "t")
    training.train(4)
    path = "/api/v1/runs/t/policy"
    first = client.get(path)
    assert first.headers["etag"] == '"0"'
    policy = first.json()
    assert (policy["in_force"]["policy"], policy["requested"], policy["revision"]) == (
        "bsp",
        None,
        0,
    )
    seen = {"If-Match": first.headers["etag"]}
    made = client.post(path, json={"policy": "chronica", "why": "sizes differ"}, headers=seen)
    assert made.status_code == 202
    assert made.headers["etag"] == '"1"'
    policy = client.get(path).json()
    assert policy["in_force"]["policy"] == "bsp"
    assert policy["requested"]["why"] == "sizes differ"
    assert policy["requested"] == {name: made.json()[name] for name in policy["requested"]}
    training.adopt(1, "chronica")
    training.train(2)
    policy = client.get(path).json()
    assert (policy["in_force"]["policy"], policy["requested"]) == ("chronica", None)


def test_a_switch_may_follow_the_etag_of_the_one_before(client: httpx.Client) -> None:
    seen = client.get(f"{RUN}/policy").headers["etag"]
    for policy in ("chronica", "sata"):
        made = client.post(f"{RUN}/policy", json={"policy": policy}, headers={"If-Match": seen})
        assert made.status_code == 202
        seen = made.headers["etag"]
    late = client.post(f"{RUN}/policy", json={"policy": "bsp"}, headers={"If-Match": '"1"'})
    assert late.status_code == 412
    assert late.json()["revision"] == 2


def test_the_answer_to_a_switch_carries_its_warnings(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switching, "WARNINGS_S", 60.0)
    asked = client.get(f"{RUN}/policy/warnings", params={"policy": "rna"}).json()["warnings"]
    made = client.post(f"{RUN}/policy", json={"policy": "rna"}, headers=ANY).json()
    assert made["warnings"] == asked
    assert "changes the training" in " ".join(asked)


def test_a_switch_does_not_wait_for_slow_warnings(
    client: httpx.Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def slow(*_: object) -> list[str]:
        answered.wait()
        return ["too late"]

    monkeypatch.setattr(switching, "_warnings", slow)
    monkeypatch.setattr(switching, "WARNINGS_S", 0.01)
    try:
        made = client.post(f"{RUN}/policy", json={"policy": "rna"}, headers=ANY)
    finally:
        answered.set()
    assert (made.status_code, made.json()["warnings"]) == (202, None)
    assert switches.rows(store, "r")[-1]["policy"] == "rna"


def test_who_holds_a_shared_token_gives_a_name(client: httpx.Client) -> None:
    me = client.get("/api/v1/me").json()
    assert me == {"name": "configured", "scope": "admin", "shared": True}
    body = {"policy": "chronica", "operator": " ada ", "why": "rank 3 is slow"}
    made = client.post(f"{RUN}/policy", json=body, headers=ANY).json()
    assert (made["requested_by"], made["why"]) == ("ada", "rank 3 is slow")
    [row] = client.get(f"{RUN}/audit").json()["items"]
    assert (row["who"], row["details"]["operator"]) == ("configured", "ada")
    late = client.post(f"{RUN}/policy", json=body, headers={"If-Match": '"0"'})
    assert late.json()["who"] == "ada"
    assert "changed by ada" in late.json()["detail"]


def test_a_name_does_not_replace_that_of_ones_own_token(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bob(_: HTTPConnection) -> Identity:
        return Identity("bob", "operator")

    monkeypatch.setattr(preconditions, "identity_of", bob)
    body = {"policy": "chronica", "operator": "ada"}
    made = client.post(f"{RUN}/policy", json=body, headers=ANY).json()
    assert made["requested_by"] == "bob"
    [row] = client.get(f"{RUN}/audit").json()["items"]
    assert (row["who"], "operator" in row["details"]) == ("bob", False)


def test_nobody_calls_themselves_as_the_server_does(client: httpx.Client) -> None:
    body = {"policy": "chronica", "operator": "auto"}
    refused = client.post(f"{RUN}/policy", json=body, headers=ANY)
    assert refused.status_code == 422
    assert "operator" in refused.json()["detail"]
    assert "give your own name" in refused.json()["detail"]


def test_a_policy_that_keeps_no_token_budget_is_refused_and_a_run_under_one_says_so(
    client: httpx.Client, store: Store, bus_url: str
) -> None:
    add_run(store, "t", nproc=2, state="running", policy="chronica")
    assert client.get("/api/v1/runs/t").json()["notice"] is None  # it has not said hello
    sizes = np.ones(40, "<f8").tobytes()
    budget = {"token_budget": 9.5, "steps_per_epoch": 5, "uneven_steps": False}
    said = hello(2, sizes=sizes, global_batch=9, **budget)
    telemetry.write(store, [("t", said)])
    shown = client.get("/api/v1/runs/t").json()
    assert (shown["token_budget"], shown["steps_per_epoch"]) == (9.5, 5)
    assert shown["notice"].startswith("It trains as plain DDP: chronica composes batches itself")
    refused = client.post("/api/v1/runs/t/policy", json={"policy": "rna"}, headers=ANY)
    assert refused.status_code == 422
    assert "rna relaxes synchronisation, so it cannot keep a token budget" in refused.text
    made = client.post("/api/v1/runs/t/policy", json={"policy": "paceline"}, headers=ANY)
    assert made.status_code == 202
    assert client.get("/api/v1/runs/t").json()["notice"] is None


def test_a_run_of_a_stream_under_a_policy_that_cannot_plan_it_says_so(
    client: httpx.Client, store: Store, bus_url: str
) -> None:
    add_run(store, "s", nproc=2, state="running", policy="chronica")
    assert client.get("/api/v1/runs/s").json()["notice"] is None  # it has not said hello
    telemetry.write(store, [("s", hello(2, sizes=b"", stream=True, uneven_steps=False))])
    shown = client.get("/api/v1/runs/s").json()
    assert shown["samples"] is None
    assert shown["notice"].startswith("It trains as plain DDP: chronica cannot plan a stream")
    free = {"policy": "paceline", "parameters": {"mode": "free"}}
    refused = client.post("/api/v1/runs/s/policy", json=free, headers=ANY)
    assert refused.status_code == 422
    made = client.post("/api/v1/runs/s/policy", json={"policy": "paceline"}, headers=ANY)
    assert made.status_code == 202
    assert client.get("/api/v1/runs/s").json()["notice"] is None
