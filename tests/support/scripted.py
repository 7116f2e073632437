"""Nodes whose agents and ranks say what a test lets them say to a real server, over its bus."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import redis

from paceline.wire import (
    Adopted,
    Message,
    NodeState,
    Plan,
    RunState,
    State,
    StepBatch,
    StepRecord,
    node_telemetry,
    run_telemetry,
)
from paceline.wire.bus import connect, publish
from paceline_backend.testing.control_plane import ControlPlane
from support.records import hello, pack_indices
from support.waiting import until

SAMPLES, BATCH = 64, 8
FAST_S, SLOW_S, REST_S = 0.1, 0.3, 0.01


class Nodes:
    """Agents of nodes that answer until the block of `answering` ends."""

    def __init__(self, server: ControlPlane) -> None:
        self.server = server
        self.bus: redis.Redis = connect(server.api("GET", "/version")["bus"])
        self._runs: dict[str, list[str]] = {}  # by node

    def add(self, *names: str) -> None:
        for name in names:
            self.server.api("POST", f"/nodes/{name}/session", {})
            self._beat(name, [])
        for name in names:
            until(lambda name=name: name in self._known(), f"node {name}", pause_s=0.1)
            self._runs[name] = []

    def _known(self) -> set[str]:
        return {node["id"] for node in self.server.api("GET", "/nodes") if node["alive"]}

    def beat(self) -> None:
        for name, runs in list(self._runs.items()):
            self._beat(name, runs)

    def _beat(self, name: str, runs: list[str]) -> None:
        state = NodeState(name, name, 8, 2**30, [], time.time(), "0.2.0", runs)
        publish(self.bus, node_telemetry(name), state)

    def report(self, node: str, run: str, state: State, **of: Any) -> None:
        self._runs[node] = [run]
        publish(self.bus, node_telemetry(node), RunState(state, time.time(), node, **of), run)


@contextmanager
def answering(server: ControlPlane) -> Iterator[Nodes]:
    nodes, stop = Nodes(server), threading.Event()

    def work() -> None:
        while not stop.wait(1.0):
            nodes.beat()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield nodes
    finally:
        stop.set()
        thread.join()
        nodes.bus.close()


class Training:
    """A run whose ranks, two on each of two nodes, report steps of two samples each.

    Args:
        fields: of `POST /runs`.
    """

    def __init__(self, nodes: Nodes, **fields: Any) -> None:
        self._nodes, self._step = nodes, 0
        body = {"script": "/shared/train.py", "nproc": 2, "policy": "bsp"}
        several = {"nodes_min": 2, "nodes_max": 2}
        self.run = str(nodes.server.api("POST", "/runs", {**body, **several, **fields})["id"])
        names = [row["node"] for row in self.get("/nodes")]
        self.placement = [name for name in names for _ in range(2)]
        for number, name in enumerate(names):
            nodes.report(name, self.run, State.STARTING, address=f"10.0.0.{number}", port=4000)
        until(lambda: self.get()["node"] in names, "a host", pause_s=0.1)
        for name in names:
            nodes.report(name, self.run, State.RUNNING)
        until(lambda: self.get()["state"] == "running", "the run", pause_s=0.1)
        sizes = np.ones(SAMPLES).tobytes()
        self._say(
            hello(
                len(self.placement),
                sizes=sizes,
                global_batch=BATCH,
                epochs=1000,
                placement=self.placement,
                started_at=time.time(),
            )
        )
        self._began = time.time()

    def get(self, path: str = "") -> Any:
        return self._nodes.server.api("GET", f"/runs/{self.run}{path}")

    def _say(self, message: Message) -> None:
        publish(self._nodes.bus, run_telemetry(self.run), message, self.run)

    def train(self, steps: int, *slow: str) -> None:
        """So many further steps, in which these nodes are slow; returns when they are stored."""
        for _ in range(steps // 2):
            self._say(self._segment())
            for _ in range(2):
                self._say(StepBatch(self._records(slow)))
                self._step += 1
        until(lambda: (self.get()["step"] or 0) == self._step - 1, "the steps", pause_s=0.1)

    def _segment(self) -> Adopted:
        world = len(self.placement)
        first = self._step * BATCH % SAMPLES
        parts = [np.array_split(np.arange(at, at + BATCH), world) for at in (first, first + BATCH)]
        counts, indices = pack_indices(parts)
        segment = Plan(
            seq=self._step // 2,
            epoch=self._step * BATCH // SAMPLES,
            first_step=self._step,
            counts=counts,
            indices=indices,
            policy="bsp",
            version=0,
            source="controller",
            epoch_end=first + 2 * BATCH == SAMPLES,
        )
        return Adopted(0, segment, time.time())

    def _records(self, slow: Sequence[str]) -> list[StepRecord]:
        noise = random.Random(self._step)
        compute_s = [
            (SLOW_S if name in slow else FAST_S) * noise.uniform(0.99, 1.01)
            for name in self.placement
        ]
        step_s = max(compute_s) + REST_S
        count = BATCH // len(self.placement)
        return [
            StepRecord(
                attempt=0,
                rank=rank,
                seq=self._step,
                step=self._step,
                epoch=self._step * BATCH // SAMPLES,
                segment=self._step // 2,
                samples=count,
                load=float(count),
                data_s=0.0005,
                compute_s=own_s,
                sync_s=step_s - own_s,
                step_s=step_s,
                ended_at=self._began + 0.32 * self._step,
                squares=float(count),
                longest=1.0,
            )
            for rank, own_s in enumerate(compute_s)
        ]
