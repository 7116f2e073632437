"""Whether the control plane names a node that is really slow, or that really pauses.

Two nodes are network namespaces of this machine, which needs root and two idle cores. Each has one
rank, which is pinned to a core of its own and computes; nothing is emulated. In each of five runs a
burner, a loop that does nothing, takes half of one rank's core from the start. The control plane
has 100 steps to name the node. Its forecast says what a step would take if the node were as fast as
the other. Then the burner ends, and the steps after that say what is true.

In five further runs one rank computes fifteen steps' work in each 40th step. The control plane has
240 steps to say that it pauses, and how far apart.
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
APART, LONG, PAUSES_WITHIN = 40, 15, 240  # pauses: steps apart, steps' work, steps to be named in
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


def train(cores: dict[str, int], enough: Path, pausing: str) -> None:
    """One rank: trains on its node's core until there is a file `enough`.

    The rank of the node `pausing` computes more than its batch in each 40th step.
    """
    node = json.loads(os.environ["PACELINE_PLACEMENT"])[int(os.environ["RANK"])]
    os.sched_setaffinity(0, {cores[node]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    session = paceline.Session(Data(), global_batch=BATCH, seed=1)
    model, other = session.wrap(network_of_layers()), network_of_layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = session.loader()
    step = 0
    for _ in session.epochs(1_000):
        for batch in loader:
            step += 1
            if node == pausing and step % APART == 0:
                for _ in range(LONG - 1):
                    loss_of(other, batch).backward()
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        ended = [enough.exists()]
        dist.broadcast_object_list(ended)
        if ended[0]:
            break
    session.close()
    dist.destroy_process_group()


def network_of_layers() -> nn.Sequential:
    """What a rank computes."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The loss of a batch of numbers."""
    loss: torch.Tensor = model(batch.float()[:, None].expand(-1, WIDTH)).square().mean()
    return loss


class Run:
    """A run on two nodes, and what the control plane says of it.

    Args:
        cluster: on which the run trains.
        cores: of each node.
        enough: the file that ends the run; not there yet.
        pausing: the node whose rank pauses, or nothing.
    """

    def __init__(
        self, cluster: Cluster, cores: dict[str, int], enough: Path, pausing: str = ""
    ) -> None:
        self._cluster, self._enough = cluster, enough
        body = {
            "name": "burner",
            "script": str(Path(__file__).resolve()),
            "args": ["rank", json.dumps(cores), str(enough), pausing],
            "nproc": 1,
            "nodes_min": 2,
            "nodes_max": 2,
            "join_check": 0,
            "policy": "bsp",
        }
        self._run = str(cluster.api("POST", "/runs", body)["id"])

    def begins(self) -> None:
        """Waits until both ranks train."""
        self._cluster.reaches(self._run, 1, 2)

    def ends(self) -> None:
        """Ends the run."""
        self._enough.touch()
        self._cluster.ends(self._run)

    def step(self) -> int:
        """The newest step."""
        return int(self._cluster.run(self._run)["step"])

    def step_s(self) -> float:
        """Seconds of a step: the median of the next steps."""
        first = self.step() + 5
        last = first + SETTLED
        until(lambda: self.step() > last, "steps to measure", TIMEOUT_S, POLL_S)
        rows = self.api(f"steps?from={first}&to={last}&points={SETTLED + 1}")
        return statistics.median(rows["step_s"])

    def api(self, what: str) -> Any:
        """What the server answers of the run."""
        return self._cluster.api("GET", f"/runs/{self._run}/{what}")


class Round:
    """A run with a burner beside one of its nodes, and what the control plane says.

    Args:
        cluster: on which the run trains.
        cores: of each node.
        node: where the burner is.
        enough: the file that ends the run; not there yet.
    """

    def __init__(self, cluster: Cluster, cores: dict[str, int], node: str, enough: Path) -> None:
        self._node = node
        words = ["taskset", "-c", str(cores[node]), "sh", "-c", "while :; do :; done"]
        self._burner = subprocess.Popen(words)
        self._run = Run(cluster, cores, enough)

    def play(self) -> dict[str, Any]:
        """One row of the results."""
        try:
            self._run.begins()
            named, steps = self._first_verdict()
            saving = self._forecast() if named else None
            before_s = self._run.step_s()
        finally:
            self._burner.kill()
            self._burner.wait()
        after_s = self._run.step_s()
        self._run.ends()
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
        while (now := self._run.step()) <= WITHIN:
            if named := self._named():
                return named, now
            time.sleep(POLL_S)
        return None, now

    def _named(self) -> str | None:
        node: str | None = self._run.api("attribution")["node"]
        return node

    def _forecast(self) -> dict[str, Any] | None:
        """What the forecast says, once it says something; None: the verdict did not last."""
        deadline = time.monotonic() + FORECAST_S
        while time.monotonic() < deadline:
            verdict = self._run.api("attribution")
            if verdict["saving"]:
                saving: dict[str, Any] = verdict["saving"]
                return saving
            time.sleep(POLL_S)
        return None


def pauses(cluster: Cluster, cores: dict[str, int], node: str, enough: Path) -> dict[str, Any]:
    """One row: a run in which the rank of a node pauses, and what is said of it."""
    run = Run(cluster, cores, enough, pausing=node)
    run.begins()
    rank, said = sorted(cores).index(node), None
    while said is None and run.step() <= PAUSES_WITHIN:
        verdict = run.api("verdict")
        kinds = [cause["kind"] for cause in verdict["causes"]]
        if kinds[:1] == ["periodic"]:
            said = verdict["causes"][0]
        time.sleep(POLL_S)
    step = run.step()
    run.ends()
    return {
        "pausing": rank,
        "kinds": kinds,
        "ranks": said and said["ranks"],
        "period": said and said["period"],
        "words": verdict["words"],
        "steps": step,
    }


def main() -> None:
    """Plays the rounds, or is one rank of the run."""
    if sys.argv[1:2] == ["rank"]:
        train(json.loads(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
        return
    options = parser(__doc__).parse_args()
    rounds = 2 if options.quick else ROUNDS
    with (
        tempfile.TemporaryDirectory() as folder,
        network(2) as nodes,
        Cluster(nodes, Path(folder)) as cluster,
    ):
        results, paused = play(cluster, nodes, rounds, Path(folder))
    rows = [json.dumps(row) for row in [*results, *paused]]
    named = sum(row["named"] == row["burner"] for row in results)
    right = sum((row["saving"] or 0) * row["true_saving"] > 0 for row in results)
    steps = statistics.median(row["steps"] for row in results)
    periods = sum(
        row["ranks"] == [row["pausing"]] and abs(row["period"] - APART) <= 1 for row in paused
    )
    checks = [
        Check("rounds in which pauses are named, with rank and distance", periods, rounds, ">="),
        Check("rounds in which the node is named", named, rounds, ">="),
        Check("rounds in which the saving's sign is right", right, rounds, ">="),
        Check("steps until a node is named, median", steps, WITHIN, "<="),
    ]
    config = {"rounds": rounds, "within_steps": WITHIN, "load": os.getloadavg()[0]}
    finish(options, config, {"rounds": results, "pauses": paused}, checks, "\n".join(rows))


def play(
    cluster: Cluster, nodes: Network, rounds: int, folder: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of so many rounds of each kind; one node and the other is slow in turn."""
    cluster.start_agents(1, 2)
    names = [nodes.name(1), nodes.name(2)]
    cores = dict(zip(names, sorted(os.sched_getaffinity(0)), strict=False))
    slow = [
        Round(cluster, cores, names[number % 2], folder / f"enough-{number}").play()
        for number in range(rounds)
    ]
    paused = [
        pauses(cluster, cores, names[number % 2], folder / f"pauses-{number}")
        for number in range(rounds)
    ]
    return slow, paused


if __name__ == "__main__":
    main()
