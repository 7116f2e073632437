"""What operators do about a slow node, as docs/backends/local.md and docs/rest.md say."""

from __future__ import annotations

import pytest

from paceline.wire import State
from support import groups
from support.reported import Plane

WHY = "its disk is slow"


def actions(plane: Plane, run: str) -> list[str]:
    return [item["action"] for item in plane.get(f"runs/{run}/audit")["items"]]


def cordon(plane: Plane, node: str, why: str = WHY) -> None:
    answer = plane.ask("PUT", f"nodes/{node}/cordon", reason=why)
    assert answer.status_code == 200, answer.text


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


def test_a_node_makes_way_for_the_runs_spare(plane: Plane) -> None:
    plane.have(n1=None, n2=None, n3=None, n4=None)
    run = plane.start(nodes_min=2, nodes_max=2, spares=1).json()["id"]
    spare = next(node["id"] for node in plane.get("nodes") if node["spare_of"] == run)
    train = sorted(plane.on(run))
    idle = ({"n1", "n2", "n3", "n4"} - {spare, *train}).pop()
    for node in train:
        groups.ready(plane.store, run, node)
        groups.report(plane.store, run, node, State.RUNNING)
    leaves = train[1]
    before = len(actions(plane, run))
    body = {"cordon": True, "why": WHY}
    answer = plane.ask("POST", f"runs/{run}/nodes/{leaves}/replace", **body)
    assert answer.status_code == 202, answer.text
    row = next(row for row in answer.json() if row["node"] == spare)
    assert row["replaces"] == leaves
    assert idle not in {row["node"] for row in answer.json()}
    assert plane.node(leaves)["cordoned"]["reason"] == WHY
    assert actions(plane, run)[: -before or None] == ["run.replace"]
    [shown] = plane.get(f"runs/{run}/replacements")
    assert (shown["node"], shown["other"], shown["why"]) == (leaves, spare, WHY)
    assert shown["state"] == "waiting"
    again = plane.ask("POST", f"runs/{run}/nodes/{leaves}/replace", node=idle)
    assert again.status_code == 409
    assert spare in again.json()["detail"]
    [entry] = plane.get(f"nodes/{spare}/history")["runs"]
    assert entry["replaces"] == leaves


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
