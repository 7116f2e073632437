"""A real server with nodes that say they are slow, as the documentation has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline_backend.testing.control_plane import ControlPlane
from support.scripted import Nodes, Training, answering
from support.waiting import TRAINING_S, until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("server")) as control_plane:
        yield control_plane


@pytest.fixture(scope="module")
def nodes(server: ControlPlane) -> Iterator[Nodes]:
    with answering(server) as made:
        yield made


def replaced(training: Training) -> list[dict[str, Any]]:
    rows = training.get("/audit")["items"]
    return [row for row in rows if row["action"] == "run.replace"]


def slow_rows(nodes: Nodes, node: str) -> list[dict[str, Any]]:
    return list(nodes.server.api("GET", f"/nodes/{node}/history")["slow"])


def test_a_slow_node_is_named_and_replaced_only_if_that_is_allowed(nodes: Nodes) -> None:
    nodes.add("a1", "a2", "a3")
    allowed = Training(nodes, spares=1, replace_slow_nodes=True)
    nodes.add("b1", "b2", "b3")
    forbidden = Training(nodes, spares=1)
    nodes.add("c1", "c2", "c3")
    without = Training(nodes, spares=1, replace_slow_nodes=True)
    [cordoned] = {"c1", "c2", "c3"} - set(without.placement)
    nodes.server.api("PUT", f"/nodes/{cordoned}/cordon", {"reason": "its disk is slow"})
    slow = {training.placement[-1]: training for training in (allowed, forbidden, without)}
    [spare] = {"a1", "a2", "a3"} - set(allowed.placement)
    for node, training in slow.items():
        training.train(60, node)
        verdict = training.get("/attribution")
        assert (verdict["cause"], verdict["node"], verdict["ranks"]) == ("node", node, [2, 3])
        assert 2.7 < verdict["factor"] < 3.3
        assert node in verdict["words"]
        assert [worker["on_node"] for worker in verdict["workers"]] == training.placement
    for node, training in slow.items():
        [row] = until(
            lambda node=node: slow_rows(nodes, node), f"a verdict of {node}", TRAINING_S, 0.2
        )
        assert row["run"] == training.run
        assert row["ended_at"] is None or training is allowed, "only that one is replaced"
        assert 2.7 < row["factor"] < 3.3
        until(
            lambda t=training: t.get("/attribution")["saving"],
            f"a forecast of {node}",
            TRAINING_S,
            0.2,
        )
        saving = training.get("/attribution")["saving"]
        assert 0.4 < saving["saving_low"] <= saving["saving"] <= saving["saving_high"] < 0.8
        assert not replaced(training), "no verdict has held for 100 steps"
    for node, training in slow.items():
        training.train(130, node)
    [change] = until(lambda: replaced(allowed), "the spare to be used", TRAINING_S, 0.2)
    assert change["who"] == "the control plane"
    bad = allowed.placement[-1]
    assert bad in change["why"]
    [row] = allowed.get("/replacements")
    assert (row["node"], row["other"], row["state"]) == (bad, spare, "waiting")
    shown = {node["id"]: node for node in nodes.server.api("GET", "/nodes")}
    assert shown[bad]["cordoned"] is None
    for training in (forbidden, without):
        training.train(20, *slow)
        assert not replaced(training)
        assert training.get("/replacements") == []
    forbidden.train(130)
    until(
        lambda: slow_rows(nodes, forbidden.placement[-1])[0]["ended_at"],
        "the verdict's end",
        TRAINING_S,
        0.2,
    )
    assert forbidden.get("/attribution")["node"] is None
