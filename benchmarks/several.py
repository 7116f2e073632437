"""How soon a run on three nodes trains again after a node joins, leaves or is lost.

Nodes are network namespaces of this machine, which needs root, and share its cores. A small model
takes 0.1 s a step and is saved every second step. Seconds count from the event until a step of the
new attempt is complete on all ranks, as the ranks themselves write it down. Training stands still
for less: from the last step of the attempt before.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from harness import Check, finish, parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.machines import Cluster
from support.network import network

_MOST_S = 300.0
_BOUND_S = 10.0  # of what nodes do in order
_STILL_S, _AGAIN = 5.0, 2  # of which training stands still; steps that are done again


class Training:
    """A run on up to three nodes, and what its ranks write down.

    Args:
        cluster: whose nodes 1, 2 and 3 have agents.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.run = cluster.start_run(1, 3, 100_000)
        self._wait(lambda: self._complete(-1, 3))

    def steps(self) -> dict[int, dict[int, set[str]]]:
        """By attempt and step, the ranks that have done it."""
        done: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for path in self.cluster.shared.glob("steps-*"):
            for line in path.read_text().split("\n")[:-1]:
                row = json.loads(line)
                if isinstance(row, list):
                    done[row[0]][row[1]].add(path.name)
        return done

    def _complete(self, attempt: int, world: int) -> int | None:
        """A later attempt that has done a step on all of so many ranks."""
        for later, steps in sorted(self.steps().items(), reverse=True):
            if later > attempt and any(len(ranks) == world for ranks in steps.values()):
                return later
        return None

    def _wait(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + _MOST_S
        while (value := condition()) is None or value is False:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.cluster.run(self.run)}")
            time.sleep(0.02)
        return value

    def after(self, event: Callable[[], object], world: int) -> dict[str, Any]:
        """What follows an event that leaves so many ranks."""
        before = max(self.steps())
        begun = still_since = time.monotonic()
        reached = -1

        def complete() -> int | None:
            nonlocal still_since, reached
            newest = max(step for step in self.steps()[before])
            if newest > reached:
                still_since, reached = time.monotonic(), newest
            return self._complete(before, world)

        event()
        attempt = self._wait(complete)
        ended = time.monotonic()
        done = self.steps()
        reached = max(step for number, steps in done.items() if number <= before for step in steps)
        again = reached + 1 - min(done[attempt])
        shown = {row["node"]: row for row in self.cluster.api("GET", f"/runs/{self.run}/nodes")}
        training = [row["attempt"] for row in shown.values() if row["state"] == "running"]
        return {
            "seconds": ended - begun,
            "still_s": ended - still_since,
            "load": os.getloadavg()[0],
            "steps_again": max(0, again),
            "attempts_equal": self._settled(attempt, world) or training == [attempt] * world,
        }

    def _settled(self, attempt: int, world: int) -> bool:
        """Whether each rank of the attempt gives it the same number, as all do that take part."""
        ranks = {rank for ranks in self.steps()[attempt].values() for rank in ranks}
        return len(ranks) == world

    def host(self) -> int:
        """The node that serves the rendezvous."""
        name = self._wait(lambda: self.cluster.run(self.run)["node"])
        return next(node for node in (1, 2, 3) if self.cluster.network.name(node) == name)

    def other(self) -> int:
        """A node that does not."""
        return next(node for node in (3, 2, 1) if node != self.host())

    def join(self, node: int) -> dict[str, Any]:
        """A node joins; its agent runs."""
        body = {"nodes": [self.cluster.network.name(node)]}
        self._wait(lambda: self._ended(node))
        return self.after(
            lambda: self.cluster.api("POST", f"/runs/{self.run}/nodes", body), world=3
        )

    def _ended(self, node: int) -> bool:
        rows = self.cluster.api("GET", f"/runs/{self.run}/nodes")
        name = self.cluster.network.name(node)
        final = ("finished", "failed", "stopped")
        return all(row["state"] in final for row in rows if row["node"] == name)

    def kill_launcher(self, node: int) -> None:
        """SIGKILL of a node's launcher, whose ranks end with it."""
        agent = psutil.Process(self.cluster.agents[node].pid)
        for child in agent.children(recursive=True):
            if "paceline.node.elastic.launcher" in child.cmdline():
                child.kill()
                return
        raise RuntimeError(f"node {node} has no launcher")

    def restart_server(self) -> dict[str, Any]:
        """The control plane is killed and comes back; training goes on meanwhile."""
        before = len(self.steps())
        self.cluster.kill_server()
        known = max(max(steps) for steps in self.steps().values())
        begun = time.monotonic()
        self.cluster.start_server()
        self._wait(lambda: (self.cluster.run(self.run)["step"] or 0) > known)
        seconds = time.monotonic() - begun
        return {
            "seconds": seconds,
            "still_s": 0.0,
            "load": os.getloadavg()[0],
            "steps_again": 0 if len(self.steps()) == before else 1,
            "attempts_equal": True,
        }


def events(training: Training) -> Iterator[tuple[str, dict[str, Any]]]:
    """All events once; three nodes train again afterwards."""
    cluster = training.cluster

    def end(number: signal.Signals) -> Callable[[int], None]:
        return lambda node: cluster.end_agent(node, number)

    leaves: list[tuple[str, Callable[[], int], Callable[[int], None]]] = [
        ("leave (SIGTERM)", training.other, end(signal.SIGTERM)),
        ("launcher killed", training.other, training.kill_launcher),
        ("agent killed", training.other, end(signal.SIGKILL)),
        ("host killed", training.host, end(signal.SIGKILL)),
    ]
    for name, chosen, event in leaves:
        node = chosen()
        yield name, training.after(partial(event, node), world=2)
        if node not in cluster.agents:
            cluster.start_agents(node)
        yield "join", training.join(node)
    yield "control plane killed", training.restart_server()


def main() -> None:
    """Runs the benchmark."""
    options = parser(__doc__).parse_args()
    rounds = 1 if options.quick else 3
    by_event: dict[str, list[dict[str, Any]]] = defaultdict(list)
    folder = Path(tempfile.mkdtemp())
    with network(3) as nodes, Cluster(nodes, folder) as cluster:
        cluster.start_agents(1, 2, 3)
        training = Training(cluster)
        for _ in range(rounds):
            for name, row in events(training):
                by_event[name].append(row)
                print(f"{name}: {row}", file=sys.stderr, flush=True)
        cluster.api("POST", f"/runs/{training.run}/stop", {"force": True})
        cluster.ends(training.run)
    shutil.rmtree(folder, ignore_errors=True)
    results = {name: _summary(rows) for name, rows in by_event.items()}
    checks = []
    for name in ("join", "leave (SIGTERM)"):
        checks += [
            Check(f"{name}, s", results[name]["median_s"], _BOUND_S, "<="),
            Check(f"{name}, standing still, s", results[name]["still_s"], _STILL_S, "<="),
            Check(f"{name}, steps again", results[name]["steps_again"], _AGAIN, "<="),
        ]
    odd = sum(not row["attempts_equal"] for rows in by_event.values() for row in rows)
    checks.append(Check("attempts that ranks number differently", odd, 0, "<="))
    table = "\n".join(
        f"{name:22} {result['median_s']:6.1f} s, standing still {result['still_s']:.1f} s, "
        f"{result['steps_again']:g} steps again, load average {result['load']:.1f}"
        for name, result in results.items()
    )
    finish(options, {"nodes": 3, "rounds": rounds}, results, checks, table)


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "median_s": statistics.median(row["seconds"] for row in rows),
        **{
            name: statistics.median(row[name] for row in rows)
            for name in ("still_s", "steps_again", "load")
        },
        "rows": rows,
    }


if __name__ == "__main__":
    main()
