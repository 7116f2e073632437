"""A node that an engine gave is replaced by another that the engine gives, whoever is killed."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.wire import Kill, State
from paceline_backend.backends import Order
from paceline_backend.control.multi_node import NodeReconciler
from paceline_backend.insight import replacements
from paceline_backend.requests import ConflictError, cordon, join, leave, withdraw
from paceline_backend.requests.replacing import NodeReplacement, replace
from paceline_backend.store import runs
from paceline_backend.store.audit import Requester
from paceline_backend.store.nodes import run_nodes
from support.engine import TableEngine, TableRuns, become

ADA = Requester("ada", why="its disk is slow")
HOSTS = {"n1": "gpu1", "n2": "gpu2", "n3": "gpu3", "n4": "gpu4", "m1": "gpu1"}


class Replacing(TableRuns):
    """A run that has its two nodes; each look at its jobs is due."""

    by = ADA
    run: str

    def clock(self) -> float:
        self.now += 5.0
        return self.now

    def takes(self, node: str) -> bool:
        """Whether a node that the engine gave may join, as it asks."""
        self.answer(node, run=self.run)
        return self.enlist(self.run, node, HOSTS[node]).needed

    def replace(self, node: str, cordon: bool = False) -> None:
        self.ask(replace, self.run, NodeReplacement(node, cordon=cordon))

    def listed(self) -> list[tuple[str, str | None, str]]:
        """The replacements of the run: who leaves, who comes, and whether."""
        with self.store.read() as connection:
            listed = replacements.listed(connection, self.run)
        return [(each["node"], each["other"], each["state"]) for each in listed]

    def part(self, node: str) -> dict[str, Any]:
        """What is stored of the run on a node."""
        with self.store.read() as connection:
            rows = run_nodes.listed(connection, runs.key_of(connection, self.run))
        return next(each for each in rows if each["node"] == node)


@pytest.fixture
def table(table: TableRuns) -> Replacing:
    made = Replacing(table.store, table.bus, table.bus_url)
    made.run = made.begin(2, 2)
    made.look()
    become("1", "running")
    made.look()
    for name in ("n1", "n2"):
        assert made.takes(name)
        made.ready(made.run, name)
        made.report(made.run, name, State.RUNNING)
    return made


def test_the_other_node_joins_and_the_first_leaves(table: Replacing) -> None:
    table.replace("n2", cordon=True)
    assert table.listed() == [("n2", None, "waiting")]
    with pytest.raises(ConflictError, match="was already asked for a replacement of n2"):
        table.replace("n2")
    with pytest.raises(ConflictError, match="at most 2"):
        table.ask(join, table.run, 1, {})
    table.another().look(table.bus)  # the first was killed
    table.look()
    assert TableEngine.cordons == [("gpu2", "ada: its disk is slow")]
    assert [(order.nodes, order.avoid) for order in TableEngine.orders] == [(2, []), (1, ["gpu2"])]
    become("2", "running")
    assert table.takes("n3")
    assert not table.takes("n4"), "the run has one more than its most"
    steps = NodeReconciler(table.store, table.bus_url)
    steps.look(table.bus)
    assert not table.part("n2")["leaving"], "the other is not there yet"
    table.ready(table.run, "n3")
    table.report(table.run, "n3", State.STARTING, arrived=True)
    steps.look(table.bus)
    assert isinstance(table.orders("n2")[-1], Kill)
    assert table.part("n2")["leaving"]
    assert table.listed() == [("n2", "n3", "waiting")]
    table.report(table.run, "n2", State.STOPPED)
    assert table.states(table.run)["n3"] == "starting"
    table.look()
    assert len(TableEngine.orders) == 2
    assert not table.takes("n4")


def test_a_node_of_the_same_machine_is_no_other(table: Replacing) -> None:
    """An engine may not heed what it is to avoid."""
    table.replace("n1")
    assert not table.takes("m1")
    assert table.takes("n3")
    assert table.part("n3")["replaces"] == "n1"


def test_a_job_that_brings_no_node_is_asked_for_again(table: Replacing) -> None:
    table.replace("n1")
    table.look()
    become("2", "ended", "CANCELLED")
    table.look()
    assert table.listed() == [("n1", None, "failed")]
    TableEngine.refuses = "no more"
    table.replace("n1")
    table.look()
    assert table.row(table.run)["message"] == "Table refuses the job: no more"
    TableEngine.refuses = ""
    table.replace("n1")
    table.look()
    assert TableEngine.orders[-1].avoid == ["gpu1"]
    assert len({order.label for order in TableEngine.orders}) == len(TableEngine.orders)
    assert [state for _, _, state in table.listed()] == ["failed", "failed", "waiting"]


def test_a_replacement_is_taken_back(table: Replacing) -> None:
    """Its job is stopped, whether the engine had it already, and its number is not used again."""
    with pytest.raises(ConflictError, match="no replacement of n1 is pending"):
        table.ask(withdraw, table.run, "n1")
    table.replace("n1")
    table.ask(withdraw, table.run, "n1")
    table.look()
    assert len(TableEngine.orders) == 1
    table.replace("n1")
    table.look()
    table.ask(withdraw, table.run, "n1")
    assert not table.takes("n3")
    table.look()
    assert [job.state for job in TableEngine.jobs.values()] == ["running", "ended"]
    assert [state for _, _, state in table.listed()] == ["failed", "failed"]
    table.replace("n1")
    table.look()
    assert TableEngine.jobs["3"].state == "queued"
    assert len({order.label for order in TableEngine.orders}) == 3
    assert table.takes("n4")
    with pytest.raises(ConflictError, match="n4 has already replaced n1: let n4 leave"):
        table.ask(withdraw, table.run, "n1")
    assert TableEngine.jobs["3"].state == "queued"


def test_a_node_whose_replacement_died_is_replaced_again(table: Replacing) -> None:
    table.replace("n1")
    table.look()
    become("2", "running")
    assert table.takes("n3")
    table.report(table.run, "n3", State.FAILED)
    become("2", "ended")
    table.look()
    table.replace("n1")
    table.look()
    assert TableEngine.jobs["3"].state == "queued"
    with pytest.raises(ConflictError, match="already asked for a replacement of n1"):
        table.replace("n1")
    table.ask(withdraw, table.run, "n1")
    table.look()
    assert TableEngine.jobs["3"].state == "ended"


def test_a_replacement_is_taken_back_while_it_is_submitted(
    table: Replacing, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = TableEngine.submit

    def slowly(self: TableEngine, order: Order) -> str:
        ref = submit(self, order)
        table.ask(withdraw, table.run, "n1")
        return ref

    monkeypatch.setattr(TableEngine, "submit", slowly)
    table.replace("n1")
    table.look()
    table.look()
    assert TableEngine.jobs["2"].state == "ended"
    assert table.jobs(table.run) == {"0": "1"}


def test_a_node_that_goes_by_itself_is_replaced_all_the_same(table: Replacing) -> None:
    table.replace("n2")
    table.report(table.run, "n2", State.STOPPED)
    assert table.takes("n3")
    assert table.part("n3")["replaces"] is None
    with pytest.raises(ConflictError, match="does not train on n2"):
        table.replace("n2")
    with pytest.raises(ConflictError, match="needs 2 nodes"):
        table.ask(leave, table.run, "n3")


def test_what_only_we_have_cordoned_is_avoided(table: Replacing) -> None:
    """Where the engine refuses a cordon, its jobs are asked for on other machines."""
    TableEngine.refuses = "only root may"
    cordon(table.store, "n1", ADA)
    table.look()
    TableEngine.refuses = ""
    table.replace("n2")
    table.look()
    assert TableEngine.orders[-1].avoid == ["gpu1", "gpu2"]
