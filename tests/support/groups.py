"""Nodes with agents that only report, and runs that were launched on several of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import redis

from paceline.wire import Message, NodeState, RunState, State, commands, decode
from paceline_backend import requests
from paceline_backend.store import Store, nodes, runs, telemetry, tokens
from paceline_backend.store.audit import RequestedChange, Requester
from paceline_backend.store.new_runs import NewRun
from paceline_backend.store.nodes import run_nodes

ME = Requester("me")
GONE = "the rendezvous at 10.0.0.1:4001 is gone"


def answer(
    store: Store, *names: str, signed: bool = True, left: bool = False, run: str | None = None
) -> None:
    """Agents of nodes are there, or say goodbye; with the token of a run if one is given."""
    token = None if run is None else tokens.of_run(store, run).id
    with store.write() as connection:
        for name in names if signed else ():
            nodes.expect(connection, name, token, run)
    states = [NodeState(name, name, 8, 2**30, [], time.time(), "0.2.0", [], left) for name in names]
    telemetry.write(store, [("", state) for state in states])


def launch(store: Store, bus_url: str, least: int = 1, most: int = 3, **fields: Any) -> str:
    new = NewRun("r", "train.py", 2, "bsp", nodes_min=least, nodes_max=most, **fields)
    return requests.launch(store, bus_url, new, ME, start=True)


def report(store: Store, run: str, node: str, state: State, attempt: int = 0, **of: Any) -> None:
    at = of.pop("at", time.time())
    telemetry.write(store, [(run, RunState(state, at, node, attempt, **of))])


def ready(store: Store, run: str, node: str, attempt: int = 0) -> None:
    """A node starts, and says where it would serve the rendezvous."""
    place = {"address": f"10.0.0.{node[-1]}", "port": 4000 + int(node[-1])}
    report(store, run, node, State.STARTING, attempt, **place)


def states(store: Store, run: str) -> dict[str, str]:
    with store.read() as connection:
        rows = run_nodes.listed(connection, runs.key_of(connection, run))
    return {row["node"]: row["state"] for row in rows}


def orders(bus: redis.Redis, node: str) -> list[Message]:
    entries: Any = bus.xrange(commands(node))
    return [decode(fields)[1] for _, fields in entries]


class ReportedRuns:
    """The above over one database and one bus."""

    by = ME

    def __init__(self, store: Store, bus: redis.Redis, bus_url: str) -> None:
        self.store, self.bus, self.bus_url = store, bus, bus_url
        self.answer = partial(answer, store)
        self.launch = partial(launch, store, bus_url)
        self.report = partial(report, store)
        self.ready = partial(ready, store)
        self.states = partial(states, store)
        self.row = partial(runs.get, store)
        self.orders = partial(orders, bus)

    def ask(self, change: Callable[..., Any], run: str, *rest: Any, **options: Any) -> Any:
        return change(self.store, self.bus_url, RequestedChange(run, self.by), *rest, **options)
