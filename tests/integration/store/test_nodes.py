"""Which nodes live: by the time at which we heard of them, never by their own clocks."""

from __future__ import annotations

import time

import pytest
import sqlalchemy as sa

from paceline.node.agent import HEARTBEAT_S
from paceline.wire import NodeState
from paceline_backend.store import Store, nodes, schema, telemetry


def alive(store: Store) -> list[bool]:
    with store.read() as connection:
        return [node["alive"] for node in nodes.listed(connection)]


def test_a_nodes_clock_says_nothing_about_whether_it_lives(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be behind, ahead, and set while the agent works."""
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 3600)  # the machine may be busy
    for off_s in (-7200.0, 7200.0, 0.0, -7200.0, -86_400.0):
        at = time.time() + off_s
        telemetry.write(store, [("", NodeState("n", "host", 8, 2**40, [], at, "0.1.0"))])
        assert alive(store) == [True], f"{off_s:g} s off"
    left = NodeState("n", "host", 8, 2**40, [], at - 3600, "0.1.0", left=True)
    telemetry.write(store, [("", left)])
    assert alive(store) == [False]


def test_a_dead_node_is_shown_within_ten_seconds() -> None:
    assert nodes.NODE_ALIVE_S + HEARTBEAT_S < 10
    assert nodes.NODE_ALIVE_S > 3 * HEARTBEAT_S, "two heartbeats may be lost"


def test_a_node_without_heartbeats_is_dead_whatever_clock_was_set(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 3600)  # the machine may be busy
    telemetry.write(store, [("", NodeState("n", "host", 8, 2**40, [], 0.0, "0.1.0"))])
    assert alive(store) == [True]
    for off_s in (-3601.0, 7200.0):  # 7200: the database's clock has been set back
        with store.write() as connection:
            at = time.time() + off_s
            connection.execute(sa.update(schema.nodes).values(heartbeat_at=at))
        assert alive(store) == [False], f"{off_s:g} s"
