"""The check before a node joins, as docs/backends/local.md and docs/rest.md describe it."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.wire import NodeCheck, State
from support import groups
from support.command_line import in_process
from support.reported import FINE, Plane, computes, copies

SLOW = "n3 computes 2.5 times slower than the median of 3 nodes (16 GFLOP/s per core, median 40)"


@pytest.mark.parametrize(
    ("nodes", "asked", "expected"),
    [
        pytest.param({"n1": 40, "n2": 40, "n3": 16}, (2, 3), {"n1", "n2"}, id="throttled"),
        pytest.param({"n1": 40, "n2": 40, "n3": 40}, (3, 3), {"n1", "n2", "n3"}, id="all fine"),
        pytest.param({"n1": 16}, (1, 3), {"n1"}, id="a first node is the median"),
        pytest.param({"n1": 40, "n2": 16, "n3": 16}, (3, 3), {"n1", "n2", "n3"}, id="most bad"),
        pytest.param(
            {"n1": 40, "n2": 40, "n3": 16, "n4": 16}, (2, 4), {"n1", "n2"}, id="half of them bad"
        ),
        pytest.param(
            {"n1": 40, "n2": 36, "n3": 44, "n4": 30}, (4, 4), {"n1", "n2", "n3", "n4"}, id="noise"
        ),
        pytest.param({"n1": 30, "n2": 30, "n3": 20}, (3, 3), {"n1", "n2", "n3"}, id="1.5 times"),
        pytest.param({"n1": 30, "n2": 30, "n3": 19.8}, (2, 3), {"n1", "n2"}, id="a little more"),
        pytest.param({"n1": 40, "n2": 40, "n3": None}, (3, 3), {"n1", "n2", "n3"}, id="unknown"),
        pytest.param(
            {"n1": FINE, "n2": FINE, "n3": NodeCheck(40.0, 10.0, 5.0, 1_000.0)},
            (3, 3),
            {"n1", "n2", "n3"},
            id="a slow disk",
        ),
        pytest.param(
            {"n1": FINE, "n2": FINE, "n3": copies(4.0)}, (2, 3), {"n1", "n2"}, id="slow memory"
        ),
    ],
)
def test_nodes_taken_by_number(
    plane: Plane, nodes: dict[str, Any], asked: tuple[int, int], expected: set[str]
) -> None:
    plane.have(**nodes)
    answer = plane.start(nodes_min=asked[0], nodes_max=asked[1])
    assert answer.status_code == 201, answer.text
    assert plane.on(answer.json()["id"]) == expected


@pytest.mark.parametrize("factor", [0, 3])
def test_another_factor_takes_the_slow_node(plane: Plane, factor: float) -> None:
    plane.have(n1=40, n2=40, n3=16)
    answer = plane.start(nodes_min=3, nodes_max=3, join_check=factor)
    assert answer.status_code == 201, answer.text
    assert plane.on(answer.json()["id"]) == {"n1", "n2", "n3"}
    assert answer.json()["join_check"] == factor


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        pytest.param(computes(16.0), [SLOW], id="arithmetic"),
        pytest.param(
            copies(4.0), ["n3 copies memory 2.5 times slower", "4 GB/s, median 10"], id="memory"
        ),
    ],
)
def test_a_refusal_says_how_slow_the_node_is(
    plane: Plane, bad: NodeCheck, words: list[str]
) -> None:
    plane.have(n1=FINE, n2=FINE, n3=bad)
    answer = plane.start(nodes_min=3, nodes_max=3)
    assert answer.status_code == 409
    for said in words:
        assert said in answer.json()["detail"]


def test_a_node_that_is_bad_in_both_is_said_to_be_so(plane: Plane) -> None:
    """What the refusal says first has to be true; the worse figure helps most."""
    plane.have(n1=FINE, n2=FINE, n3=NodeCheck(20.0, 1.0, 500.0, 1_000.0))
    detail = plane.start(nodes_min=3, nodes_max=3).json()["detail"]
    assert "copies memory 10.0 times slower" in detail, detail


@pytest.mark.parametrize(("factor", "status"), [(-1, 422), (0.5, 422), (0, 201), (1, 201)])
def test_the_factors_bounds(plane: Plane, factor: float, status: int) -> None:
    plane.have(n1=40)
    assert plane.start(nodes_max=2, join_check=factor).status_code == status


def test_a_slow_node_joins_only_by_name(plane: Plane) -> None:
    plane.have(n1=40, n2=40)
    run = plane.training("n1", "n2", most=3)
    plane.have(n3=16)
    refused = plane.ask("POST", f"runs/{run}/nodes", nodes=1)
    assert refused.status_code == 409
    assert "n3 computes 2.5 times slower" in refused.json()["detail"]
    assert plane.on(run) == {"n1", "n2"}
    assert plane.ask("POST", f"runs/{run}/nodes", nodes=["n3"]).status_code == 202
    assert plane.on(run) == {"n1", "n2", "n3"}


def test_a_slow_node_replaces_only_by_name(plane: Plane) -> None:
    plane.have(n1=40, n2=40)
    run = plane.training("n1", "n2")
    plane.have(n3=16)
    refused = plane.ask("POST", f"runs/{run}/nodes/n2/replace")
    assert refused.status_code == 409
    assert "n3 computes 2.5 times slower" in refused.json()["detail"]
    assert plane.ask("POST", f"runs/{run}/nodes/n2/replace", node="n3").status_code == 202


def test_a_slow_node_is_no_spare(plane: Plane) -> None:
    plane.have(n1=40, n2=40, n3=16)
    refused = plane.start(nodes_min=2, nodes_max=2, spares=1)
    assert refused.status_code == 409
    assert "n3 computes 2.5 times slower" in refused.json()["detail"]


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


def test_whose_machine_is_measured_again(plane: Plane) -> None:
    plane.have(n1=40, n2=40)
    plane.have(plane.training("n1", "n2"), n1=40)
    plane.have(n3=40)
    assert plane.ask("POST", "nodes/n3/check").status_code == 202
    assert plane.ask("POST", "nodes/n1/check").status_code == 409, "ranks train there"
    assert plane.ask("POST", "nodes/nobody/check").status_code == 404
    groups.answer(plane.store, "n3", left=True)
    assert plane.ask("POST", "nodes/n3/check").status_code == 409, "its agent does not answer"


def test_figures_and_their_time_are_shown(plane: Plane) -> None:
    plane.have(n1=FINE, n2=None)
    shown = plane.node("n1")
    assert shown["check"] == {"compute_gflops": 40.0, "memory_gbps": 10.0, "disk_mbps": 500.0}
    assert shown["checked_at"] is not None
    assert plane.node("n2")["check"] is None


def test_an_idle_slow_node_is_no_better_than_a_busy_one(plane: Plane) -> None:
    plane.have("another run", n1=40, n2=40)
    plane.have(n3=16)
    answer = plane.start(nodes_min=1, nodes_max=3)
    assert plane.on(answer.json()["id"]) == {"n1", "n2"}


def test_the_command_line_shows_checks_and_cordons(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = in_process(monkeypatch, capsys)
    server = ("--server", plane.url)
    plane.have(n1=NodeCheck(41.5, 9.5, 512.0, 1_000.0))
    assert main("cordon", "n1", "--why", "its disk is slow", *server)[0] == 0
    code, out, _ = main("nodes", *server)
    assert code == 0
    for shown in ("n1", "41.5", "9.5", "512", "its disk is slow"):
        assert shown in out, out
    assert main("uncordon", "n1", *server)[0] == 0
    assert "its disk is slow" not in main("nodes", *server)[1]
    code, _, err = main("uncordon", "n1", *server)
    assert code != 0
    assert "n1" in err
