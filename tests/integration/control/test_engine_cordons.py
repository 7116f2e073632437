"""Cordons of nodes that an engine gave: the engine is told, whoever is away or killed meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from paceline.wire import State
from paceline_backend import requests
from paceline_backend.backends import Engine
from paceline_backend.control.engines import Engines
from paceline_backend.requests import ConflictError, cordon, enlist, leave, uncordon
from paceline_backend.store import Store, nodes
from paceline_backend.store.audit import RequestedChange, Requester
from paceline_backend.store.new_runs import NewRun
from paceline_backend.store.nodes import cordons
from support.engine import TableEngine, table_engine
from support.groups import answer, report

ADA = Requester("ada", why="its disk is slow")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[TableEngine]]:
    monkeypatch.setattr(nodes, "ALIVE_S", 3600)  # the machine may be busy
    with table_engine() as made:
        yield made


@pytest.fixture
def worker(store: Store, bus_url: str, engine: object) -> Engines:
    return Engines(store, "worker")


@pytest.fixture
def run(store: Store, bus_url: str, worker: Engines) -> str:
    """A run with two nodes on one machine, and one on another."""
    fields: dict[str, Any] = {"nodes_max": 3, "backend": "table"}
    new = NewRun("r", "/shared/train.py", 1, "bsp", server="http://head:1", **fields)
    made = requests.launch(store, bus_url, new, ADA, start=True)
    for name, host in (("n1", "gpu7"), ("n2", "gpu7"), ("n3", "gpu8")):
        answer(store, name, run=made)
        assert enlist(store, bus_url, made, name, host).needed
        answer(store, name)  # a heartbeat changes nothing of that
    return made


def shown(store: Store) -> dict[str, tuple[bool, Any]]:
    """By listed node: whether it is cordoned, and what its engine says of that."""
    with store.read() as connection:
        listed = nodes.listed(connection)
    return {node["id"]: (node["cordoned"] is not None, said(node["in_engine"])) for node in listed}


def said(in_engine: dict[str, Any] | None) -> Any:
    if in_engine is None or in_engine["refusal"] is not None:
        return in_engine and in_engine["refusal"]
    return "waits" if in_engine["told_at"] is None else "has it"


def test_a_cordon_is_one_of_the_machine(
    store: Store, bus: redis.Redis, worker: Engines, run: str
) -> None:
    cordon(store, "n1", ADA)
    assert shown(store) == {"n1": (True, "waits"), "n2": (True, "waits"), "n3": (False, None)}
    with pytest.raises(ConflictError, match="node n2 is cordoned by ada"):
        cordon(store, "n2", ADA)
    worker.look(bus)
    worker.look(bus)
    assert TableEngine.cordons == [("gpu7", "ada: its disk is slow")]
    assert shown(store) == {"n1": (True, "has it"), "n2": (True, "has it"), "n3": (False, None)}
    uncordon(store, "n2", ADA)
    assert shown(store) == {"n1": (False, "waits"), "n2": (False, "waits"), "n3": (False, None)}
    worker.look(bus)
    worker.look(bus)
    assert TableEngine.cordons[1:] == [("gpu7", None)]
    assert shown(store) == dict.fromkeys(("n1", "n2", "n3"), (False, None))


def test_it_stays_after_the_run(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, run: str
) -> None:
    """The node is listed by the name that was cordoned, until the engine has lifted the cordon."""
    report(store, run, "n3", State.RUNNING)
    leave(store, bus_url, RequestedChange(run, ADA), "n3", cordon=True)
    worker.look(bus)
    assert TableEngine.cordons == [("gpu8", "ada: its disk is slow")]
    answer(store, "n1", "n2", "n3", left=True)
    assert shown(store) == {"n3": (True, "has it")}
    uncordon(store, "n3", ADA)
    assert shown(store) == {"n3": (False, "waits")}
    with store.read() as connection:
        assert nodes.known(connection, "n1")["cordoned"] is None
    worker.look(bus)
    assert TableEngine.cordons[1:] == [("gpu8", None)]
    assert shown(store) == {}


def test_it_waits_for_an_engine_that_is_away(
    store: Store, bus: redis.Redis, worker: Engines, run: str
) -> None:
    TableEngine.away = True
    cordon(store, "n3", ADA)
    worker.look(bus)
    assert shown(store)["n3"] == (True, "waits")
    TableEngine.away = False
    worker._outages.clear()  # its pauses are of real time
    worker.look(bus)
    assert shown(store)["n3"] == (True, "has it")


def test_what_an_engine_refuses_is_said(
    store: Store, bus: redis.Redis, worker: Engines, run: str
) -> None:
    TableEngine.refuses = "only root may"
    cordon(store, "n3", ADA)
    worker.look(bus)
    assert shown(store)["n3"] == (True, "only root may")
    TableEngine.refuses = ""
    worker.look(bus)
    assert TableEngine.cordons == []
    uncordon(store, "n3", ADA)
    worker.look(bus)
    assert TableEngine.cordons == [], "it never had the cordon"
    cordon(store, "n3", ADA)
    worker.look(bus)
    TableEngine.refuses = "only root may"
    uncordon(store, "n3", ADA)
    worker.look(bus)
    assert shown(store)["n3"] == (False, "only root may")
    TableEngine.refuses = ""
    uncordon(store, "n3", ADA)  # asks the engine again
    worker.look(bus)
    assert TableEngine.cordons[1:] == [("gpu8", None)]
    with pytest.raises(ConflictError, match="not cordoned"):
        uncordon(store, "n3", ADA)


def test_an_engine_that_cannot(
    store: Store, bus: redis.Redis, worker: Engines, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(TableEngine, "cordon")
    assert TableEngine.cordon is Engine.cordon
    cordon(store, "n3", ADA)
    worker.look(bus)
    assert shown(store)["n3"] == (True, "Table cannot cordon nodes")


def test_a_node_that_does_not_say_where_it_is(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, run: str
) -> None:
    assert enlist(store, bus_url, run, "n1").needed
    cordon(store, "n1", ADA)
    worker.look(bus)
    assert TableEngine.cordons == []
    assert "did not report" in shown(store)["n1"][1]
    assert shown(store)["n2"] == (False, None)
    uncordon(store, "n1", ADA)
    assert shown(store)["n1"] == (False, None)


@pytest.mark.parametrize("first", [cordon, uncordon])
def test_what_changes_while_the_engine_is_told(
    store: Store,
    bus: redis.Redis,
    worker: Engines,
    run: str,
    monkeypatch: pytest.MonkeyPatch,
    first: Callable[..., None],
) -> None:
    """The last word counts, also if two workers tell it: the slower one must not have it."""
    cordon(store, "n3", ADA)
    if first is uncordon:
        worker.look(bus)
        uncordon(store, "n3", ADA)
    ask = TableEngine.cordon
    other = uncordon if first is cordon else cordon

    def slowly(self: TableEngine, host: str, reason: str | None) -> None:
        monkeypatch.setattr(TableEngine, "cordon", ask)
        other(store, "n3", ADA)
        Engines(store, "another").look(bus)
        ask(self, host, reason)

    monkeypatch.setattr(TableEngine, "cordon", slowly)
    worker.look(bus)
    worker.look(bus)
    host, reason = TableEngine.cordons[-1]
    assert (host, reason is None) == ("gpu8", first is cordon)
    assert shown(store)["n3"] == ((False, None) if first is cordon else (True, "has it"))


def test_cordons_of_own_nodes_stay_as_they_were(
    store: Store, bus: redis.Redis, worker: Engines
) -> None:
    answer(store, "own")
    cordon(store, "own", ADA)
    worker.look(bus)
    assert shown(store) == {"own": (True, None)}
    uncordon(store, "own", ADA)
    with store.read() as connection:
        assert cordons.of_node(connection, "own")[0]["lifted_by"] == "ada"
