"""Backends, states and adoption, as docs/rest.md and docs/backends describe them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.reported import Plane

ADOPTED = {"key": "speech-7", "script": "/shared/train.py", "nproc": 2}


def adopt(plane: Plane, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return plane.client.post("adoptions", json=ADOPTED | fields, headers=headers)


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


# Adoption


def run_of(answer: httpx.Response) -> str:
    assert answer.is_success, answer.text
    given = answer.json()["run"]
    return str(given["id"] if isinstance(given, dict) else given)


def test_a_run_of_agents_has_nobody_that_joins_by_itself(plane: Plane) -> None:
    plane.have(n1=None)
    run = plane.start(node="n1").json()["id"]
    assert plane.client.post(f"runs/{run}/nodes/n1/join").status_code == 409


def test_an_adopted_run_that_nobody_joined_is_stopped_at_once(plane: Plane) -> None:
    run = run_of(adopt(plane))
    assert plane.ask("POST", f"runs/{run}/stop").status_code == 202
    assert plane.get(f"runs/{run}")["state"] == "stopped"
