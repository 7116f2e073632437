"""A node that an engine gave is replaced by another that the engine gives, whoever is killed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from paceline.wire import Kill, State
from paceline_backend import requests
from paceline_backend.backends import Order
from paceline_backend.control.engines import Engines
from paceline_backend.control.multi_node import NodeReconciler
from paceline_backend.insight import replacements
from paceline_backend.requests import ConflictError, cordon, enlist, join, leave, withdraw
from paceline_backend.requests.replacing import NodeReplacement, replace
from paceline_backend.store import Store, nodes, runs
from paceline_backend.store.audit import RequestedChange, Requester
from paceline_backend.store.new_runs import NewRun
from paceline_backend.store.nodes import run_nodes
from support.engine import TableEngine, become, table_engine
from support.groups import answer, orders, ready, report, states

ADA = Requester("ada", why="its disk is slow")
HOSTS = {"n1": "gpu1", "n2": "gpu2", "n3": "gpu3", "n4": "gpu4", "m1": "gpu1"}


class Clock:
    """Time that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        self.now += 5.0  # each look is due
        return self.now


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[TableEngine]]:
    monkeypatch.setattr(nodes, "ALIVE_S", 3600)  # the machine may be busy
    with table_engine() as made:
        yield made


@pytest.fixture
def worker(store: Store, bus_url: str, engine: object) -> Engines:
    return Engines(store, "worker", clock=Clock())


@pytest.fixture
def run(store: Store, bus: redis.Redis, bus_url: str, worker: Engines) -> str:
    """A run that has its two nodes."""
    fields: dict[str, Any] = {"nodes_min": 2, "nodes_max": 2, "backend": "table"}
    new = NewRun("r", "/shared/train.py", 1, "bsp", server="http://head:1", **fields)
    made = requests.launch(store, bus_url, new, ADA, start=True)
    worker.look(bus)
    become("1", "running")
    worker.look(bus)
    for name in ("n1", "n2"):
        assert come(store, bus_url, made, name).needed
        ready(store, made, name)
        report(store, made, name, State.RUNNING)
    return made


def come(store: Store, bus_url: str, run: str, name: str) -> Any:
    """A node that the engine gave asks to join."""
    answer(store, name, run=run)
    return enlist(store, bus_url, run, name, HOSTS[name])


def shown(store: Store, run: str) -> list[tuple[str, str | None, str]]:
    """The replacements of a run: who leaves, who comes, and whether."""
    with store.read() as connection:
        listed = replacements.listed(connection, run)
    return [(each["node"], each["other"], each["state"]) for each in listed]


def row(store: Store, run: str, node: str) -> dict[str, Any]:
    with store.read() as connection:
        rows = run_nodes.listed(connection, runs.key_of(connection, run))
    return next(each for each in rows if each["node"] == node)


def test_the_other_node_joins_and_the_first_leaves(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, run: str
) -> None:
    replace(store, bus_url, RequestedChange(run, ADA), NodeReplacement("n2", cordon=True))
    assert shown(store, run) == [("n2", None, "waiting")]
    with pytest.raises(ConflictError, match="was already asked for a replacement of n2"):
        replace(store, bus_url, RequestedChange(run, ADA), NodeReplacement("n2"))
    with pytest.raises(ConflictError, match="at most 2"):
        join(store, bus_url, RequestedChange(run, ADA), 1, {})
    Engines(store, "worker", clock=Clock()).look(bus)  # the first was killed
    worker.look(bus)
    assert TableEngine.cordons == [("gpu2", "ada: its disk is slow")]
    assert [(order.nodes, order.avoid) for order in TableEngine.orders] == [(2, []), (1, ["gpu2"])]
    become("2", "running")
    assert come(store, bus_url, run, "n3").needed
    assert not come(store, bus_url, run, "n4").needed, "the run has one more than its most"
    steps = NodeReconciler(store, bus_url)
    steps.look(bus)
    assert not row(store, run, "n2")["leaving"], "the other is not there yet"
    ready(store, run, "n3")
    report(store, run, "n3", State.STARTING, arrived=True)
    steps.look(bus)
    assert isinstance(orders(bus, "n2")[-1], Kill)
    assert row(store, run, "n2")["leaving"]
    assert shown(store, run) == [("n2", "n3", "waiting")]
    report(store, run, "n2", State.STOPPED)
    assert states(store, run)["n3"] == "starting"
    worker.look(bus)
    assert len(TableEngine.orders) == 2
    assert not come(store, bus_url, run, "n4").needed


def test_a_node_of_the_same_machine_is_no_other(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, run: str
) -> None:
    """An engine may not heed what it is to avoid."""
    replace(store, bus_url, RequestedChange(run, ADA), NodeReplacement("n1"))
    assert not come(store, bus_url, run, "m1").needed
    assert come(store, bus_url, run, "n3").needed
    assert row(store, run, "n3")["replaces"] == "n1"


def test_a_job_that_brings_no_node_is_asked_for_again(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, run: str
) -> None:
    replace(store, bus_url, RequestedChange(run, ADA), NodeReplacement("n1"))
    worker.look(bus)
    become("2", "ended", "CANCELLED")
    worker.look(bus)
    assert shown(store, run) == [("n1", None, "failed")]
    TableEngine.refuses = "no more"
    replace(store, bus_url, RequestedChange(run, ADA), NodeReplacement("n1"))
    worker.look(bus)
    assert runs.get(store, run)["message"] == "Table refuses the job: no more"
    TableEngine.refuses = ""
    replace(store, bus_url, RequestedChange(run, ADA), NodeReplacement("n1"))
    worker.look(bus)
    assert TableEngine.orders[-1].avoid == ["gpu1"]
    assert len({order.label for order in TableEngine.orders}) == len(TableEngine.orders)
    assert [state for _, _, state in shown(store, run)] == ["failed", "failed", "waiting"]


def test_a_replacement_is_taken_back(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, run: str
) -> None:
    """Its job is stopped, whether the engine had it already, and its number is not used again."""
    with pytest.raises(ConflictError, match="no replacement of n1 is pending"):
        withdraw(store, bus_url, RequestedChange(run, ADA), "n1")
    replace(store, bus_url, RequestedChange(run, ADA), NodeReplacement("n1"))
    withdraw(store, bus_url, RequestedChange(run, ADA), "n1")
    worker.look(bus)
    assert len(TableEngine.orders) == 1
    replace(store, bus_url, RequestedChange(run, ADA), NodeReplacement("n1"))
    worker.look(bus)
    withdraw(store, bus_url, RequestedChange(run, ADA), "n1")
    assert not come(store, bus_url, run, "n3").needed
    worker.look(bus)
    assert [job.state for job in TableEngine.jobs.values()] == ["running", "ended"]
    assert [state for _, _, state in shown(store, run)] == ["failed", "failed"]
    replace(store, bus_url, RequestedChange(run, ADA), NodeReplacement("n1"))
    worker.look(bus)
    assert TableEngine.jobs["3"].state == "queued"
    assert len({order.label for order in TableEngine.orders}) == 3
    assert come(store, bus_url, run, "n4").needed
    with pytest.raises(ConflictError, match="n4 has already replaced n1: let n4 leave"):
        withdraw(store, bus_url, RequestedChange(run, ADA), "n1")
    assert TableEngine.jobs["3"].state == "queued"


def test_a_node_whose_replacement_died_is_replaced_again(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, run: str
) -> None:
    replace(store, bus_url, RequestedChange(run, ADA), NodeReplacement("n1"))
    worker.look(bus)
    become("2", "running")
    assert come(store, bus_url, run, "n3").needed
    report(store, run, "n3", State.FAILED)
    become("2", "ended")
    worker.look(bus)
    replace(store, bus_url, RequestedChange(run, ADA), NodeReplacement("n1"))
    worker.look(bus)
    assert TableEngine.jobs["3"].state == "queued"
    with pytest.raises(ConflictError, match="already asked for a replacement of n1"):
        replace(store, bus_url, RequestedChange(run, ADA), NodeReplacement("n1"))
    withdraw(store, bus_url, RequestedChange(run, ADA), "n1")
    worker.look(bus)
    assert TableEngine.jobs["3"].state == "ended"


def test_a_replacement_is_taken_back_while_it_is_submitted(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    worker: Engines,
    run: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit = TableEngine.submit

    def slowly(self: TableEngine, order: Order) -> str:
        ref = submit(self, order)
        withdraw(store, bus_url, RequestedChange(run, ADA), "n1")
        return ref

    monkeypatch.setattr(TableEngine, "submit", slowly)
    replace(store, bus_url, RequestedChange(run, ADA), NodeReplacement("n1"))
    worker.look(bus)
    worker.look(bus)
    assert TableEngine.jobs["2"].state == "ended"
    assert runs.get(store, run)["backend_jobs"]["jobs"] == {"0": "1"}


def test_a_node_that_goes_by_itself_is_replaced_all_the_same(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, run: str
) -> None:
    replace(store, bus_url, RequestedChange(run, ADA), NodeReplacement("n2"))
    report(store, run, "n2", State.STOPPED)
    assert come(store, bus_url, run, "n3").needed
    assert row(store, run, "n3")["replaces"] is None
    with pytest.raises(ConflictError, match="does not train on n2"):
        replace(store, bus_url, RequestedChange(run, ADA), NodeReplacement("n2"))
    with pytest.raises(ConflictError, match="needs 2 nodes"):
        leave(store, bus_url, RequestedChange(run, ADA), "n3")


def test_what_only_we_have_cordoned_is_avoided(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, run: str
) -> None:
    """Where the engine refuses a cordon, its jobs are asked for on other machines."""
    TableEngine.refuses = "only root may"
    cordon(store, "n1", ADA)
    worker.look(bus)
    TableEngine.refuses = ""
    replace(store, bus_url, RequestedChange(run, ADA), NodeReplacement("n2"))
    worker.look(bus)
    assert TableEngine.orders[-1].avoid == ["gpu1", "gpu2"]
