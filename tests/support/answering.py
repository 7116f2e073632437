"""Nodes that answer what the control plane asks, as their agents do, without ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.node import answering, rundir
from paceline.node.link import Commands, Link
from paceline.node.rundir import LauncherStatus, Record
from paceline.node.session import BusSession
from paceline.wire import Ask, RunState, State, commands, node_telemetry
from paceline_backend.requests import sessions
from paceline_backend.store import Store, meta
from support.groups import answer
from support.waiting import until


@dataclass
class Node:
    """A node's data directory, and what the node was asked."""

    name: str
    data: Path
    control: str
    asked: list[Ask] = field(default_factory=list)
    deaf: bool = False  # it answers nothing
    before: Callable[[Ask], object] = lambda _: None  # is called before it answers

    def run(self, run: str, attempt: int = 0, state: State = State.RUNNING) -> None:
        """A run is here, has come to an attempt, and is in a state."""
        directory = rundir.directory_of(self.data, run)
        directory.mkdir(parents=True, exist_ok=True)
        states = [RunState(state, 1.0, self.name, attempt)]
        rundir.write(directory / "launcher.json", LauncherStatus(attempt))
        record = Record(run, self.name, "the agent", self.control, states)
        rundir.write(directory / "run.json", record)

    def path(self, run: str, rank: int, attempt: int = 0, output: str = "stdout") -> Path:
        return rundir.rank_log(rundir.directory_of(self.data, run), attempt, rank, output)

    def log(self, run: str, rank: int, text: str | bytes, *of: Any) -> None:
        """Adds to the log of a rank; `of`: attempt and output."""
        path = self.path(run, rank, *of)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(text.encode() if isinstance(text, str) else text)


@contextmanager
def node(store: Store, bus_url: str, name: str, data: Path) -> Iterator[Node]:
    """A node that answers until the block ends, as an agent with a session."""
    answer(store, name)
    control = meta.control_id(store)
    made = Node(name, data / name, control)
    stop, started = threading.Event(), threading.Event()

    def session() -> BusSession:
        given = sessions.of_node(store, bus_url, name)
        return BusSession(control, given.bus, node_telemetry(name), commands(name), given.key)

    def work() -> None:
        with Link(session()) as link:
            orders = Commands(link)
            while not stop.is_set():
                for run, command in orders.read(0.05):
                    if isinstance(command, Ask):
                        made.asked.append(command)
                        made.before(command)
                        if not made.deaf:
                            answering.answer(link, name, made.data, run, command)
                if orders.started:
                    started.set()
                if not link.up:  # somebody may have ended its session by asking for another
                    stop.wait(0.05)
                    link.move(session())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        until(started.is_set, f"node {name} to listen")
        yield made
    finally:
        stop.set()
        thread.join(timeout=20)
    assert not thread.is_alive()
