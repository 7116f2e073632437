"""Runs that somebody starts on nodes of their own: found or created, joined, and never chosen."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import redis
import sqlalchemy as sa

from paceline.planning.policy_in_force import FIRST_POLICY
from paceline.wire import State
from paceline.wire.sealing import unseal
from paceline_backend.control.bus_users import UserReconciler
from paceline_backend.requests import sessions
from paceline_backend.store import Store, nodes, schema
from paceline_backend.store.telemetry import writers
from paceline_backend.store.upkeep.prune import Keep, prune
from support.groups import answer, orders, ready, report
from support.looks import Looks

BODY = {
    **{"key": "slurm-c-4711.0", "script": "/shared/train.py", "args": ["--epochs", "3"]},
    **{"nproc": 2, "nodes_min": 2, "nodes_max": 2, "policy": "bsp", "name": "speech"},
}


@pytest.fixture(autouse=True)
def _short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the run's id at their end."""
    monkeypatch.setattr(nodes, "is_name", lambda node, run: True)


def adopt(client: httpx.Client, **fields: Any) -> dict[str, str]:
    answered = client.post("adoptions", json=BODY | fields)
    assert answered.status_code == 200, answered.text
    made: dict[str, str] = answered.json()
    return made


def refused(client: httpx.Client, **fields: Any) -> str:
    answered = client.post("adoptions", json=BODY | fields)
    assert answered.status_code == 409, answered.text
    return str(answered.json()["detail"])


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def enlist(client: httpx.Client, store: Store, made: dict[str, str], node: str) -> Any:
    """What a node does that has the token of its run."""
    own = bearer(made["token"])
    assert client.post(f"nodes/{node}/session", headers=own).status_code == 200
    answer(store, node, signed=False)
    return client.post(f"runs/{made['run']}/nodes/{node}/join", headers=own).json()


def test_the_key_of_a_deleted_run_is_refused(client: httpx.Client, store: Store) -> None:
    """Another run of this id would mix with what is left of the first: logs, checkpoints, links."""
    run = adopt(client)["run"]
    client.post(f"runs/{run}/stop", json={})
    assert list(prune(store, Keep(runs=0), lambda _: False)) == [run]
    assert f"its run {run} was deleted: choose another key" in refused(client)
    assert client.get("runs").json()["items"] == []
    assert adopt(client, key="other")["run"] != run


def test_nodes_that_are_all_killed_at_once_are_named(
    client: httpx.Client, store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the time at which each was heard last."""
    made = adopt(client)
    for node in ("n1", "n2"):
        enlist(client, store, made, node)
        report(store, made["run"], node, State.RUNNING)
    heard = {"n1": 1_790_000_000.0, "n2": 1_790_000_002.0}
    with store.write() as connection:
        for node, at in heard.items():
            c = schema.nodes.c
            query = sa.update(schema.nodes).where(c.id == node)
            connection.execute(query.values(heartbeat_at=at))
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 7.0)
    looks = Looks(store, bus_url)
    looks.after(0)
    looks.after(14.0)
    shown = client.get(f"runs/{made['run']}").json()
    assert (shown["state"], shown["message"]) == (
        "failed",
        "n1: its agent has not answered since 2026-09-21 14:13:20 UTC; "
        "n2: its agent has not answered since 2026-09-21 14:13:22 UTC",
    )


def test_what_no_run_can_have_is_refused(client: httpx.Client) -> None:
    for fields, field in (
        ({"nodes_min": 3}, "nodes_min"),
        ({"policy": "bspp"}, "policy"),
        ({"script": "train.py"}, "script"),
        ({"key": ""}, "key"),
    ):
        answered = client.post("adoptions", json=BODY | fields)
        assert answered.status_code == 422, answered.text
        assert field in answered.json()["errors"][0]["field"]
    by_name = {"script": "/shared/train.py", "nproc": 1, "backend": "adopted"}
    answered = client.post("runs", json=by_name)
    assert answered.status_code == 422
    assert "`paceline node SCRIPT`" in answered.json()["detail"]
    assert client.get("runs").json()["items"] == []


def test_nobody_here_chooses_its_nodes(client: httpx.Client, store: Store) -> None:
    made = adopt(client, nodes_max=3)
    run = made["run"]
    for node in ("n1", "n2"):
        enlist(client, store, made, node)
        ready(store, run, node)
    answer(store, "free")
    joined = client.post(f"runs/{run}/nodes", json={"nodes": 1})
    assert (joined.status_code, "the run's key" in joined.json()["detail"]) == (409, True)
    replaced = client.post(f"runs/{run}/nodes/n2/replace", json={})
    assert (replaced.status_code, "the run's key" in replaced.json()["detail"]) == (409, True)
    assert enlist(client, store, made, "n3")["needed"]
    left = client.delete(f"runs/{run}/nodes/n3")
    assert left.status_code == 202, left.text


def test_a_run_on_one_node(client: httpx.Client, store: Store, bus: redis.Redis) -> None:
    made = adopt(client, nodes_min=1, nodes_max=1, policy="rna", parameters={"probes": 3})
    assert enlist(client, store, made, "n1")["needed"]
    assert first_policy(store, bus, "n1") == {"rna": {"probes": 3}}
    assert client.get(f"runs/{made['run']}").json()["node"] == "n1"
    assert enlist(client, store, made, "n2")["message"] == "the run trains on n1"


def test_all_nodes_get_the_runs_first_policy(
    client: httpx.Client, store: Store, bus: redis.Redis
) -> None:
    """Although it was switched before the second one came: ranks compare what they got."""
    made = adopt(client, policy="rna", parameters={"probes": 3})
    assert enlist(client, store, made, "n1")["needed"]
    switched = client.post(f"runs/{made['run']}/policy", json={"policy": "bsp"})
    assert switched.status_code == 202, switched.text
    assert enlist(client, store, made, "n2")["needed"]
    for node in ("n1", "n2"):
        assert first_policy(store, bus, node) == {"rna": {"probes": 3}}


def first_policy(store: Store, bus: redis.Redis, node: str) -> Any:
    """The policy with which rank 0 plans as long as no controller does."""
    (order,) = orders(bus, node)
    keys = sessions.keys(store, [node])
    return json.loads(unseal(order.sealed, keys.of_node(node)).env[FIRST_POLICY])


def test_a_run_goes_on_elsewhere_only(client: httpx.Client, store: Store, bus: redis.Redis) -> None:
    made = adopt(client, nodes_min=1, nodes_max=1)
    run = made["run"]
    enlist(client, store, made, "n1")
    report(store, run, "n1", State.FAILED, message="rank 0 was killed", exit_code=1)
    answer(store, "free")
    refusal = client.post(f"runs/{run}/resume", json={})
    assert refusal.status_code == 409
    assert "name a backend" in refusal.json()["detail"]
    moved = client.post(f"runs/{run}/resume", json={"backend": "local"})
    assert moved.status_code == 202, moved.text
    assert moved.json()["node"] == "free"
    assert client.post("nodes/n1/session", headers=bearer(made["token"])).status_code == 401
    assert "was moved to another backend" in refused(client, nodes_min=1, nodes_max=1)


def test_the_token_of_a_run_ends_with_its_streams(
    client: httpx.Client, store: Store, bus: redis.Redis, bus_url: str
) -> None:
    made = adopt(client, nodes_min=1, nodes_max=1)
    own = bearer(made["token"])
    enlist(client, store, made, "n1")
    report(store, made["run"], "n1", State.FINISHED, exit_code=0)
    keeper = UserReconciler(store, bus_url)
    keeper.keep(bus)
    assert client.get("version", headers=own).status_code == 200, "it may have much to deliver"
    with store.write() as connection:
        long_ago = schema.runs.c.seen_at - 2 * writers.WRITERS_KEPT_S
        connection.execute(sa.update(schema.runs).values(seen_at=long_ago))
    keeper.keep(bus)
    assert client.get("version", headers=own).status_code == 401
