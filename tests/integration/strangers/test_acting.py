"""What operators do about a slow node, as docs/backends/local.md and docs/rest.md say."""

from __future__ import annotations

import httpx
import pytest

from paceline.wire import State
from support import groups
from support.reported import Plane
from support.web import SIGNED_IN

WHY = "its disk is slow"


def token(plane: Plane, scope: str) -> dict[str, str]:
    answer = plane.ask("POST", "tokens", name=scope, scope=scope)
    assert answer.status_code == 201, answer.text
    return {"Authorization": f"Bearer {answer.json()['token']}"}


def actions(plane: Plane, run: str) -> list[str]:
    return [item["action"] for item in plane.get(f"runs/{run}/audit")["items"]]


def cordon(plane: Plane, node: str, why: str = WHY) -> None:
    answer = plane.ask("PUT", f"nodes/{node}/cordon", reason=why)
    assert answer.status_code == 200, answer.text


def test_a_cordoned_node_gets_nothing_new(plane: Plane) -> None:
    plane.have(n1=None, n2=None, n3=None)
    cordon(plane, "n2")
    shown = plane.node("n2")["cordoned"]
    assert shown["reason"] == WHY
    assert shown["by"] and shown["at"] > 0
    again = plane.ask("PUT", "nodes/n2/cordon", reason="another reason")
    assert again.status_code == 409
    assert WHY in again.json()["detail"] and shown["by"] in again.json()["detail"]
    run = plane.start(nodes_min=1, nodes_max=3).json()["id"]
    assert plane.on(run) == {"n1", "n3"}
    assert plane.start(nodes_min=3, nodes_max=3).status_code == 409


@pytest.mark.parametrize("how", ["a run of one node", "join", "replace"])
def test_nobody_gets_a_cordoned_node_by_its_name(plane: Plane, how: str) -> None:
    plane.have(n1=None, n2=None)
    run = plane.training("n1", "n2", most=3)
    plane.have(n3=None)
    cordon(plane, "n3")
    answer = {
        "a run of one node": lambda: plane.start(node="n3"),
        "join": lambda: plane.ask("POST", f"runs/{run}/nodes", nodes=["n3"]),
        "replace": lambda: plane.ask("POST", f"runs/{run}/nodes/n2/replace", node="n3"),
    }[how]()
    assert answer.status_code == 409, answer.text
    assert "cordon" in answer.json()["detail"] and WHY in answer.json()["detail"]
    assert plane.on(run) == {"n1", "n2"}


def test_a_cordon_is_lifted_and_remembered(plane: Plane) -> None:
    plane.have(n1=None)
    cordon(plane, "n1")
    lifted = plane.ask("DELETE", "nodes/n1/cordon?why=repaired")
    assert lifted.status_code == 200
    assert lifted.json()["cordoned"] is None
    assert plane.ask("DELETE", "nodes/n1/cordon").status_code == 409
    [row] = plane.get("nodes/n1/history")["cordons"]
    assert (row["reason"], row["lifted_why"]) == (WHY, "repaired")
    assert row["by"] == row["lifted_by"]
    assert row["at"] <= row["lifted_at"]
    rows = [row for row in plane.get("audit")["items"] if row["action"].startswith("node.")]
    assert [(row["action"], row["target"], row["why"]) for row in rows] == [
        ("node.uncordon", "n1", "repaired"),
        ("node.cordon", "n1", WHY),
    ]
    assert plane.start(node="n1").status_code == 201


@pytest.mark.parametrize("scope", ["viewer", "agent"])
def test_who_may_not_cordon(plane: Plane, scope: str) -> None:
    plane.have(n1=None)
    other = token(plane, scope)
    answer = plane.client.put("nodes/n1/cordon", json={"reason": WHY}, headers=other)
    assert answer.status_code == 403
    assert plane.node("n1")["cordoned"] is None


def test_only_known_nodes_are_cordoned_for_reasons_of_bounded_length(plane: Plane) -> None:
    plane.have(n1=None)
    assert plane.ask("PUT", "nodes/nobody/cordon", reason=WHY).status_code == 404
    assert plane.ask("PUT", "nodes/n1/cordon", reason="x" * 501).status_code == 422
    assert plane.ask("PUT", "nodes/n1/cordon", reason="x" * 500).status_code == 200


def test_a_run_goes_on_on_a_node_that_is_cordoned(plane: Plane) -> None:
    plane.have(n1=None, n2=None)
    run = plane.training("n1", "n2")
    cordon(plane, "n2")
    assert plane.on(run) == {"n1", "n2"}
    assert plane.get(f"runs/{run}")["state"] == "running"


def test_a_node_is_excluded_and_cordoned(plane: Plane) -> None:
    plane.have(n1=None, n2=None, n3=None)
    run = plane.training("n1", "n2", "n3", least=2, most=3)
    answer = plane.ask("DELETE", f"runs/{run}/nodes/n2?cordon=true&why={WHY}")
    assert answer.status_code == 202, answer.text
    assert plane.on(run) == {"n1", "n3"}
    assert plane.node("n2")["cordoned"]["reason"] == WHY
    [newest, *_] = plane.get(f"runs/{run}/audit")["items"]
    assert (newest["action"], newest["why"]) == ("run.leave", WHY)
    [entry] = plane.get("nodes/n2/history")["runs"]
    assert (entry["run"], entry["asked_to_leave"]) == (run, True)


def test_what_is_refused_cordons_nobody(plane: Plane) -> None:
    """Fewer than the least number of nodes would be left; nobody could replace the node."""
    plane.have(n1=None, n2=None)
    run = plane.training("n1", "n2", least=2, most=2)
    before = actions(plane, run)
    assert plane.ask("DELETE", f"runs/{run}/nodes/n2?cordon=true").status_code == 409
    assert plane.ask("POST", f"runs/{run}/nodes/n2/replace", cordon=True).status_code == 409
    assert plane.node("n2")["cordoned"] is None
    assert plane.on(run) == {"n1", "n2"}
    assert actions(plane, run) == before


def test_only_what_trains_is_replaced_and_only_engines_take_it_back(plane: Plane) -> None:
    plane.have(n1=None, n2=None, n3=None)
    run = plane.training("n1", "n2", "n3", most=3)
    plane.have(n4=None)
    assert plane.ask("POST", f"runs/{run}/nodes/n4/replace").status_code == 409
    assert plane.ask("POST", f"runs/{run}/nodes/n2/replace", node="n4").status_code == 202
    assert plane.ask("DELETE", f"runs/{run}/nodes/n2/replace").status_code == 409


def test_changes_say_which_revision_they_mean(plane: Plane) -> None:
    plane.have(n1=None, n2=None, n3=None)
    run = plane.training("n1", "n2", "n3", most=3)
    seen = plane.client.get(f"runs/{run}").headers["etag"]
    url = plane.client.base_url.join(f"runs/{run}/nodes/n2/replace")
    plane.have(n4=None)
    with_nothing = {**SIGNED_IN, "content-type": "application/json"}
    assert httpx.post(url, json={}, headers=with_nothing, trust_env=False).status_code == 428
    assert plane.ask("DELETE", f"runs/{run}/nodes/n3?why=first").status_code == 202
    late = plane.client.post(f"runs/{run}/nodes/n2/replace", json={}, headers={"If-Match": seen})
    assert late.status_code == 412
    assert late.json()["action"] == "run.leave"
    assert {"who", "at", "revision"} <= set(late.json())
    now = plane.client.get(f"runs/{run}").headers["etag"]
    taken = plane.client.post(f"runs/{run}/nodes/n2/replace", json={}, headers={"If-Match": now})
    assert taken.status_code == 202


def test_a_nodes_runs_are_remembered_newest_first(plane: Plane) -> None:
    plane.have(n1=None, n2=None)
    runs = []
    for end in (State.FINISHED, State.FAILED):
        run = plane.training("n1", "n2", name=end.value)
        runs.append(run)
        for node in ("n1", "n2"):
            groups.report(plane.store, run, node, end, message="why it ended")
    rows = plane.get("nodes/n2/history")["runs"]
    assert [row["run"] for row in rows] == runs[::-1]
    assert [row["state"] for row in rows] == ["failed", "finished"]
    assert rows[0]["message"] == "why it ended"
    assert plane.get("nodes/n2/history?limit=1")["runs"] == rows[:1]


@pytest.mark.parametrize("several", [False, True])
def test_two_runs_at_once_get_idle_nodes_each(plane: Plane, several: bool) -> None:
    """The second is asked for before any agent has said that it trains the first."""
    plane.have(n1=None, n2=None, n3=None, n4=None)

    def start() -> set[str]:
        made = plane.start(**({"nodes_min": 2, "nodes_max": 2} if several else {})).json()
        return plane.on(made["id"]) if several else {made["node"]}

    assert not start() & start()
