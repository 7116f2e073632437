"""Whether the control plane names a node whose processor another program uses, for real.

Two nodes are network namespaces of this machine, which needs root and two idle cores. Each has one
rank, which is pinned to a core of its own and computes; nothing is emulated. In each of five runs a
burner, a loop that does nothing, takes half of one rank's core from the start. The control plane
has 100 steps to name the node. Its forecast says what a step would take if the node were as fast as
the other. Then the burner ends, and the steps after that say what is true.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Check, finish, parser
from torch import nn

import paceline

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.machines import Cluster
from support.network import Network, network
from support.waiting import until

ROUNDS, WITHIN, SETTLED = 5, 100, 30  # rounds, steps to be named in, steps that are measured
SAMPLES, BATCH, WIDTH, LAYERS = 409_600, 8_192, 256, 6  # a step is nearly all computing
TIMEOUT_S = 240.0
FORECAST_S = 60.0
POLL_S = 1.0  # to answer takes the server time on the same cores


class Data(torch.utils.data.Dataset[float]):
    """Samples that cost the same."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> float:
        return index / SAMPLES


def train(cores: dict[str, int], enough: Path) -> None:
    """One rank: trains on its node's core until there is a file `enough`."""
    node = json.loads(os.environ["PACELINE_PLACEMENT"])[int(os.environ["RANK"])]
    os.sched_setaffinity(0, {cores[node]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    session = paceline.Session(Data(), global_batch=BATCH, seed=1)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = session.wrap(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = session.loader()
    for _ in session.epochs(1_000):
        for batch in loader:
            optimizer.zero_grad()
            model(batch.float()[:, None].expand(-1, WIDTH)).square().mean().backward()
            optimizer.step()
        ended = [enough.exists()]
        dist.broadcast_object_list(ended)
        if ended[0]:
            break
    session.close()
    dist.destroy_process_group()


class Round:
    """A run with a burner beside one of its nodes, and what the control plane says.

    Args:
        cluster: on which the run trains.
        cores: of each node.
        node: where the burner is.
        enough: the file that ends the run; not there yet.
    """

    def __init__(self, cluster: Cluster, cores: dict[str, int], node: str, enough: Path) -> None:
        self._cluster, self._node, self._enough = cluster, node, enough
        words = ["taskset", "-c", str(cores[node]), "sh", "-c", "while :; do :; done"]
        self._burner = subprocess.Popen(words)
        body = {
            "name": "burner",
            "script": str(Path(__file__).resolve()),
            "args": ["rank", json.dumps(cores), str(enough)],
            "nproc": 1,
            "nodes_min": 2,
            "nodes_max": 2,
            "join_check": 0,
            "policy": "bsp",
        }
        self._run = str(cluster.api("POST", "/runs", body)["id"])

    def play(self) -> dict[str, Any]:
        """One row of the results."""
        try:
            self._cluster.reaches(self._run, 1, 2)
            named, steps = self._first_verdict()
            saving = self._forecast() if named else None
            before_s = self._step_s()
        finally:
            self._burner.kill()
            self._burner.wait()
        after_s = self._step_s()
        self._enough.touch()
        self._cluster.ends(self._run)
        return {
            "burner": self._node,
            "named": named,
            "steps": steps,
            "saving": saving and saving["saving"],
            "saving_low": saving and saving["saving_low"],
            "true_saving": round(1 - after_s / before_s, 3),
            "before_s": round(before_s, 4),
            "after_s": round(after_s, 4),
        }

    def _first_verdict(self) -> tuple[str | None, int]:
        while (now := self._step()) <= WITHIN:
            if named := self._named():
                return named, now
            time.sleep(POLL_S)
        return None, now

    def _named(self) -> str | None:
        node: str | None = self._api("attribution")["node"]
        return node

    def _forecast(self) -> dict[str, Any] | None:
        """What the forecast says, once it says something; None: the verdict did not last."""
        deadline = time.monotonic() + FORECAST_S
        while time.monotonic() < deadline:
            verdict = self._api("attribution")
            if verdict["saving"]:
                saving: dict[str, Any] = verdict["saving"]
                return saving
            time.sleep(POLL_S)
        return None

    def _step(self) -> int:
        return int(self._cluster.run(self._run)["step"])

    def _step_s(self) -> float:
        """Seconds of a step: the median of the next steps."""
        first = self._step() + 5
        last = first + SETTLED
        until(lambda: self._step() > last, "steps to measure", TIMEOUT_S, POLL_S)
        rows = self._api(f"steps?from={first}&to={last}&points={SETTLED + 1}")
        return statistics.median(rows["step_s"])

    def _api(self, what: str) -> Any:
        return self._cluster.api("GET", f"/runs/{self._run}/{what}")


def main() -> None:
    """Plays the rounds, or is one rank of the run."""
    if sys.argv[1:2] == ["rank"]:
        train(json.loads(sys.argv[2]), Path(sys.argv[3]))
        return
    options = parser(__doc__).parse_args()
    rounds = 2 if options.quick else ROUNDS
    with (
        tempfile.TemporaryDirectory() as folder,
        network(2) as nodes,
        Cluster(nodes, Path(folder)) as cluster,
    ):
        results = play(cluster, nodes, rounds, Path(folder))
    rows = [json.dumps(row) for row in results]
    named = sum(row["named"] == row["burner"] for row in results)
    right = sum((row["saving"] or 0) * row["true_saving"] > 0 for row in results)
    steps = statistics.median(row["steps"] for row in results)
    checks = [
        Check("rounds in which the node is named", named, rounds, ">="),
        Check("rounds in which the saving's sign is right", right, rounds, ">="),
        Check("steps until a node is named, median", steps, WITHIN, "<="),
    ]
    config = {"rounds": rounds, "within_steps": WITHIN, "load": os.getloadavg()[0]}
    finish(options, config, {"rounds": results}, checks, "\n".join(rows))


def play(cluster: Cluster, nodes: Network, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """The rows of so many rounds; the burner is beside one node and the other in turn."""
    cluster.start_agents(1, 2)
    names = [nodes.name(1), nodes.name(2)]
    cores = dict(zip(names, sorted(os.sched_getaffinity(0)), strict=False))
    return [
        Round(cluster, cores, names[number % 2], folder / f"enough-{number}").play()
        for number in range(rounds)
    ]


if __name__ == "__main__":
    main()
