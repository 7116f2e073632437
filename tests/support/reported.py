"""Nodes as their agents report them, and what an operator asks of them over REST."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx

from paceline.wire import NodeCheck, NodeState, State
from paceline_backend.store import Store, nodes, telemetry
from support import groups
from support.records import hello

FINE = NodeCheck(40.0, 10.0, 500.0, 1_000.0)


def computes(gflops: float) -> NodeCheck:
    """A machine that is fine but for its arithmetic."""
    return NodeCheck(gflops, FINE.memory_gbps, FINE.disk_mbps, 1_000.0)


def copies(gbps: float) -> NodeCheck:
    """A machine that is fine but for its memory."""
    return NodeCheck(FINE.compute_gflops, gbps, FINE.disk_mbps, 1_000.0)


@dataclass
class Plane:
    """A control plane whose nodes say what a test lets them say."""

    store: Store
    bus_url: str
    client: httpx.Client

    @property
    def url(self) -> str:
        return str(self.client.base_url.join("/")).rstrip("/")

    def have(self, *runs: str, **checks: NodeCheck | float | None) -> None:
        """Agents answer on these nodes."""
        for name, check in checks.items():
            measured = computes(check) if isinstance(check, int | float) else check
            state = NodeState(
                name, name, 8, 2**30, [], time.time(), "0.2.0", [*runs], False, check=measured
            )
            telemetry.write(self.store, [("", state)])
            with self.store.write() as connection:
                nodes.expect(connection, name)

    def ask(self, method: str, path: str, **json: Any) -> httpx.Response:
        body = None if method in ("GET", "DELETE") else json
        return self.client.request(method, path, json=body)

    def get(self, path: str) -> Any:
        answer = self.client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def start(self, **fields: Any) -> httpx.Response:
        return self.ask("POST", "runs", **({"script": "/shared/train.py", "nproc": 1} | fields))

    def node(self, name: str) -> dict[str, Any]:
        return next(node for node in self.get("nodes") if node["id"] == name)

    def on(self, run: str) -> set[str]:
        """The nodes that a run was launched on, and that are to stay."""
        return {row["node"] for row in self.get(f"runs/{run}/nodes") if not row["leaving"]}

    def training(self, *names: str, least: int = 1, most: int = 2, **fields: Any) -> str:
        answer = self.start(nodes_min=least, nodes_max=most, **fields)
        assert answer.status_code == 201, answer.text
        run = str(answer.json()["id"])
        assert self.on(run) == set(names)
        for name in names:
            groups.ready(self.store, run, name)
        for name in names:
            groups.report(self.store, run, name, State.RUNNING)
        said = hello(len(names), placement=list(names))
        telemetry.write(self.store, [(run, said)])
        return run
