"""The check before a node joins, as docs/backends/local.md and docs/rest.md describe it."""

from __future__ import annotations

from paceline.wire import NodeCheck, State
from support import groups
from support.reported import FINE, Plane


def test_a_node_that_is_bad_in_both_is_said_to_be_so(plane: Plane) -> None:
    """What the refusal says first has to be true; the worse figure helps most."""
    plane.have(n1=FINE, n2=FINE, n3=NodeCheck(20.0, 1.0, 500.0, 1_000.0))
    detail = plane.start(nodes_min=3, nodes_max=3).json()["detail"]
    assert "copies memory 10.0 times slower" in detail, detail


def test_a_slow_node_replaces_only_by_name(plane: Plane) -> None:
    plane.have(n1=40, n2=40)
    run = plane.training("n1", "n2")
    plane.have(n3=16)
    refused = plane.ask("POST", f"runs/{run}/nodes/n2/replace")
    assert refused.status_code == 409
    assert "n3 computes 2.5 times slower" in refused.json()["detail"]
    assert plane.ask("POST", f"runs/{run}/nodes/n2/replace", node="n3").status_code == 202


def test_a_run_keeps_a_node_that_has_become_slow(plane: Plane) -> None:
    """It is resumed on the nodes that it had."""
    plane.have(n1=40, n2=40, n3=40)
    run = plane.training("n1", "n2", "n3", least=3, most=3)
    for node in ("n1", "n2", "n3"):
        groups.report(plane.store, run, node, State.FAILED)
    plane.have(n3=16)
    answer = plane.ask("POST", f"runs/{run}/resume")
    assert answer.status_code == 202, answer.text
    assert plane.on(run) == {"n1", "n2", "n3"}


def test_an_idle_slow_node_is_no_better_than_a_busy_one(plane: Plane) -> None:
    plane.have("another run", n1=40, n2=40)
    plane.have(n3=16)
    answer = plane.start(nodes_min=1, nodes_max=3)
    assert plane.on(answer.json()["id"]) == {"n1", "n2"}
