"""Cordons of nodes that an engine gave: the engine is told, whoever is away or killed meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.wire import State
from paceline_backend.backends import Engine
from paceline_backend.requests import ConflictError, cordon, leave, uncordon
from paceline_backend.store import nodes
from paceline_backend.store.audit import Requester
from paceline_backend.store.nodes import cordons
from support.engine import TableEngine, TableRuns

ADA = Requester("ada", why="its disk is slow")


@pytest.fixture
def run(table: TableRuns) -> str:
    """A run with two nodes on one machine, and one on another."""
    table.by = ADA
    made = table.begin(1, 3)
    for name, host in (("n1", "gpu7"), ("n2", "gpu7"), ("n3", "gpu8")):
        table.answer(name, run=made)
        assert table.enlist(made, name, host).needed
        table.answer(name)  # a heartbeat changes nothing of that
    return made


def shown(table: TableRuns) -> dict[str, tuple[bool, Any]]:
    """By listed node: whether it is cordoned, and what its engine says of that."""
    with table.store.read() as connection:
        listed = nodes.listed(connection)
    return {node["id"]: (node["cordoned"] is not None, said(node["in_engine"])) for node in listed}


def said(in_engine: dict[str, Any] | None) -> Any:
    if in_engine is None or in_engine["refusal"] is not None:
        return in_engine and in_engine["refusal"]
    return "waits" if in_engine["told_at"] is None else "has it"


def test_a_cordon_is_one_of_the_machine(table: TableRuns, run: str) -> None:
    cordon(table.store, "n1", ADA)
    assert shown(table) == {"n1": (True, "waits"), "n2": (True, "waits"), "n3": (False, None)}
    with pytest.raises(ConflictError, match="node n2 is cordoned by ada"):
        cordon(table.store, "n2", ADA)
    table.look()
    table.look()
    assert TableEngine.cordons == [("gpu7", "ada: its disk is slow")]
    assert shown(table) == {"n1": (True, "has it"), "n2": (True, "has it"), "n3": (False, None)}
    uncordon(table.store, "n2", ADA)
    assert shown(table) == {"n1": (False, "waits"), "n2": (False, "waits"), "n3": (False, None)}
    table.look()
    table.look()
    assert TableEngine.cordons[1:] == [("gpu7", None)]
    assert shown(table) == dict.fromkeys(("n1", "n2", "n3"), (False, None))


def test_it_stays_after_the_run(table: TableRuns, run: str) -> None:
    """The node is listed by the name that was cordoned, until the engine has lifted the cordon."""
    table.report(run, "n3", State.RUNNING)
    table.ask(leave, run, "n3", cordon=True)
    table.look()
    assert TableEngine.cordons == [("gpu8", "ada: its disk is slow")]
    table.answer("n1", "n2", "n3", left=True)
    assert shown(table) == {"n3": (True, "has it")}
    uncordon(table.store, "n3", ADA)
    assert shown(table) == {"n3": (False, "waits")}
    with table.store.read() as connection:
        assert nodes.known(connection, "n1")["cordoned"] is None
    table.look()
    assert TableEngine.cordons[1:] == [("gpu8", None)]
    assert shown(table) == {}


def test_it_waits_for_an_engine_that_is_away(table: TableRuns, run: str) -> None:
    TableEngine.away = True
    cordon(table.store, "n3", ADA)
    table.look()
    assert shown(table)["n3"] == (True, "waits")
    TableEngine.away = False
    table.worker._outages.clear()  # its pauses are of real time
    table.look()
    assert shown(table)["n3"] == (True, "has it")


def test_what_an_engine_refuses_is_said(table: TableRuns, run: str) -> None:
    TableEngine.refuses = "only root may"
    cordon(table.store, "n3", ADA)
    table.look()
    assert shown(table)["n3"] == (True, "only root may")
    TableEngine.refuses = ""
    table.look()
    assert TableEngine.cordons == []
    uncordon(table.store, "n3", ADA)
    table.look()
    assert TableEngine.cordons == [], "it never had the cordon"
    cordon(table.store, "n3", ADA)
    table.look()
    TableEngine.refuses = "only root may"
    uncordon(table.store, "n3", ADA)
    table.look()
    assert shown(table)["n3"] == (False, "only root may")
    TableEngine.refuses = ""
    uncordon(table.store, "n3", ADA)  # asks the engine again
    table.look()
    assert TableEngine.cordons[1:] == [("gpu8", None)]
    with pytest.raises(ConflictError, match="not cordoned"):
        uncordon(table.store, "n3", ADA)


def test_an_engine_that_cannot(table: TableRuns, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TableEngine, "cordon")
    assert TableEngine.cordon is Engine.cordon
    cordon(table.store, "n3", ADA)
    table.look()
    assert shown(table)["n3"] == (True, "Table cannot cordon nodes")


def test_a_node_that_does_not_say_where_it_is(table: TableRuns, run: str) -> None:
    assert table.enlist(run, "n1").needed
    cordon(table.store, "n1", ADA)
    table.look()
    assert TableEngine.cordons == []
    assert "did not report" in shown(table)["n1"][1]
    assert shown(table)["n2"] == (False, None)
    uncordon(table.store, "n1", ADA)
    assert shown(table)["n1"] == (False, None)


@pytest.mark.parametrize("first", [cordon, uncordon])
def test_what_changes_while_the_engine_is_told(
    table: TableRuns, run: str, monkeypatch: pytest.MonkeyPatch, first: Callable[..., None]
) -> None:
    """The last word counts, also if two workers tell it: the slower one must not have it."""
    cordon(table.store, "n3", ADA)
    if first is uncordon:
        table.look()
        uncordon(table.store, "n3", ADA)
    ask = TableEngine.cordon
    other = uncordon if first is cordon else cordon

    def slowly(self: TableEngine, host: str, reason: str | None) -> None:
        monkeypatch.setattr(TableEngine, "cordon", ask)
        other(table.store, "n3", ADA)
        table.another("another").look(table.bus)
        ask(self, host, reason)

    monkeypatch.setattr(TableEngine, "cordon", slowly)
    table.look()
    table.look()
    host, reason = TableEngine.cordons[-1]
    assert (host, reason is None) == ("gpu8", first is cordon)
    assert shown(table)["n3"] == ((False, None) if first is cordon else (True, "has it"))


def test_cordons_of_own_nodes_stay_as_they_were(table: TableRuns) -> None:
    table.answer("own")
    cordon(table.store, "own", ADA)
    table.look()
    assert shown(table) == {"own": (True, None)}
    uncordon(table.store, "own", ADA)
    with table.store.read() as connection:
        assert cordons.of_node(connection, "own")[0]["lifted_by"] == "ada"
