"""A node of a run that lost its way to the bus: its ranks train on, as other ranks' steps say."""

from __future__ import annotations

import pytest
import redis

from paceline.wire import State, StepBatch
from paceline_backend.control.silent_runs import SilentRuns
from paceline_backend.store import Store, nodes, telemetry
from paceline_backend.store.nodes import run_nodes
from support.groups import answer, launch, ready, report, states
from support.records import hello, record


class Looks:
    """A check every five seconds, and what comes of a run on two nodes meanwhile."""

    def __init__(self, store: Store, bus: redis.Redis, bus_url: str) -> None:
        self._store, self._bus, self._now, self._seq = store, bus, 0.0, 0
        self._silent_runs = SilentRuns(store, clock=lambda: self._now)
        self.run = launch(store, bus_url)
        for node in ("n1", "n2", "n3"):
            ready(store, self.run, node)
        telemetry.write(store, [(self.run, hello(world=3))])
        for node in ("n1", "n2", "n3"):
            report(store, self.run, node, State.RUNNING)
        self._silent_runs.look(self._bus)

    def look(self, step: int, step_s: float = 0.1, *, attempt: int = 0) -> str:
        """Nodes 1 and 3 are heard, with their ranks' steps; the state of node 2 afterwards."""
        answer(self._store, "n1", "n3")
        for rank in (0, 2):
            made = record(step, rank, attempt=attempt, seq=self._seq, step_s=step_s)
            telemetry.write(self._store, [(self.run, StepBatch([made]))])
        self._seq += 1
        self._now += 5.0
        self._silent_runs.look(self._bus)
        return states(self._store, self.run)["n2"]


@pytest.fixture
def looks(store: Store, bus: redis.Redis, bus_url: str) -> Looks:
    answer(store, "n1", "n2", "n3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "NODE_ALIVE_S", 3600)  # the machine may be busy
        return Looks(store, bus, bus_url)


def test_a_node_that_is_cut_off_and_trains_is_not_lost(store: Store, looks: Looks) -> None:
    assert [looks.look(step) for step in range(8)] == ["running"] * 8


def test_a_node_whose_ranks_come_no_further_is_lost(store: Store, looks: Looks) -> None:
    assert [looks.look(step) for step in range(4)] == ["running"] * 4
    assert [looks.look(3) for _ in range(3)][-1] == "failed"


def test_steps_of_an_attempt_without_the_node_are_no_sign_of_its_life(
    store: Store, looks: Looks
) -> None:
    looks.look(0)
    telemetry.write(store, [(looks.run, hello(world=3, attempt=1, step=1))])
    assert "failed" in [looks.look(step, attempt=1) for step in range(1, 5)]


def test_long_steps_give_a_node_longer(store: Store, looks: Looks) -> None:
    """A step takes 12 s: it is still under way."""
    assert [looks.look(0, 12.0) for _ in range(4)] == ["running"] * 4


def test_a_run_shows_which_of_its_nodes_answer(
    store: Store, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 3600)
    answer(store, "n2", left=True)
    with store.read() as connection:
        group = run_nodes.group(connection, looks.run)
        assert group is not None
        shown = {row["node"]: row["alive"] for row in run_nodes.listed(connection, group.key)}
    assert shown == {"n1": True, "n2": False, "n3": True}
