"""Backends, states and adoption, as docs/rest.md and docs/backends describe them."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from paceline.wire import RunState, State
from paceline_backend.store import telemetry
from support.reported import Plane

ADOPTED = {"key": "speech-7", "script": "/shared/train.py", "nproc": 2}


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def token(plane: Plane, scope: str, name: str = "") -> dict[str, str]:
    answer = plane.ask("POST", "tokens", name=name or scope, scope=scope)
    assert answer.status_code == 201, answer.text
    return bearer(answer.json()["token"])


def adopt(plane: Plane, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return plane.client.post("adoptions", json=ADOPTED | fields, headers=headers)


def ends(plane: Plane, run: str, state: State) -> None:
    telemetry.write(plane.store, [(run, RunState(state, 5.0, "n1"))])


def test_backends_say_why_their_engine_does_not_answer(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
    shown = {row["name"]: row for row in plane.get("backends")}
    assert not shown["local"]["engine"]
    assert shown["local"]["reachable"]
    assert "adopted" not in shown
    ray = shown["ray"]
    assert (ray["engine"], ray["reachable"]) == (True, False)
    assert ray["problem"]
    assert "gpus_per_node" in ray["options"]["properties"]


NOT_TAKEN: list[tuple[dict[str, Any], str]] = [
    ({"env": {"A": "b"}}, "env"),
    ({"node": "n1"}, "node"),
    ({"script": "train.py"}, "script"),
    ({"backend_options": {"gpu": 1}}, "gpu"),
    *(({"backend": name}, "backend") for name in ("adopted", "pbs", "")),
]


def test_what_an_engine_does_not_take_and_what_is_no_backend(plane: Plane) -> None:
    plane.have(n1=None)
    for fields, word in NOT_TAKEN:
        answer = plane.start(**({"backend": "ray"} | fields))
        assert answer.status_code == 422, answer.text
        assert word in answer.json()["detail"]


def test_without_an_agent_nothing_is_launched(plane: Plane) -> None:
    answer = plane.start()
    assert answer.status_code == 409
    assert "agent" in answer.json()["detail"]
    assert plane.get("runs")["items"] == []


@pytest.mark.parametrize("force", [False, True])
def test_a_run_that_does_not_train_yet_is_stopped_at_once(plane: Plane, force: bool) -> None:
    run = plane.start(launch=False).json()
    assert run["state"] == "pending"
    answer = plane.ask("POST", f"runs/{run['id']}/stop", force=force, why="not needed")
    assert answer.status_code == 202
    now = plane.get(f"runs/{run['id']}")
    assert now["state"] == "stopped"
    assert now["ended_at"] is not None
    again = plane.ask("POST", f"runs/{run['id']}/stop")
    assert again.status_code == 409, "it has ended"


def test_only_what_failed_or_was_stopped_is_resumed(plane: Plane) -> None:
    plane.have(n1=None)
    for state, status in {"running": 409, "finished": 409, "failed": 202, "stopped": 202}.items():
        run = plane.start(node="n1").json()["id"]
        ends(plane, run, State(state))
        assert plane.get(f"runs/{run}")["state"] == state
        answer = plane.ask("POST", f"runs/{run}/resume")
        assert answer.status_code == status, answer.text
        if status == 202:
            assert answer.json()["state"] == "pending"


def test_a_simulation_is_not_resumed(plane: Plane) -> None:
    scenario = {
        "name": "s", "workers": 2, "global_batch": 4, "steps": 10,
        "sizes": {"distribution": "constant", "mean": 1, "samples": 40},
        "devices": {"unit_s": 0.01},
    }  # fmt: skip
    answer = plane.start(backend="simulated", nproc=2, launch=False, scenario=scenario)
    assert answer.status_code == 201, answer.text
    run = answer.json()["id"]
    assert plane.get(f"runs/{run}/scenario")["workers"] == 2
    ends(plane, run, State.FAILED)
    refused = plane.ask("POST", f"runs/{run}/resume")
    assert refused.status_code == 409
    assert "simulat" in refused.json()["detail"]


# Adoption


def test_nodes_with_one_key_get_one_run(plane: Plane) -> None:
    first, second = adopt(plane).json(), adopt(plane).json()
    run = first["run"]["id"] if isinstance(first["run"], dict) else first["run"]
    other = second["run"]["id"] if isinstance(second["run"], dict) else second["run"]
    assert run == other
    assert first["token"] and second["token"]
    shown = plane.get(f"runs/{run}")
    assert (shown["backend"], shown["script"], shown["nproc"]) == ("adopted", "/shared/train.py", 2)
    creations = [row for row in plane.get("audit")["items"] if row["action"] == "run.create"]
    assert len(creations) == 1


def run_of(answer: httpx.Response) -> str:
    assert answer.is_success, answer.text
    given = answer.json()["run"]
    return str(given["id"] if isinstance(given, dict) else given)


def test_nodes_that_adopt_at_once_get_one_run(plane: Plane) -> None:
    start, runs = threading.Barrier(4), []

    def work() -> None:
        start.wait()
        runs.append(run_of(adopt(plane)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 4
    assert len(set(runs)) == 1


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"script": "/shared/other.py"}, "script"),
    ({"args": ["--lr", "1"]}, "args"),
    ({"cwd": "/elsewhere"}, "cwd"),
    ({"nproc": 4}, "nproc"),
    ({"nodes_max": 2}, "nodes"),
    ({"nodes_min": 2, "nodes_max": 2}, "nodes"),
]


def test_a_key_with_another_run_is_refused(plane: Plane) -> None:
    run = run_of(adopt(plane))
    for fields, word in OTHERS:
        answer = adopt(plane, **fields)
        assert answer.status_code == 409
        assert word in answer.json()["detail"], answer.json()["detail"]
        assert len(plane.get("runs")["items"]) == 1
        assert run_of(adopt(plane)) == run


def test_a_key_is_its_tokens_own(plane: Plane) -> None:
    mine, theirs = token(plane, "operator", "mine"), token(plane, "operator", "theirs")
    runs = {run_of(adopt(plane, headers)) for headers in (mine, theirs, mine)}
    assert len(runs) == 2


@pytest.mark.parametrize("state", [State.FINISHED, State.FAILED, State.STOPPED])
def test_a_key_whose_run_has_ended_is_refused(plane: Plane, state: State) -> None:
    run = run_of(adopt(plane))
    ends(plane, run, state)
    answer = adopt(plane)
    assert answer.status_code == 409
    assert "ended" in answer.json()["detail"] or state.value in answer.json()["detail"]


@pytest.mark.parametrize("scope", ["viewer", "agent"])
def test_who_may_not_adopt(plane: Plane, scope: str) -> None:
    assert adopt(plane, token(plane, scope)).status_code == 403
    assert plane.get("runs")["items"] == []


def test_what_a_nodes_token_is_good_for(plane: Plane) -> None:
    given = adopt(plane).json()
    run, secret = run_of(adopt(plane)), bearer(given["token"])
    other = run_of(adopt(plane, key="another"))
    join = f"runs/{run}/nodes/a-1.{run}/join"
    assert plane.client.post(join, headers=secret).status_code == 409, "it has no session"
    session = plane.client.post(f"nodes/a-1.{run}/session", headers=secret)
    assert session.status_code == 200, session.text
    joined = plane.client.post(join, headers=secret)
    assert joined.status_code == 200, joined.text
    assert joined.json()["needed"]
    theirs = plane.client.post(f"runs/{other}/nodes/a-1.{run}/join", headers=secret)
    assert theirs.status_code == 403
    stop = plane.client.post(f"runs/{run}/stop", json={}, headers=secret)
    assert stop.status_code == 403
    assert plane.client.get(f"runs/{run}/logs", headers=secret).status_code == 403
    assert plane.client.get("tokens", headers=secret).status_code == 403


def test_a_run_of_agents_has_nobody_that_joins_by_itself(plane: Plane) -> None:
    plane.have(n1=None)
    run = plane.start(node="n1").json()["id"]
    assert plane.client.post(f"runs/{run}/nodes/n1/join").status_code == 409


def test_what_cannot_be_done_with_an_adopted_run(plane: Plane) -> None:
    plane.have(n1=None)
    run = run_of(adopt(plane, nodes_max=2))
    assert plane.ask("POST", f"runs/{run}/nodes", nodes=1).status_code == 409
    assert plane.ask("POST", f"runs/{run}/nodes", nodes=["n1"]).status_code == 409
    ends(plane, run, State.FAILED)
    refused = plane.ask("POST", f"runs/{run}/resume")
    assert refused.status_code == 409
    assert "backend" in refused.json()["detail"]
    elsewhere = plane.ask("POST", f"runs/{run}/resume", backend="local")
    assert elsewhere.status_code == 202, elsewhere.text


def test_an_adopted_run_that_nobody_joined_is_stopped_at_once(plane: Plane) -> None:
    run = run_of(adopt(plane))
    assert plane.ask("POST", f"runs/{run}/stop").status_code == 202
    assert plane.get(f"runs/{run}")["state"] == "stopped"
