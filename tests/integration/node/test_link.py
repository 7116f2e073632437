"""The agent's connection to the bus, across outages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from paceline import wire
from paceline.node.link import Commands, Link
from paceline.wire import Kill, Launch, NodeState
from paceline.wire.bus import publish
from paceline_backend.server.embedded import EmbeddedBus
from support.node import link_to
from support.waiting import until


def command(bus_url: str, run: str) -> None:
    with redis.Redis.from_url(bus_url) as bus:
        publish(bus, wire.commands("here"), Kill("because", 0), run)


@pytest.fixture
def link(bus_url: str) -> Iterator[Link]:
    with link_to(bus_url) as link:
        yield link


def read(commands: Commands) -> list[str]:
    return [run for run, _ in commands.read(0.01)]


def beat() -> NodeState:
    return NodeState("here", "host", 1, 1, [], time.time(), "0")


def test_commands_from_before_the_start_are_not_for_us(bus_url: str, link: Link) -> None:
    command(bus_url, "old")
    commands = Commands(link)
    assert not commands.started
    assert read(commands) == []
    assert commands.started
    command(bus_url, "new")
    assert read(commands) == ["new"]
    assert read(commands) == []


def test_two_readers_of_a_node_each_get_all(bus_url: str, link: Link) -> None:
    readers = [Commands(link) for _ in range(2)]
    for reader in readers:
        read(reader)
    command(bus_url, "r")
    assert [read(reader) for reader in readers] == [["r"], ["r"]]


def test_what_is_not_understood_is_passed_over(
    bus_url: str, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    commands = Commands(link)
    read(commands)
    with redis.Redis.from_url(bus_url) as bus:
        bus.xadd(wire.commands("here"), {"v": "99", "run": "r", "data": "?"})
        publish(bus, wire.commands("here"), Launch("x.py", [], 1, {}), "r")
    assert commands.read(0.01) == [("r", Launch("x.py", [], 1, {}))]
    assert "protocol version 99" in caplog.text


def test_each_command_once_across_an_outage(tmp_path: Path) -> None:
    with EmbeddedBus(tmp_path) as bus, link_to(bus.url) as link:
        commands = Commands(link)
        read(commands)
        command(bus.url, "before")
        assert read(commands) == ["before"]
        command(bus.url, "unread")
        bus.stop()
        assert read(commands) == []
        assert not link.up
        assert not link.report(beat())
        bus.start()
        command(bus.url, "after")
        seen: list[str] = []

        def both() -> bool:
            seen.extend(read(commands))
            return len(seen) >= 2

        until(both, "the commands of the outage")
        assert seen == ["unread", "after"]
        assert read(commands) == []
        assert link.up
        assert link.report(beat())


def test_absent_bus_is_not_asked_at_every_call(tmp_path: Path) -> None:
    with EmbeddedBus(tmp_path) as bus:
        pass
    with link_to(bus.url) as link:
        assert link.attempt(lambda client: bool(client.ping())) is None
        calls = []
        assert link.attempt(calls.append) is None  # type: ignore[func-returns-value]
    assert not calls, "it waits a second before it asks again"


def test_password_is_not_shown() -> None:
    with link_to("redis://:secret@host:6379/0") as link:
        assert link.place == "host:6379"
